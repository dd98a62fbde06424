"""The command line of graph's benchmark; see the package's docstring."""

from __future__ import annotations

import sys

from benchmarks.graph import compiled, rules, schedule, search, trained, tried
from benchmarks.harness import Bar, main


def rows() -> list[Bar]:
    """Every bar of graph."""
    return [*rules.rows(), *tried.rows(), *search.rows(), *compiled.rows(), *trained.rows(), *schedule.rows()]


if __name__ == "__main__":
    sys.exit(main("graph", rows))
