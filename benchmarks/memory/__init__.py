"""Bars of the area `memory`, one module a part: `python -m benchmarks.memory [--only memory.…]`.

Long runs are stored in the folder `--runs`, and end after `--budget` minutes; the next call continues them.
"""

from __future__ import annotations

from benchmarks.rows import Bar


def gpu_rows() -> list[Bar]:
    """The bars of the area that need a GPU, for `python -m benchmarks.gpu`."""
    from benchmarks.memory import lora, offload

    return [*offload.gpu_rows(), *lora.gpu_rows()]
