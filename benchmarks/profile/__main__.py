"""The command line of profile's benchmark; see the package's docstring."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from benchmarks import profile
from benchmarks.harness import Bar, Deadline, main
from benchmarks.profile import cases, cost, findings, growth, jax_rows, truth
from benchmarks.rows import RESULTS


def command(argv: Sequence[str]) -> int:
    """The harness's command line, and what the package's docstring says."""
    flags = argparse.ArgumentParser(add_help=False)
    flags.add_argument("--budget", type=float, default=float("inf"))
    flags.add_argument("--runs", type=Path, default=RESULTS / "runs" / "profile")
    known, rest = flags.parse_known_args(argv)
    deadline = Deadline(60 * known.budget)

    @cache
    def costs() -> cost.Costs:
        return cost.Costs(known.runs / "cost", deadline.check)

    def rows() -> list[Bar]:
        return [
            *cost.rows(costs),
            *truth.rows(),
            *growth.rows(known.runs / "growth", deadline.check),
            *findings.rows(known.runs, deadline.check),
            *cases.rows(known.runs / "cases", deadline.check),
            *jax_rows.rows(),
            *profile.gpu_rows(),
        ]

    return main("profile", rows, rest)


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
