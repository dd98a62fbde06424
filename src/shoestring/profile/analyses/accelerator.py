"""On an accelerator: gaps in which it waits for the next kernel to be launched, and copies that run alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shoestring.profile.analyses.reading import Place, Reading, milliseconds
from shoestring.profile.findings import Finding
from shoestring.profile.tree import Integers, NodeKind

IDLE = 0.3
"""Share of its time in which the accelerator has nothing to run, at least."""
SHORT = 20_000
"""Nanoseconds of a kernel that is over before the next can be launched."""
ALONE = 0.05
"""Share of the time that copies take beside which no kernel runs, at least."""


def launch_bound(reading: Reading) -> list[Finding]:
    """The line before whose kernels the accelerator waits longest, if these are so short that launching them is why."""
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
            f"It has nothing to run for {milliseconds(waited)}, {waited / (gaps + busy):.0%} of its time, before"
            f" {count} kernels that take {tree.device[short].sum() / count / 1000:.1f} us each;"
            f" {milliseconds(lines[place])} of that on this line.",
            "Launch many kernels at once: CUDA graphs, torch.compile(mode='reduce-overhead'), fused operators, larger"
            " batches.",
            None,
            nodes,
        )
    ]


def copies_alone(reading: Reading) -> list[Finding]:
    """The line whose copies take longest while no kernel runs."""
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
            f"Copies take {milliseconds(taken)}, {reading.share(taken):.0%} of the time, in which no kernel runs;"
            f" {milliseconds(lines[place])} of that on this line.",
            "Copy from pinned memory (pin_memory=True) with non_blocking=True, one batch ahead of the computation.",
            reading.gain("overlap", lines[place], nodes),
            nodes,
        )
    ]


def _by_line(reading: Reading, wanted: NDArray[np.bool_], time: Integers) -> dict[Place, int]:
    lines: dict[Place, int] = {}
    for node in np.flatnonzero(wanted).tolist():
        lines[reading.place(node)] = lines.get(reading.place(node), 0) + int(time[node])
    return lines
