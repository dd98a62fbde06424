"""The command line of parallel's benchmark; see the package's docstring."""

from __future__ import annotations

import sys

from benchmarks.harness import Bar, main
from benchmarks.parallel import equal, fits, links, no_gain, noticed, planning


def rows() -> list[Bar]:
    """Every bar of parallel."""
    return [*equal.rows(), *noticed.rows(), *links.rows(), *planning.rows(), *no_gain.rows(), *fits.rows()]


if __name__ == "__main__":
    sys.exit(main("parallel", rows))
