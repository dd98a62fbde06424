"""The command line of optim's benchmark; see the package's docstring."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from benchmarks.harness import Bar, Deadline, main
from benchmarks.optim import cache as samples
from benchmarks.optim import images, layerwise
from benchmarks.rows import RESULTS


def command(argv: Sequence[str]) -> int:
    """The harness's command line, and what the package's docstring says."""
    flags = argparse.ArgumentParser(add_help=False)
    flags.add_argument("--budget", type=float, default=float("inf"))
    flags.add_argument("--runs", type=Path, default=RESULTS / "runs" / "optim")
    known, rest = flags.parse_known_args(argv)
    deadline = Deadline(60 * known.budget)

    @cache
    def contest() -> images.Contest:
        return images.Contest(known.runs / "images", deadline.check)

    def rows() -> list[Bar]:
        return [*layerwise.rows(), *samples.rows(), *images.rows(contest)]

    return main("optim", rows, rest)


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
