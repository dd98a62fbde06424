"""Settings of torch's own optimizers, AdamW and SGD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoestring.optim.settings.bases import AdamSettings, MomentumSettings
from shoestring.optim.settings.groups import check_groups
from shoestring.optim.settings.ranges import at_least_zero, betas_below_one, momentum_of_nesterov, positive

if TYPE_CHECKING:
    from shoestring.core.attachments import Attachments
    from shoestring.core.feature import Seam


@dataclass(frozen=True, kw_only=True)
class AdamW(AdamSettings):
    """AdamW (Loshchilov and Hutter, 2019), by torch's fused kernel; the default optimizer."""

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
class SGD(MomentumSettings):
    """Stochastic gradient descent with momentum."""

    lr: float = 0.1
    """Learning rate before any schedule."""
    weight_decay: float = 0.0
    """Weight decay of matrices and larger tensors, added to the gradient; biases and norms do not decay."""

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
