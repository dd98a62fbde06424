"""checkpoint: what it survives, what it costs, and what it finds.

python -m benchmarks.checkpoint [--strict] [--only checkpoint.PREFIX] [--list] [--cache FOLDER]
    [--budget MINUTES] [--runs FOLDER]

Long rows keep what they have done in the cache, and resume from there. `checkpoint.everything` keeps its runs in files
that are committed, below --runs, and draws new ones until there are enough, or the budget is used up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.rows import Bar


def gpu_rows() -> list[Bar]:
    """The bars that need a GPU, for `benchmarks.gpu`."""
    from benchmarks.checkpoint.gpu import rows

    return rows()
