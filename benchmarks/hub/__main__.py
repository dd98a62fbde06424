"""The command line of the hub's benchmark; see the package's docstring."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.harness import Bar, Deadline, main, resumable
from benchmarks.hub import arriving, converting, opening, privacy, reading


def command(argv: Sequence[str]) -> int:
    """The harness's command line, and what the package's docstring says."""
    flags = argparse.ArgumentParser(add_help=False, parents=[resumable("hub")])
    flags.add_argument("--trackio", default="", metavar="PYTHON")
    flags.add_argument("--rounds", type=int, default=opening.ROUNDS)
    own, rest = flags.parse_known_args(argv)
    check = Deadline(60 * own.budget).check

    def rows() -> list[Bar]:
        clips = converting.rows(own.runs, check)
        return [*privacy.rows(), *reading.rows(), *opening.rows(own.rounds), *arriving.rows(own.trackio), *clips]

    return main("hub", rows, rest)


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
