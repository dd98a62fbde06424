"""What the profiler is measured on, and the measurements.

python -m benchmarks.profile [--strict] [--only profile.PREFIX] [--list] [--budget MINUTES] [--runs FOLDER]

What a workload's modes took is stored as one JSON file in `results/runs` and never measured twice: delete the file to
measure it again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.rows import Bar


def gpu_rows() -> list[Bar]:
    """The bars that need a GPU, for `benchmarks.gpu`."""
    from benchmarks.profile.gpu import rows

    return rows()
