"""Base classes of the optimizers' settings, which define the fields that several optimizers share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shoestring.core.feature import Feature, Seam
from shoestring.optim.settings.groups import Group


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings(Feature):
    """Base class of all optimizers' settings."""

    lr: float = 1e-3
    """Learning rate before any schedule."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices and larger tensors; biases and norms do not decay."""
    groups: tuple[Group, ...] = ()
    """Tables with `pattern`, `lr_scale`, `decay_scale` and, in AdamW and Muon, `betas`, which adjust parameters by
    name; the first match applies."""

    seams: ClassVar = (Seam.OPTIM,)


@dataclass(frozen=True, kw_only=True)
class AdamSettings(OptimizerSettings):
    """Base class of the settings of optimizers with Adam's two running averages."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the running averages of the gradient and of its square."""
    eps: float = 1e-8
    """Constant added to the root of the average of squared gradients, against division by zero."""


@dataclass(frozen=True, kw_only=True)
class MomentumSettings(OptimizerSettings):
    """Base class of the settings of optimizers with a velocity."""

    momentum: float = 0.9
    """Decay rate of the velocity; 0 turns momentum off, and needs `nesterov = false`."""
    nesterov: bool = True
    """Evaluate the gradient ahead along the velocity (Nesterov momentum)."""
