"""Settings for profiling a run; importing this module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoestring import figures
from shoestring.core.errors import ConfigError
from shoestring.core.feature import Reduction, Seam, Table
from shoestring.profile.fact_names import LINE_FACT
from shoestring.report.settings import RecordsSteps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shoestring.core.attachments import Attachments
    from shoestring.core.trace import Trace


@dataclass(frozen=True, kw_only=True)
class CallPaths(RecordsSteps):
    """Profile some training steps line by line, and write a file and a page that show where their time goes."""

    after: int = 10
    """Number of steps before the first profiled step; the first steps of a run are slower than later steps."""
    steps: int = 50
    """Number of steps to profile; 0 profiles all steps until training ends. More steps give more accurate means and
    cost time, but no memory."""
    sample_rate: float = 1.0
    """Fraction of the time in which operators are recorded, above 0 and up to 1. Below 1, counts and times are
    estimates that are scaled up; a smaller fraction costs less time and gives less certain estimates."""
    max_overhead: float = 0.0
    """Processor time that profiling may add while it records, as a fraction of the run's processor time: 0.03 is 3%.
    The fraction of the time that is recorded is adjusted to keep this limit; 0 sets no limit and records the fraction
    `sample_rate`."""
    native_frames: bool = False
    """Sample the native functions in which operators spend their time, every 10 ms of a thread's processor time. Works
    on Linux only, and uses the signal SIGPROF."""
    inside: tuple[str, ...] = ("shoestring",)
    """Names of installed packages whose lines count as the program's own, so that their time is shown line by line."""
    folder: str = "."
    """Folder for profile.npz and profile.html, relative to the run's folder or, without one, to the working
    directory."""

    def check(self, attachments: Attachments) -> None:
        super().check(attachments)
        if not 0 < self.sample_rate <= 1:
            raise ConfigError(f"`{self.name}.sample_rate` must be above 0 and at most 1, got {self.sample_rate}")
        if not 0 <= self.max_overhead <= 1:
            raise ConfigError(f"`{self.name}.max_overhead` must be from 0 to 1, got {self.max_overhead}")

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        from shoestring.profile.during_training import watch

        watch(attachments, self)

    def reduction(self, trace: Trace) -> Reduction | None:
        if not trace.facts.get("profiled_seconds"):
            return None
        seconds, steps = trace.facts["profiled_seconds"], int(trace.facts["profiled_steps"])
        cost = f"{figures.percent(trace.facts['profile_overhead'] / seconds)} of the time of {steps} steps"
        return Reduction(
            unit="seconds that no line accounts for",
            used=trace.facts["profile_unknown"],
            without=seconds,
            measured=True,
            cost=cost,
        )

    def report_items(self, trace: Trace) -> Sequence[Table]:
        lines = [
            (key.removeprefix(LINE_FACT), seconds) for key, seconds in trace.facts.items() if key.startswith(LINE_FACT)
        ]
        total = trace.facts.get("profiled_seconds", 0.0)
        rows = tuple((line, figures.percent(seconds / total), seconds) for line, seconds in lines)
        note = f"Of {trace.facts.get('profiled_steps', 0):.0f} steps on all ranks; profile.html has all of it."
        head = ("Line", "Share", "Time")
        return [Table(title="Lines that take the time", head=head, rows=rows, note=note)] if rows else []


CallPaths.neutral = CallPaths(after=1, steps=3)  # with any settings, profiling leaves the training unchanged
