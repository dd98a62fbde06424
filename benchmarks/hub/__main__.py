"""The command line of the hub's benchmark; see the package's docstring."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.harness import main
from benchmarks.hub import arriving, opening, privacy, reading


def command(argv: Sequence[str]) -> int:
    """The harness's command line, the interpreter that has trackio, and how often pages are opened."""
    flags = argparse.ArgumentParser(add_help=False)
    flags.add_argument("--trackio", default="", metavar="PYTHON")
    flags.add_argument("--rounds", type=int, default=opening.ROUNDS)
    own, rest = flags.parse_known_args(argv)
    return main(
        "hub",
        lambda: [*privacy.rows(), *reading.rows(), *opening.rows(own.rounds), *arriving.rows(own.trackio)],
        rest,
    )


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
