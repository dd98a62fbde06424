"""comm: training over slow links, measured on hosts of netlab.

python -m benchmarks.comm [--strict] [--only comm.PREFIX] [--list] [--cache FOLDER] [--budget MINUTES] [--trial]
python -m benchmarks.comm --pictures       draws the curves of the runs into docs/pictures; runs what is missing
python -m benchmarks.comm --curves         makes the curves alone, which take hours and measure no times
… --seeds 1                                has curves on the first seed only, and the rows say so

Every launch is stored as one JSON file in the cache, and the contest's curves and times in `benchmarks/results/runs`,
and never run twice. So a benchmark that was stopped continues where it was; delete a file to measure again. With
`--trial` everything is tiny and no row is stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.rows import Bar


def gpu_rows() -> list[Bar]:
    """The bars that need a GPU, for `benchmarks.gpu`."""
    from benchmarks.comm import at_size, gpu

    return [*gpu.rows(), *at_size.rows()]
