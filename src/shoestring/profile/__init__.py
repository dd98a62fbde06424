"""Where the time of a program goes, by its own lines: call paths from Python through operators."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shoestring.core.errors import ConfigError
from shoestring.core.feature import Reduction, Seam, Table
from shoestring.report.recordings import RecordsSteps

if TYPE_CHECKING:
    from shoestring.core.job import Job
    from shoestring.core.trace import Trace
    from shoestring.profile.recording import Profile

__all__ = ["CallPaths", "ProfileResult", "load", "profiled"]


@dataclass(frozen=True, kw_only=True)
class CallPaths(RecordsSteps):
    """Profile some steps of training: where their time goes, line by line, as a file and a page in the run's folder."""

    after: int = 10
    """Number of steps before the first one that is profiled; the first steps of a run are slower than those after."""
    steps: int = 50
    """Number of steps to profile; 0 profiles all until training ends. More steps give truer means, and cost time, but
    no memory."""
    share: float = 1.0
    """Part of the time in which operators are recorded, above 0 and up to 1. Below 1, counts and times are estimates,
    scaled up; a smaller share costs less time and is less certain."""
    budget: float = 0.0
    """Processor time that profiling may add while it records, as a part of the run's: 0.03 is 3%. The share of the time
    that is recorded follows from it; 0 leaves it at `share`."""
    native_frames: bool = False
    """Sample the native functions that operators spend their time in, every 10 ms of a thread's processor time. Linux
    only; takes the signal SIGPROF."""
    inside: tuple[str, ...] = ("shoestring",)
    """Names of installed packages whose lines count as the program's own, so that their time is shown line by line."""
    folder: str = "."
    """Folder for profile.npz and profile.html; in a run it lies in the run's folder."""

    def check(self, job: Job) -> None:
        super().check(job)
        if not 0 < self.share <= 1:
            raise ConfigError(f"`{self.name}.share` must be above 0 and at most 1, got {self.share}")
        if not 0 <= self.budget <= 1:
            raise ConfigError(f"`{self.name}.budget` must be from 0 to 1, got {self.budget}")

    def apply(self, job: Job, seam: Seam) -> None:
        from shoestring.profile.during_training import watch

        watch(job, self)

    def reduction(self, trace: Trace) -> Reduction | None:
        if not trace.facts.get("profiled_seconds"):
            return None
        seconds, steps = trace.facts["profiled_seconds"], int(trace.facts["profiled_steps"])
        cost = f"{trace.facts['profile_overhead'] / seconds:.1%} of the time of {steps} steps"
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
        rows = tuple((line, f"{seconds / total:.1%}", seconds) for line, seconds in lines)
        note = f"Of {trace.facts.get('profiled_steps', 0):.0f} steps on all ranks; profile.html has all of it."
        head = ("Line", "Share", "Seconds")
        return [Table(title="Lines that take the time", head=head, rows=rows, note=note)] if rows else []


CallPaths.neutral = CallPaths(after=1, steps=3)  # any is
LINE_FACT = "line "
"""Before the place of a line, in the trace's facts: its seconds."""


class ProfileResult:
    """What `profiled` hands out: its profile once the block has ended."""

    profile: Profile

    def __str__(self) -> str:
        from shoestring.profile.summary import summary

        return "\n".join(summary(self.profile))


@contextmanager
def profiled(
    path: Path | str | None = None,
    inside: Sequence[str] = (),
    *,
    share: float = 1.0,
    budget: float | None = None,
    native_frames: bool = False,
) -> Iterator[ProfileResult]:
    """Profile what runs within; the profile is saved also where that raises.

    Without a C++ compiler single steps are recorded by torch.profiler, at its cost; a line of the log says so.

    Args:
        path: of a file to write.
        inside: installed packages whose lines count as the program's own.
        share: part of the time in which operators are recorded, of (0, 1]. Below 1, counts and times are estimates,
            scaled up from one window in each block of steps (or of seconds, in a program without an optimizer), and
            the tree's variances say how certain they are. Of JAX programs windows are recorded in any case.
        budget: processor time that the profile may add, as a part of the program's (0.03 is 3%); the share follows
            from what recording is measured to cost.
        native_frames: whether to sample the native functions that operators spend their own time in.

    Raises:
        ConfigError: a share or budget outside of (0, 1]; native frames without Linux or a compiler, or beside another
            program that takes SIGPROF.
        RuntimeError: a profile is being recorded already.
        OSError: the file cannot be written.
    """
    from shoestring.profile.fallback import started
    from shoestring.profile.jax_collector import JaxCollector
    from shoestring.profile.lines import sources_of

    result, process = ProfileResult(), os.getpid()
    collector = started(share, budget, native_frames)
    jax = JaxCollector(share, budget)
    jax.begin()
    try:
        yield result
    finally:
        if os.getpid() == process:  # a fork that ends in here has nothing to say
            recorded = collector.stop().profile()  # first, so that it does not see what follows
            jax.finish()
            profile = jax.added_to(recorded)
            facts = replace(profile.facts, inside=list(inside))
            result.profile = replace(profile, facts=facts, sources=sources_of(profile.tree, inside))
            if path is not None:
                result.profile.save(Path(path))


def load(path: Path | str) -> Profile:
    """The profile in a file; DataError where there is none, or it is damaged."""
    from shoestring.profile.recording import FORMAT

    return FORMAT.load(Path(path))
