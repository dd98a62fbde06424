"""The command line of sparse's benchmark; see the package's docstring."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from benchmarks import sparse
from benchmarks.harness import Bar, Deadline, main, resumable
from benchmarks.machine import ROOT
from benchmarks.rows import RESULTS
from benchmarks.sparse import contest, finetuning, packed, primitives


def flags() -> argparse.ArgumentParser:
    known = resumable("sparse")
    known.add_argument("--cache", type=Path, default=ROOT / ".cache" / "sparse")
    known.add_argument("--trial", action="store_true")
    return known


def command(argv: Sequence[str]) -> int:
    """The harness's command line, and what the package's docstring says."""
    known, rest = flags().parse_known_args(argv)
    deadline = Deadline(60 * known.budget)
    runs = known.cache / "trial" if known.trial else known.runs

    @cache
    def ask() -> contest.Contest:
        return contest.Contest(runs / "contest", 60 if known.trial else 600, deadline.check)

    @cache
    def tuning() -> finetuning.FineTuning:
        steps, rates = (40, finetuning.RATES[1:2]) if known.trial else (finetuning.PRETRAINING, finetuning.RATES)
        return finetuning.FineTuning(runs / "finetuning", known.cache, steps, rates, check=deadline.check)

    def rows() -> list[Bar]:
        return [*primitives.rows(), *packed.rows(), *contest.rows(ask), *finetuning.rows(tuning), *sparse.gpu_rows()]

    with tempfile.TemporaryDirectory() as folder:
        return main("sparse", rows, rest, Path(folder) if known.trial else RESULTS)


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
