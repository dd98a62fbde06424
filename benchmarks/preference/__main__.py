"""The command line of preference's benchmark; see the package's docstring."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from benchmarks.harness import Bar, Deadline, main, resumable
from benchmarks.preference import contest, equality


def command(argv: Sequence[str]) -> int:
    """The harness's command line, and what the package's docstring says."""
    flags = argparse.ArgumentParser(add_help=False, parents=[resumable("preference")])
    flags.add_argument("--trial", action="store_true")
    known, rest = flags.parse_known_args(argv)
    deadline = Deadline(60 * known.budget)

    def measured(runs: Path, plan: contest.Plan) -> list[Bar]:
        of_trainings = cache(lambda: contest.Contest(runs, deadline.check, plan))
        return [*equality.rows(), *contest.rows(of_trainings)]

    if not known.trial:
        return main("preference", lambda: measured(known.runs, contest.Plan()), rest)
    with tempfile.TemporaryDirectory() as folder:
        return main("preference", lambda: measured(Path(folder) / "runs", contest.TRIAL), rest, Path(folder))


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
