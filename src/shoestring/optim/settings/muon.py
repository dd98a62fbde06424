"""Settings of Muon, which orthogonalises the steps of matrices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoestring.core.errors import ConfigError
from shoestring.optim.settings.bases import AdamSettings, MomentumSettings
from shoestring.optim.settings.groups import check_groups
from shoestring.optim.settings.ranges import at_least_zero, betas_below_one, momentum_of_nesterov, positive

if TYPE_CHECKING:
    from shoestring.core.attachments import Attachments
    from shoestring.core.feature import Seam


@dataclass(frozen=True, kw_only=True)
class Muon(MomentumSettings, AdamSettings):
    """Orthogonalised momentum for matrices (Jordan et al., 2024), and AdamW for all other parameters.

    AdamW updates embeddings, output heads, biases, norms, and the parameters that `adamw` names.
    """

    lr: float = 2e-3
    """Learning rate of matrices before any schedule."""
    adamw_lr: float = 0.0
    """Learning rate of the parameters that AdamW updates; 0 takes `lr`."""
    momentum: float = 0.95
    """Decay rate of the velocity."""
    iterations: int = 5
    """Number of Newton-Schulz iterations per step; each takes three matrix products."""
    match_adamw: bool = True
    """Scale steps to the size of AdamW's steps (Liu et al., 2025), so that AdamW's learning rate and weight decay can
    be used; if false, scale by sqrt(max(1, rows / columns)), as the original Muon does."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's running averages of the gradient and of its square."""
    eps: float = 1e-8
    """Constant added to the root of AdamW's average of squared gradients, against division by zero."""
    adamw: tuple[str, ...] = ()
    """Names of further parameters that AdamW updates, with the wildcards `*` and `?`."""
    share_steps: bool = False
    """Whether replicas divide the matrices among them and send each other the steps: less arithmetic, more traffic.
    Ranks that hold shards of a matrix always divide the work."""

    def check(self, attachments: Attachments) -> None:
        positive(self, "lr", "eps")
        at_least_zero(self, "adamw_lr", "momentum", "weight_decay")
        momentum_of_nesterov(self)
        betas_below_one(self, self.betas)
        if self.iterations < 1:
            raise ConfigError(f"`{self.name}.iterations` must be at least 1, got {self.iterations}")
        check_groups(self, self.groups, attachments, betas=True)
        if not any(feature.adds_parameters for feature in attachments.features):  # added parameters do not exist yet
            from shoestring.optim.muon import matrices_of

            matrices_of(attachments, self)

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        from shoestring.optim.muon import build_muon

        build_muon(attachments, self)
