"""Where the time of a program goes, by its own lines: call paths from Python through operators."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoestring.profile.recording import Profile

__all__ = ["ProfileResult", "load", "profiled"]


class ProfileResult:
    """What `profiled` hands out: its profile once the block has ended."""

    profile: Profile

    def __str__(self) -> str:
        from shoestring.profile.summary import summary

        return "\n".join(summary(self.profile))


@contextmanager
def profiled(path: Path | str | None = None, inside: Sequence[str] = ()) -> Iterator[ProfileResult]:
    """Profile what runs within; the profile is saved also where that raises.

    Args:
        path: of a file to write.
        inside: installed packages whose lines count as the program's own.

    Raises:
        CompileError: the collector cannot be compiled here.
        RuntimeError: a profile is being recorded already.
        OSError: the file cannot be written.
    """
    from shoestring.profile.collector import Collector
    from shoestring.profile.lines import sources_of

    result, collector = ProfileResult(), Collector()
    process = os.getpid()
    collector.start()
    try:
        yield result
    finally:
        if os.getpid() == process:  # a fork that ends in here has nothing to say
            profile = collector.stop().profile()
            facts = replace(profile.facts, inside=list(inside))
            result.profile = replace(profile, facts=facts, sources=sources_of(profile.tree, inside))
            if path is not None:
                result.profile.save(Path(path))


def load(path: Path | str) -> Profile:
    """The profile in a file; DataError where there is none, or it is damaged."""
    from shoestring.profile.recording import load

    return load(Path(path))
