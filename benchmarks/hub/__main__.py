"""The command line of the hub's benchmark; see the package's docstring."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.harness import main
from benchmarks.hub import arriving, privacy, reading


def command(argv: Sequence[str]) -> int:
    """The harness's command line, and the interpreter that has trackio."""
    flags = argparse.ArgumentParser(add_help=False)
    flags.add_argument("--trackio", default="", metavar="PYTHON")
    own, rest = flags.parse_known_args(argv)
    return main("hub", lambda: [*privacy.rows(), *reading.rows(), *arriving.rows(own.trackio)], rest)


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
