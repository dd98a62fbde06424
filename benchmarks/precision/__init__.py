"""precision: 16 bits chosen on the graph of a step, beside torch's autocast, which decides for each operator alone.

    python -m benchmarks.precision

Both are computed operator by operator from graphs that are traced in the same way, on one thread. bf16 products are
slow on most CPUs, so no figure here is a time; what 16 bits save on a GPU needs a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.rows import Bar


def gpu_rows() -> list[Bar]:
    """The bars that need a GPU, for `benchmarks.gpu`."""
    from benchmarks.precision.gpu import rows

    return rows()
