"""comm: training over slow links, measured on hosts of netlab.

python -m benchmarks.comm [--strict] [--only comm.PREFIX] [--list] [--cache FOLDER] [--budget MINUTES]

Every run is stored as one JSON file in the cache and never made twice: a benchmark that was stopped goes on where it
was. `python -m benchmarks.comm tune` chooses learning rates on seeds of their own; `status` says what is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.rows import Bar


def gpu_rows() -> list[Bar]:
    """The bars that need a GPU, for `benchmarks.gpu`."""
    from benchmarks.comm.gpu import rows

    return rows()
