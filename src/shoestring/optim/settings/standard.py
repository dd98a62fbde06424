"""Settings of torch's own optimizers, AdamW and SGD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from shoestring.core.feature import Feature, Seam
from shoestring.optim.groups import Group, check_groups
from shoestring.optim.settings.ranges import at_least_zero, betas_below_one, momentum_of_nesterov, positive

if TYPE_CHECKING:
    from shoestring.core.attachments import Attachments


@dataclass(frozen=True, kw_only=True)
class AdamW(Feature):
    """AdamW (Loshchilov and Hutter, 2019), by torch's fused kernel; the default optimizer."""

    lr: float = 1e-3
    """Learning rate before any schedule."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the running averages of the gradient and of its square."""
    eps: float = 1e-8
    """Constant added to the root of the average of squared gradients, against division by zero."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices and larger tensors; biases and norms do not decay."""
    groups: tuple[Group, ...] = ()
    """Tables with `pattern`, `lr_scale`, `decay_scale` and `betas`, which adjust parameters by name; the first match
    applies."""

    seams: ClassVar = (Seam.OPTIM,)

    def check(self, attachments: Attachments) -> None:
        positive(self, "lr", "eps")
        at_least_zero(self, "weight_decay")
        betas_below_one(self, self.betas)
        check_groups(self, self.groups, attachments, betas=True)

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        import torch

        from shoestring.optim.standard import factory

        settings = {"lr": self.lr, "betas": self.betas, "eps": self.eps}
        attachments.build_with(factory(torch.optim.AdamW, attachments, self.weight_decay, self.groups, settings))


@dataclass(frozen=True, kw_only=True)
class SGD(Feature):
    """Stochastic gradient descent with momentum."""

    lr: float = 0.1
    """Learning rate before any schedule."""
    momentum: float = 0.9
    """Decay rate of the velocity; 0 turns momentum off, and needs `nesterov = false`."""
    nesterov: bool = True
    """Evaluate the gradient ahead along the velocity (Nesterov momentum)."""
    weight_decay: float = 0.0
    """Weight decay of matrices and larger tensors, added to the gradient; biases and norms do not decay."""
    groups: tuple[Group, ...] = ()
    """Tables with `pattern`, `lr_scale` and `decay_scale`, which adjust parameters by name; the first match applies."""

    seams: ClassVar = (Seam.OPTIM,)

    def check(self, attachments: Attachments) -> None:
        positive(self, "lr")
        at_least_zero(self, "weight_decay", "momentum")
        momentum_of_nesterov(self)
        check_groups(self, self.groups, attachments)

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        import torch

        from shoestring.optim.standard import factory

        settings = {"lr": self.lr, "momentum": self.momentum, "nesterov": self.nesterov}
        attachments.build_with(factory(torch.optim.SGD, attachments, self.weight_decay, self.groups, settings))
