"""Compares the memory peaks of two runs, tensor by tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shoestring.figures import memory
from shoestring.memory.tracing.recording import BlockName, MemoryProfile, MemoryWindow


@dataclass(frozen=True)
class HeldChange:
    """How the tensors with one name differ between the earlier and the later run."""

    name: BlockName
    nbytes: int
    """Additional bytes in the later run; negative if the later run held fewer bytes."""
    tensors: int
    """Additional tensors in the later run; negative if the later run held fewer tensors."""


@dataclass(frozen=True)
class PeakComparison:
    """The peak of the later run, compared with the corresponding moment of the earlier run."""

    before: int
    """Bytes at the earlier run's own peak."""
    after: int
    """Bytes at the later run's peak."""
    at: int
    """Bytes that the earlier run held at the corresponding moment."""
    changes: list[HeldChange]
    """Differences by name, the largest first; they add up to `after - at`."""

    def lines(self, most: int = 15) -> Iterator[str]:
        """Format the comparison for a terminal: yield lines of text, with at most `most` names."""
        change = self.after - self.before
        yield f"peak: {memory(self.before)} before, {memory(self.after)} after ({memory(change, sign=True)})"
        if self.at != self.before:
            yield f"compared with the same moment of the earlier run, at which it held {memory(self.at)}"
        for change in self.changes[:most]:
            count = f"  ({change.tensors:+} tensors)" if change.tensors else ""
            yield f"  {memory(change.nbytes, sign=True):>9}  {change.name}{count}"
        if len(self.changes) > most:
            rest = sum(change.nbytes for change in self.changes[most:])
            yield f"  {memory(rest, sign=True):>9}  {len(self.changes) - most} more changes"


def compare(before: MemoryProfile, after: MemoryProfile) -> PeakComparison:
    """Compare the main devices of two recordings.

    The later run's peak is compared with the moment of the same allocation in the earlier run, even if the earlier run
    peaked at another moment. At different moments of a step, the runs would differ in many tensors that both runs
    allocate.

    Raises:
        DataError: one of the recordings is empty.
    """
    old, new = before.main, after.main
    # The event in `old` that corresponds to the peak of `new`: the same allocation, or else the peak of `old`. Two
    # allocations correspond if both are the n-th allocation of the same name.
    moment = old.event
    reached = np.flatnonzero(new.columns["born"] == new.event)
    if len(reached):
        name = new.names[int(new.columns["name"][reached[0]])]
        births, place = _births(old, name), int((_births(new, name) < new.event).sum())
        moment = int(births[place]) if place < len(births) else old.event
    earlier, later = _totals(old, moment), _totals(new, new.event)
    changes = []
    for name in {**later, **earlier}:
        (had, tensors), (has, now) = earlier.get(name, (0, 0)), later.get(name, (0, 0))
        if had != has:
            changes.append(HeldChange(name, has - had, now - tensors))
    changes.sort(key=lambda change: (-abs(change.nbytes), change.name))
    return PeakComparison(old.peak, new.peak, old.total(moment), changes)


def _totals(window: MemoryWindow, event: int) -> dict[BlockName, tuple[int, int]]:
    """Bytes and number of tensors alive at an event, by name."""
    sums, counts = Counter[BlockName](), Counter[BlockName]()
    for held in window.held(event):
        sums[held.name] += held.nbytes
        counts[held.name] += held.tensors
    return {name: (sums[name], counts[name]) for name in sums}


def _births(window: MemoryWindow, name: BlockName) -> np.ndarray:
    """Events at which blocks with this name were allocated, in order."""
    numbers = [index for index, other in enumerate(window.names) if other == name]
    return np.sort(window.columns["born"][np.isin(window.columns["name"], numbers)])
