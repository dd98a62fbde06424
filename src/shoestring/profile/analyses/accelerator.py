"""Analyses of an accelerator's time: idle time before kernels are launched, and copies that no computation overlaps."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shoestring.figures import nanoseconds, percent, seconds
from shoestring.profile.analyses.reading import Place, Reading
from shoestring.profile.findings import Finding
from shoestring.profile.tree import Integers, NodeKind

IDLE = 0.3
"""Idle time before short kernels is reported if it is at least this fraction of the accelerator's time."""
SHORT = 20_000
"""Longest kernel, in nanoseconds, that is assumed to end before the next kernel can be launched."""
ALONE = 0.05
"""Copies are reported if they take at least this share of the profiled time while no kernel runs."""


def launch_bound(reading: Reading) -> list[Finding]:
    """If most idle time is before short kernels, find the line whose short kernels have the most of this idle time."""
    tree = reading.tree
    kernels = (tree.kind == NodeKind.KERNEL) & (tree.count > 0)
    short = kernels & (tree.device < SHORT * tree.count)
    gaps, busy = int(tree.idle[kernels].sum()), int(tree.device[kernels].sum())
    waited = int(tree.idle[short].sum())
    if not gaps or waited < IDLE * (gaps + busy) or waited < 0.5 * gaps:
        return []
    lines = _by_line(reading, short, tree.idle)
    place = max(lines, key=lambda place: lines[place])
    nodes = [node for node in np.flatnonzero(short).tolist() if reading.place(node) == place]
    count = int(tree.count[short].sum())
    return [
        reading.finding(
            "the accelerator waits for kernels to be launched",
            place,
            f"It has nothing to run for {nanoseconds(waited)}, {percent(waited / (gaps + busy))} of its time, before"
            f" {count} kernels that take {seconds(tree.device[short].sum() / count / 1e9)} each;"
            f" {nanoseconds(lines[place])} of that on this line.",
            "Launch many kernels at once: CUDA graphs, torch.compile(mode='reduce-overhead'), fused operators, larger"
            " batches.",
            None,
            nodes,
        )
    ]


def copies_alone(reading: Reading) -> list[Finding]:
    """Find the line whose copies take the most time while no kernel runs."""
    tree = reading.tree
    copies = (tree.kind == NodeKind.KERNEL) & (tree.alone > 0)
    taken = int(tree.alone[copies].sum())
    if reading.share(taken) < ALONE:
        return []
    lines = _by_line(reading, copies, tree.alone)
    place = max(lines, key=lambda place: lines[place])
    nodes = [node for node in np.flatnonzero(copies).tolist() if reading.place(node) == place]
    return [
        reading.finding(
            "copies run while the accelerator computes nothing",
            place,
            f"Copies take {reading.spent(taken)}, in which no kernel runs;"
            f" {nanoseconds(lines[place])} of that on this line.",
            "Copy from pinned memory (pin_memory=True) with non_blocking=True, one batch ahead of the computation.",
            reading.gain("overlap", lines[place], nodes),
            nodes,
        )
    ]


def _by_line(reading: Reading, wanted: NDArray[np.bool_], time: Integers) -> dict[Place, int]:
    """Sum `time` by line, over the nodes that the mask `wanted` selects."""
    lines: dict[Place, int] = {}
    for node in np.flatnonzero(wanted).tolist():
        lines[reading.place(node)] = lines.get(reading.place(node), 0) + int(time[node])
    return lines
