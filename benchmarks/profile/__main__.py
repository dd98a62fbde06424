"""The command line of profile's benchmark; see the package's docstring."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache

from benchmarks import profile
from benchmarks.harness import Bar, Deadline, main, resumable
from benchmarks.profile import cases, cost, findings, formulas, growth, jax_rows, peers, truth, whole


def command(argv: Sequence[str]) -> int:
    """The harness's command line, and what the package's docstring says."""
    known, rest = resumable("profile").parse_known_args(argv)
    deadline = Deadline(60 * known.budget)

    @cache
    def costs() -> cost.Costs:
        return cost.Costs(known.runs / "cost", deadline.check)

    def rows() -> list[Bar]:
        return [
            *cost.rows(costs),
            *whole.rows(lambda: whole.Programs(known.runs / "whole", deadline.check)),
            *truth.rows(),
            *growth.rows(known.runs / "growth", deadline.check),
            *findings.rows(known.runs, deadline.check),
            *peers.rows(findings.Trial(known.runs, deadline.check)),
            *formulas.rows(),
            *cases.rows(known.runs / "cases", deadline.check),
            *jax_rows.rows(),
            *profile.gpu_rows(),
        ]

    return main("profile", rows, rest)


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
