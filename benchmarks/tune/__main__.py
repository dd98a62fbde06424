"""The command line of tune's benchmark; see the package's docstring."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from benchmarks.harness import Bar, Deadline, main, resumable
from benchmarks.tune import crowd, dashboard, functions, kills, kills_optuna, kills_ray, studies


def command(argv: Sequence[str]) -> int:
    """The harness's command line, and what the package's docstring says."""
    known, rest = resumable("tune").parse_known_args(argv)
    deadline = Deadline(60 * known.budget)

    def rows() -> list[Bar]:
        areas = (kills, kills_optuna, kills_ray, crowd, functions, studies)
        return [*(bar for area in areas for bar in area.rows(known.runs, deadline.check)), *dashboard.rows()]

    return main("tune", rows, rest)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(command(sys.argv[1:]))
