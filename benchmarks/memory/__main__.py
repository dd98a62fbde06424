"""The command line of memory's benchmark; see the package's docstring."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.harness import Deadline, main, resumable
from benchmarks.memory import (
    allocation_plan,
    broker,
    budget,
    lora,
    offload,
    prediction,
    rounded_base,
    tracing,
    turns,
    zero,
)
from benchmarks.rows import RESULTS


def command(argv: Sequence[str]) -> int:
    """The harness's command line, and what the package's docstring says."""
    known, rest = resumable("memory", lora.RUNS).parse_known_args(argv)
    deadline = Deadline(60 * known.budget)
    ours = (tracing.rows, prediction.rows, allocation_plan.rows, zero.rows, broker.rows, turns.rows, rounded_base.rows)
    stored = RESULTS / "runs" / "memory"
    parts = (
        *ours,
        lambda: offload.rows(stored / "offload", deadline),
        lambda: budget.rows(stored / "budget", deadline),
        lambda: lora.rows(known.runs, deadline),
    )
    return main("memory", lambda: [bar for rows in parts for bar in rows()], rest)


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
