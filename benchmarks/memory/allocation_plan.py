"""The static allocation plan of a step against its live bytes, and against what torch's caching allocator reserves."""

from __future__ import annotations

from functools import cache

import numpy as np

from benchmarks.harness import Bar, Measured
from benchmarks.memory.programs import PROGRAMS, build
from shoestring.memory import traced
from shoestring.memory.allocation_plan import AllocationPlan, caching_allocator_reserves, plan
from shoestring.memory.tracing.recording import MemoryWindow


@cache
def windows() -> dict[str, MemoryWindow]:
    """Of each program the traced step with the highest peak."""
    found = {}
    for name in PROGRAMS:
        program = build(name)
        with traced() as memory:
            for _ in range(2):
                program.step()
        found[name] = memory.profile.main
        del program
    return found


def size_of_plans() -> Measured:
    """The largest ratio of a plan's bytes to the most live bytes, and the allocator's beside it."""
    ratios, said = [], []
    for name, window in windows().items():
        found = plan(window)
        if overlaps(found, window):
            raise AssertionError(f"{name}: two live buffers overlap")
        ratios.append(found.nbytes / found.least)
        reserved = caching_allocator_reserves(window) / found.least
        said.append(
            f"{name}: {len(found.addresses):,} buffers, plan {ratios[-1]:.4f}x, "
            f"torch's caching allocator {reserved:.3f}x"
        )
    return Measured(max(ratios), "; ".join(said))


def overlaps(found: AllocationPlan, window: MemoryWindow) -> bool:
    """Whether two blocks that live at the same time share a byte."""
    low, columns = found.addresses, window.columns
    high, born = low + columns["bytes"], columns["born"]
    died = np.where(columns["died"] < 0, np.iinfo(np.int64).max, columns["died"])
    return any(
        bool(((born < died[i]) & (born[i] < died) & (low < high[i]) & (low[i] < high))[i + 1 :].any())
        for i in range(len(low))
    )


def rows() -> list[Bar]:
    """The bar of the plan."""
    return [
        Bar(
            "memory.plan-over-live",
            "bytes of a static plan of the addresses of a traced step over the largest sum of its live bytes, most of "
            "a GPT, a ResNet and a Hugging Face Llama; no two live buffers overlap",
            "<=",
            1.05,
            lambda _: size_of_plans(),
            peers=("transformers",),
            kind="exact",
        )
    ]
