"""Optimizers, gradient clipping and learning-rate schedules."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from shoestring.core.errors import ConfigError
from shoestring.core.feature import Feature, Phase, Seam

if TYPE_CHECKING:
    from shoestring.core.job import Job

__all__ = ["SGD", "AdamW", "Clip", "Schedule"]


@dataclass(frozen=True, kw_only=True)
class AdamW(Feature):
    """AdamW (Loshchilov and Hutter, 2019), by torch's fused kernel; the default optimizer."""

    lr: float = 1e-3
    """Learning rate before any schedule."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the averages of the gradient and of its square."""
    eps: float = 1e-8
    """Added to the root of the second average."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices and larger tensors; biases and norms do not decay."""

    seams: ClassVar = (Seam.OPTIM,)

    def check(self, job: Job) -> None:
        _positive(self, "lr", "eps")
        _at_least_zero(self, "weight_decay")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"`{self.name}.betas` must lie in [0, 1), got {list(self.betas)}")

    def apply(self, job: Job, seam: Seam) -> None:
        from shoestring.optim.standard import adamw

        job.build_with(adamw(self))


@dataclass(frozen=True, kw_only=True)
class SGD(Feature):
    """Stochastic gradient descent with momentum."""

    lr: float = 0.1
    """Learning rate before any schedule."""
    momentum: float = 0.9
    """Decay of the velocity."""
    nesterov: bool = True
    """Look ahead along the velocity."""
    weight_decay: float = 0.0
    """Decay of matrices and larger tensors, added to the gradient; biases and norms do not decay."""

    seams: ClassVar = (Seam.OPTIM,)

    def check(self, job: Job) -> None:
        _positive(self, "lr")
        _at_least_zero(self, "weight_decay", "momentum")

    def apply(self, job: Job, seam: Seam) -> None:
        from shoestring.optim.standard import sgd

        job.build_with(sgd(self))


@dataclass(frozen=True, kw_only=True)
class Clip(Feature):
    """Scale all gradients down together where their norm exceeds a bound (Pascanu et al., 2013)."""

    max_norm: float = 1.0
    """Bound of the 2-norm over all gradients and ranks; `inf` only measures it."""

    seams: ClassVar = (Seam.STEP,)

    def check(self, job: Job) -> None:
        if self.max_norm != math.inf:
            _positive(self, "max_norm")

    def apply(self, job: Job, seam: Seam) -> None:
        from shoestring.optim.clip import clipper

        job.at(Phase.CLIP, clipper(job, self.max_norm))


Clip.neutral = Clip(max_norm=math.inf)


@dataclass(frozen=True, kw_only=True)
class Schedule(Feature):
    """Warm-up, then a decay of the learning rate over the run's steps."""

    shape: Literal["cosine", "trapezoid", "constant"] = "cosine"
    """`cosine` decays from the end of the warm-up; `trapezoid` stays level, then decays linearly in the cool-down."""
    warmup: int = 100
    """Steps of linear rise from 0."""
    cooldown: float = 0.2
    """Share of the steps that a trapezoid decays in."""
    final: float = 0.1
    """Share of the learning rate that is left at the end."""

    seams: ClassVar = (Seam.STEP,)

    def check(self, job: Job) -> None:
        _at_least_zero(self, "warmup", "cooldown", "final")
        for name in ("cooldown", "final"):
            if getattr(self, name) > 1:
                raise ConfigError(f"`{self.name}.{name}` is a share and must lie in [0, 1], got {getattr(self, name)}")
        if job.progress.total and self.shape != "constant" and self.warmup >= job.progress.total:
            raise ConfigError(
                f"`{self.name}.warmup` of {self.warmup} steps leaves nothing of a run of {job.progress.total}",
                hint=f"set it to {max(1, job.progress.total // 20)}",
            )

    def apply(self, job: Job, seam: Seam) -> None:
        from shoestring.optim.schedule import follow

        job.at(Phase.RATE, follow(job, self))

    def factor(self, step: float, total: int) -> float:
        """What the learning rate of step `step` (from 0) of `total` is multiplied by; a total of 0 is not known yet."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.shape == "constant" or not total:
            return 1.0
        if self.shape == "cosine":
            done = min((step - self.warmup) / max(total - self.warmup, 1), 1.0)
            return self.final + (1 - self.final) * (1 + math.cos(math.pi * done)) / 2
        left = (total - step) / max(self.cooldown * total, 1)
        return self.final + (1 - self.final) * min(max(left, 0.0), 1.0)


Schedule.neutral = Schedule(shape="constant", warmup=0)


def _positive(feature: Feature, *names: str) -> None:
    for name in names:
        if not 0 < getattr(feature, name) < math.inf:
            raise ConfigError(f"`{feature.name}.{name}` must be a positive number, got {getattr(feature, name)}")


def _at_least_zero(feature: Feature, *names: str) -> None:
    for name in names:
        if not 0 <= getattr(feature, name) < math.inf:
            raise ConfigError(f"`{feature.name}.{name}` must be zero or positive, got {getattr(feature, name)}")
