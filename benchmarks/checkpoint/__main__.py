"""The command line of checkpoint's benchmark; see the package's docstring."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import checkpoint
from benchmarks.checkpoint import (
    damage,
    differences,
    everything,
    exact,
    faults,
    hosts,
    kills,
    plain,
    power,
    reshard,
    restore,
    stall,
    torchrun,
    waste,
)
from benchmarks.harness import Bar, Deadline, main, resumable
from benchmarks.machine import ROOT


def rows(cache: Path, runs: Path, deadline: Deadline) -> list[Bar]:
    """Every bar of the area."""
    parts = [
        module.rows(cache)
        for module in (
            kills,
            torchrun,
            damage,
            power,
            faults,
            hosts,
            restore,
            reshard,
            exact,
            stall,
            plain,
            differences,
        )
    ]
    parts.append(everything.rows(runs / "everything", deadline))
    return [bar for part in (*parts, waste.rows(), checkpoint.gpu_rows()) for bar in part]


def command(argv: Sequence[str]) -> int:
    """The harness's command line, and where long rows keep what they have done."""
    flags = resumable("checkpoint")
    flags.add_argument("--cache", type=Path, default=ROOT / ".cache" / "checkpoint")
    known, rest = flags.parse_known_args(argv)
    known.cache.mkdir(parents=True, exist_ok=True)
    deadline = Deadline(60 * known.budget)
    return main("checkpoint", lambda: rows(known.cache, known.runs, deadline), rest)


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
