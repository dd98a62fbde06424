"""A profiler that attributes a program's time to source lines, by recording call paths from Python to operators."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shoestring.profile.settings import CallPaths

if TYPE_CHECKING:
    from shoestring.profile.recording import Profile

log = logging.getLogger("shoestring")

__all__ = ["CallPaths", "ProfileResult", "load", "profiled"]


class ProfileResult:
    """The result of `profiled`; the attribute `profile` is set when the `with` block ends."""

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
    """Profile the code in a `with` block; the profile is saved even if the code raises an error.

    If there is no C++ compiler, torch.profiler records single steps at a higher cost, and a warning is logged.

    Args:
        path: file to write the profile to; if None, no file is written.
        inside: names of installed packages whose lines count as lines of the program.
        share: fraction of the time in which operators are recorded, in (0, 1]. If the share is below 1, one window is
            recorded in each block of steps (or of seconds, in a program without an optimizer). Counts and times are
            then estimates with variances, scaled up from the windows. JAX programs are always recorded in windows.
        budget: processor time that profiling may add, as a fraction of the program's processor time (0.03 is 3%); the
            profiler adjusts the share to stay within this budget.
        native_frames: whether to sample the native functions in which operators spend their own time.

    Raises:
        ConfigError: the share is outside (0, 1] or the budget outside (0, 1); or native frames are requested on a
            system other than Linux, without a compiler, or while another profiler uses SIGPROF.
        RuntimeError: a profile is being recorded already.
        OSError: the file cannot be written.
    """
    from shoestring.profile.endings import before_leaving
    from shoestring.profile.fallback import started
    from shoestring.profile.jax_collector import JaxCollector
    from shoestring.profile.lines import sources_of

    result, process = ProfileResult(), os.getpid()
    collector = started(share, budget, native_frames)
    jax = JaxCollector(share, budget)
    jax.begin()

    def finish(by: str = "") -> None:
        recorded = collector.stop().profile()  # first, so that the rest of this function is not recorded
        jax.finish()
        profile = jax.added_to(recorded)
        ended = [f"The program ended by {by}, which nothing can follow."] if by else []
        facts = replace(profile.facts, inside=list(inside), unseen=[*profile.facts.unseen, *ended])
        result.profile = replace(profile, facts=facts, sources=sources_of(profile.tree, inside))
        if path is not None:
            result.profile.save(Path(path))

    left: list[str] = []

    def leave(by: str) -> None:
        left.append(by)
        try:
            finish(by)
        except Exception as error:  # an error here must not prevent the program from ending
            log.warning("the program ends through %s, and its profile cannot be saved: %s", by, error)
        else:
            where = f"; its profile until then: shoestring profile view {path}" if path is not None else ""
            log.warning("the program ends through %s%s", by, where)

    with before_leaving(leave):
        try:
            yield result
        finally:
            if os.getpid() == process and not left:  # a forked process that leaves the `with` block writes nothing
                finish()


def load(path: Path | str) -> Profile:
    """Load a profile from a file.

    Raises:
        DataError: the file is missing or damaged.
    """
    from shoestring.profile.recording import FORMAT

    return FORMAT.load(Path(path))
