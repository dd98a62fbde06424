"""What happens to gradients and learning rates around the optimizer's step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from shoestring.core.errors import ConfigError
from shoestring.core.feature import Feature, Phase, Seam
from shoestring.naming import resolve
from shoestring.optim.settings.ranges import at_least_zero, positive

if TYPE_CHECKING:
    from shoestring.core.job import Job


@dataclass(frozen=True, kw_only=True)
class Clip(Feature):
    """Scale all gradients down together where their norm exceeds a bound (Pascanu et al., 2013)."""

    max_norm: float = 1.0
    """Upper bound of the 2-norm of all gradients together; `inf` only measures the norm."""

    seams: ClassVar = (Seam.STEP,)

    def check(self, job: Job) -> None:
        if self.max_norm != math.inf:
            positive(self, "max_norm")

    def apply(self, job: Job, seam: Seam) -> None:
        from shoestring.optim.clip import clipper

        job.at(Phase.CLIP, clipper(job, self.max_norm))


Clip.neutral = Clip(max_norm=math.inf)


@dataclass(frozen=True, kw_only=True)
class Schedule(Feature):
    """Linear warm-up of the learning rate, then its decay over the steps of the run."""

    shape: Literal["cosine", "trapezoid", "constant"] = "cosine"
    """Shape of the decay: `cosine` begins after the warm-up; `trapezoid` is level, then linear in the cool-down."""
    warmup: int = 100
    """Steps of the linear warm-up from 0."""
    cooldown: float = 0.2
    """Fraction of all steps in which a `trapezoid` decays."""
    final: float = 0.1
    """Learning rate after the last step, as a fraction of the highest one."""
    function: str = ""
    """Schedule of your own, `package.module:callable` from (step, total steps) to the factor of the learning rate; used
    in place of all other settings here."""

    seams: ClassVar = (Seam.STEP,)

    def check(self, job: Job) -> None:
        at_least_zero(self, "warmup", "cooldown", "final")
        if self.function:
            _check_factor(self.factor(0, job.progress.total), self.function)
            return
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

        job.at(Phase.RATE, follow(job, self.factor))

    def explain(self, job: Job) -> str:
        return f"by `{self.function}`" if self.function else ""

    def factor(self, step: float, total: int) -> float:
        """Factor of the learning rate in step `step` (from 0) of `total`; a total of 0 is not known yet."""
        if self.function:
            return resolve(self.function, f"{self.name}.function")(step, total)
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


def _check_factor(factor: object, function: str) -> None:
    if not isinstance(factor, int | float) or not 0 <= factor < math.inf:
        said = f"`optim.schedule.function`: `{function}` returned {factor!r} for the first step"
        raise ConfigError(said, hint="return the factor of the learning rate, zero or a positive number")
