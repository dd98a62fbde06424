"""Optimizers that orthogonalise the steps of matrices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from shoestring.core.errors import ConfigError
from shoestring.core.feature import Feature, Seam
from shoestring.optim.groups import Group, check_groups
from shoestring.optim.settings.ranges import at_least_zero, betas_below_one, positive

if TYPE_CHECKING:
    from shoestring.core.job import Job


@dataclass(frozen=True, kw_only=True)
class Muon(Feature):
    """Momentum whose step is orthogonalised, for matrices (Jordan et al., 2024); AdamW for everything else.

    Everything else is embeddings, output heads, biases, norms, and what `adamw` names.
    """

    lr: float = 2e-3
    """Learning rate of matrices before any schedule."""
    adamw_lr: float = 0.0
    """Learning rate of everything else; 0 takes `lr`."""
    momentum: float = 0.95
    """Decay rate of the velocity."""
    nesterov: bool = True
    """Evaluate the gradient ahead along the velocity (Nesterov momentum)."""
    iterations: int = 5
    """Newton-Schulz iterations; each takes three products of a matrix's size."""
    match_adamw: bool = True
    """Scale steps to the size that AdamW's have (Liu et al., 2025), so that its learning rate and weight decay serve;
    otherwise by the root of rows over columns where that is above 1, as the first Muon did."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices and larger tensors; biases and norms do not decay."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's running averages of the gradient and of its square."""
    eps: float = 1e-8
    """Constant added to the root of AdamW's second average, against division by zero."""
    adamw: tuple[str, ...] = ()
    """Names of more parameters that AdamW takes, with the wildcards `*` and `?`."""
    share: bool = False
    """Whether replicas divide the matrices among them and send each other the steps: less arithmetic, more traffic.
    Ranks that hold parts of a matrix do so in any case."""
    groups: tuple[Group, ...] = ()
    """Tables with `pattern`, `lr_scale` and `decay_scale` for parameters by name; the first that matches counts."""

    seams: ClassVar = (Seam.OPTIM,)

    def check(self, job: Job) -> None:
        positive(self, "lr", "eps")
        at_least_zero(self, "adamw_lr", "momentum", "weight_decay")
        betas_below_one(self, self.betas)
        if self.iterations < 1:
            raise ConfigError(f"`{self.name}.iterations` must be at least 1, got {self.iterations}")
        check_groups(self, self.groups, job)

    def apply(self, job: Job, seam: Seam) -> None:
        from shoestring.optim.muon import build_muon

        build_muon(job, self)
