"""decode: fewer forward passes for the same text.

python -m benchmarks.decode [--strict] [--only decode.PREFIX] [--list] [--budget MINUTES] [--runs FOLDER]
    [--cache FOLDER]
python -m benchmarks.decode --pictures     draws the curve of skipping into docs/pictures; measures what is missing

Every training run is stored as one JSON file in `results/runs` and never made twice; trained models are kept in the
cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.rows import Bar


def gpu_rows() -> list[Bar]:
    """The bars that need a GPU, for `benchmarks.gpu`."""
    from benchmarks.decode.gpu import rows

    return rows()
