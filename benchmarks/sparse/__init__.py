"""sparse: training with 2:4 weights.

python -m benchmarks.sparse [--strict] [--only sparse.PREFIX] [--list] [--budget MINUTES] [--trial]
    [--runs FOLDER] [--cache FOLDER]

Every training run is stored as one JSON file in `results/runs` and never made twice: a benchmark that was stopped
continues where it was, in another clone too; delete a file to measure again. With `--trial` runs are short and no row
is stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.rows import Bar


def gpu_rows() -> list[Bar]:
    """The bars that need a GPU, for `benchmarks.gpu`."""
    from benchmarks.sparse.gpu import rows

    return rows()
