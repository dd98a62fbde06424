"""What made the peak of one run higher than that of another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shoestring.memory.tracing.recording import BlockName, MemoryProfile, MemoryWindow
from shoestring.report.figures import size


@dataclass(frozen=True)
class HeldChange:
    """What one moment held more or less of than the other."""

    name: BlockName
    nbytes: int
    """By how much it is more; negative where it is less."""
    tensors: int
    """By how many tensors."""


@dataclass(frozen=True)
class PeakComparison:
    """The peak of the later run, and the same moment of the earlier one."""

    before: int
    """Bytes at the earlier run's own peak."""
    after: int
    """Bytes at the later run's peak."""
    at: int
    """Bytes that the earlier run held at the moment that is compared."""
    changes: list[HeldChange]
    """The largest first; they add up to `after - at`."""

    def lines(self, most: int = 15) -> Iterator[str]:
        """The text for a terminal."""
        change = self.after - self.before
        yield f"peak: {size(self.before)} before, {size(self.after)} after ({_signed(change)})"
        if self.at != self.before:
            yield f"compared with the same moment of the earlier run, at which it held {size(self.at)}"
        for each in self.changes[:most]:
            count = f"  ({each.tensors:+} tensors)" if each.tensors else ""
            yield f"  {_signed(each.nbytes):>9}  {each.name}{count}"
        if len(self.changes) > most:
            rest = sum(each.nbytes for each in self.changes[most:])
            yield f"  {_signed(rest):>9}  {len(self.changes) - most} more changes"


def _signed(nbytes: int) -> str:
    return f"{'-' if nbytes < 0 else '+'}{size(abs(nbytes))}"


def compare(before: MemoryProfile, after: MemoryProfile) -> PeakComparison:
    """Compare the devices that are looked at first.

    Where another allocation reached the later peak, what the earlier run held at that same allocation is compared, not
    its own peak: two different moments of a step differ in much that neither run has more of.

    Raises:
        DataError: nothing was recorded in one of them.
    """
    old, new = before.main, after.main
    moment = _same_moment(new, old)
    earlier, later = _totals(old, moment), _totals(new, new.event)
    changes = []
    for name in {**later, **earlier}:
        (had, tensors), (has, now) = earlier.get(name, (0, 0)), later.get(name, (0, 0))
        if had != has:
            changes.append(HeldChange(name, has - had, now - tensors))
    changes.sort(key=lambda each: (-abs(each.nbytes), each.name))
    return PeakComparison(old.peak, new.peak, old.total(moment), changes)


def _totals(window: MemoryWindow, event: int) -> dict[BlockName, tuple[int, int]]:
    """Bytes and tensors by name."""
    sums, counts = Counter[BlockName](), Counter[BlockName]()
    for held in window.held(event):
        sums[held.name] += held.nbytes
        counts[held.name] += held.tensors
    return {name: (sums[name], counts[name]) for name in sums}


def _same_moment(new: MemoryWindow, old: MemoryWindow) -> int:
    """The event of `old` that is that of the peak of `new`: the same allocation, or the earlier run's own peak."""
    reached = np.flatnonzero(new.columns["born"] == new.event)
    if not len(reached):
        return old.event
    name = new.names[int(new.columns["name"][reached[0]])]
    earlier = _births(new, name)
    found = _births(old, name)
    place = int((earlier < new.event).sum())
    return int(found[place]) if place < len(found) else old.event


def _births(window: MemoryWindow, name: BlockName) -> np.ndarray:
    numbers = [index for index, each in enumerate(window.names) if each == name]
    return np.sort(window.columns["born"][np.isin(window.columns["name"], numbers)])
