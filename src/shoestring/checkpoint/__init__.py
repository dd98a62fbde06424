"""Losing no work: saving a run's state and going on from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from shoestring.core.errors import ConfigError
from shoestring.core.feature import Feature, Phase, Saving, Seam

if TYPE_CHECKING:
    from shoestring.core.job import Job
    from shoestring.core.trace import Trace

__all__ = ["Plain"]


@dataclass(frozen=True, kw_only=True)
class Plain(Feature):
    """Atomic saves of everything to one file by the first rank: at the end, on a signal, and every so often."""

    every: int = 0
    """Steps between saves; 0 saves at the end and on a signal only."""
    keep: int = 2
    """How many of the newest saves to keep."""
    folder: str = "checkpoints"
    """Where to save; a relative path lies in the run folder."""

    seams: ClassVar = (Seam.STEP,)

    def check(self, job: Job) -> None:
        if self.every < 0:
            raise ConfigError(f"`{self.name}.every` must not be negative, got {self.every}")
        if self.keep < 1:
            raise ConfigError(f"`{self.name}.keep` must be at least 1, got {self.keep}")

    def apply(self, job: Job, seam: Seam) -> None:
        from shoestring.checkpoint.plain import Saver

        saver = Saver(job, self)
        job.at(Phase.CAPTURE, saver.capture)
        job.restore = saver.restore

    def explain(self, job: Job) -> str:
        return f"every {self.every} steps, at the end and on a signal" if self.every else "at the end and on a signal"

    def saving(self, trace: Trace) -> Saving | None:
        steps = trace.facts.get("steps", 0.0)
        if not 0 < self.every < steps:
            return None
        return Saving(
            unit="steps to repeat after a kill, at worst",
            used=self.every,
            without=steps,
            measured=False,
            cost=f"{trace.seconds('disk'):.2f} s stalled",
        )
