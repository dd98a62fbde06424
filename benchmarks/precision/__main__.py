"""The command line of precision's benchmark; see the package's docstring."""

from __future__ import annotations

import sys

from benchmarks.harness import main
from benchmarks.precision import casting, gpu, losses

if __name__ == "__main__":
    sys.exit(main("precision", lambda: [*casting.rows(), *losses.rows(), *gpu.rows()]))
