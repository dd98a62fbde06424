"""Settings of gradient clipping and of the learning-rate schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from shoestring.core.errors import ConfigError
from shoestring.core.feature import Feature, Phase, Seam
from shoestring.naming import resolve
from shoestring.optim.settings.ranges import at_least_zero, positive

if TYPE_CHECKING:
    from shoestring.core.attachments import Attachments


@dataclass(frozen=True, kw_only=True)
class Clip(Feature):
    """Clip gradients: scale all of them down by one factor if their global norm exceeds a bound (Pascanu et al.,
    2013)."""

    max_norm: float = 1.0
    """Upper bound of the global norm, the 2-norm of all gradients together; `inf` only measures the norm."""

    seams: ClassVar = (Seam.STEP,)

    def check(self, attachments: Attachments) -> None:
        if self.max_norm != math.inf:
            positive(self, "max_norm")

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        from shoestring.optim.clip import clipper

        attachments.at(Phase.CLIP, clipper(attachments, self.max_norm))


Clip.neutral = Clip(max_norm=math.inf)


@dataclass(frozen=True, kw_only=True)
class Schedule(Feature):
    """Learning-rate schedule: a linear warm-up, then a decay over the steps of the run."""

    shape: Literal["cosine", "trapezoid", "constant"] = "cosine"
    """Shape after the warm-up: `cosine` decays at once; `trapezoid` is constant, then linear in the cool-down."""
    warmup: int = 100
    """Steps of the linear warm-up from 0."""
    cooldown: float = 0.2
    """Fraction of all steps in which a `trapezoid` decays."""
    final: float = 0.1
    """Learning rate after the last step, as a fraction of the highest learning rate."""
    function: str = ""
    """Schedule of your own: `package.module:callable`, a function that takes the step and the total steps and returns
    the factor of the learning rate; replaces all other settings of the schedule."""

    seams: ClassVar = (Seam.STEP,)

    def check(self, attachments: Attachments) -> None:
        at_least_zero(self, "warmup", "cooldown", "final")
        if self.function:
            factor: object = self.factor(0, attachments.progress.total)
            if not isinstance(factor, int | float) or not 0 <= factor < math.inf:
                raise ConfigError(
                    f"`optim.schedule.function`: `{self.function}` returned {factor!r} for the first step",
                    hint="return the factor of the learning rate, zero or a positive number",
                )
            return
        for name in ("cooldown", "final"):
            if getattr(self, name) > 1:
                raise ConfigError(
                    f"`{self.name}.{name}` is a fraction and must lie in [0, 1], got {getattr(self, name)}"
                )
        if attachments.progress.total and self.shape != "constant" and self.warmup >= attachments.progress.total:
            raise ConfigError(
                f"`{self.name}.warmup` of {self.warmup} steps fills the run of {attachments.progress.total} steps",
                hint=f"set it to {max(1, attachments.progress.total // 20)}",
            )

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        from shoestring.optim.schedule import follow

        attachments.at(Phase.RATE, follow(attachments, self.factor))

    def explain(self, attachments: Attachments) -> str:
        return f"by `{self.function}`" if self.function else ""

    def explain_resume(self, attachments: Attachments) -> str:
        progress = attachments.progress
        if progress.planned in (0, progress.total):
            return ""
        base = float(attachments.optimizer.param_groups[0]["lr"])  # after a resume, not set by the schedule yet
        last = base * self.factor(max(progress.position - progress.gain, 0.0), progress.planned)
        now = base * self.factor(progress.position, progress.total)
        if math.isclose(last, now, rel_tol=1e-6):
            return ""
        return (
            f"the schedule was for {progress.planned} steps and is now for {progress.total}: the learning rate goes "
            f"from {last:.3g} at step {progress.step} to {now:.3g} at the next"
        )

    def factor(self, step: float, total: int) -> float:
        """Factor of the learning rate in step `step`, counted from 0, of `total` steps; a total of 0 means unknown."""
        if self.function:
            return resolve(self.function, f"{self.name}.function")(step, total)
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.shape == "constant" or not total:
            return 1.0
        if self.shape == "cosine":
            decayed = min((step - self.warmup) / max(total - self.warmup, 1), 1.0)
            return self.final + (1 - self.final) * (1 + math.cos(math.pi * decayed)) / 2
        remaining = (total - step) / max(self.cooldown * total, 1)  # is above 1 before the cool-down
        return self.final + (1 - self.final) * min(max(remaining, 0.0), 1.0)


Schedule.neutral = Schedule(shape="constant", warmup=0)
