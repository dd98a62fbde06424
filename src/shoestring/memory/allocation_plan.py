"""A static allocation plan: an address for every buffer of a step that allocates the same each time.

It is computed from the buffers' lifetimes, as EasyDist does for static graphs, and only reported: torch's statistics
and its debugging tools know nothing of memory that a plan hands out. Beside it stands what torch's caching allocator
reserves for the same allocations, simulated by its published rules.

Placing buffers one by one at the lowest address that is free during their lifetimes is near to the least there can be
when large buffers come first (Pisarchyk and Lee, 2020). Several orders are tried, and in the best one the buffers that
end highest are moved to the front until that gains no more.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from shoestring.memory.tracing.recording import MemoryProfile, MemoryWindow
from shoestring.report.figures import size

ALIGNMENT = 64
"""Bytes to whose multiples addresses are rounded: a line of a CPU's cache."""

_CLOSE = 1.001
"""A plan that is so near to the bytes at the peak is not improved."""
_ROUNDS = 12
_FOREVER = np.iinfo(np.int64).max


@dataclass(frozen=True, eq=False)
class AllocationPlan:
    """Where each block of a window lies."""

    addresses: np.ndarray
    """(N,) bytes from the beginning of the planned memory."""
    nbytes: int
    """Of the planned memory."""
    least: int
    """The largest sum of live bytes: no plan takes less."""


def plan(window: MemoryWindow, alignment: int = ALIGNMENT) -> AllocationPlan:
    """Plan the addresses of a window's blocks, so that no two that live at the same time overlap.

    Args:
        alignment: bytes to whose multiples addresses are rounded.
    """
    lives = _Lives.of(window, alignment)
    order = min(lives.orders(), key=lambda each: lives.place(each)[1])
    addresses, nbytes = lives.place(order)
    least = int(lives.peak())
    for _ in range(_ROUNDS):
        if nbytes <= _CLOSE * least:
            break
        ends = addresses + lives.sizes
        high = ends[order] > least + 0.5 * (nbytes - least)
        order = np.concatenate([order[high], order[~high]])
        moved, taken = lives.place(order)
        if taken < nbytes:
            addresses, nbytes = moved, taken
    return AllocationPlan(addresses, int(nbytes), int(_highest(window.columns["bytes"], lives.born, lives.died)))


@dataclass(frozen=True, eq=False)
class _Lives:
    """Sizes and lifetimes of blocks: (N,) bytes, first event, and the event that ends them."""

    sizes: np.ndarray
    born: np.ndarray
    died: np.ndarray

    @classmethod
    def of(cls, window: MemoryWindow, alignment: int) -> _Lives:
        columns = window.columns
        sizes = -(-columns["bytes"] // alignment) * alignment
        return cls(sizes, columns["born"], np.where(columns["died"] < 0, _FOREVER, columns["died"]))

    def peak(self) -> int:
        return _highest(self.sizes, self.born, self.died)

    def orders(self) -> Iterator[np.ndarray]:
        """Those that are tried: by size, by size times lifetime, by lifetime; what lives all the time is first."""
        last = max(int(self.born.max(initial=0)), int(self.died[self.died < _FOREVER].max(initial=0))) + 1
        first = int(self.born.min(initial=0))
        span = np.minimum(self.died, last) - np.maximum(self.born, first)
        always = (self.died == _FOREVER) & (self.born <= first)
        for key in (self.sizes, self.sizes * span.astype(float), span):
            yield np.lexsort((self.born, -key, ~always))

    def place(self, order: np.ndarray) -> tuple[np.ndarray, int]:
        """Give each block in this order the lowest address that is free while it lives; the addresses and the end."""
        addresses = np.zeros(len(order), np.int64)
        born, died, begins, ends = (np.empty(len(order), np.int64) for _ in range(4))
        top = 0
        for placed, block in enumerate(order):
            beside = (born[:placed] < self.died[block]) & (died[:placed] > self.born[block])
            address = _lowest_gap(begins[:placed][beside], ends[:placed][beside], int(self.sizes[block]))
            addresses[block] = begins[placed] = address
            ends[placed] = address + self.sizes[block]
            born[placed], died[placed] = self.born[block], self.died[block]
            top = max(top, int(ends[placed]))
        return addresses, top


def _lowest_gap(begins: np.ndarray, ends: np.ndarray, nbytes: int) -> int:
    """The lowest address at which so many bytes overlap none of these."""
    order = np.argsort(begins, kind="stable")
    below = np.maximum.accumulate(np.concatenate([[0], ends[order]]))  # all that lies lower has ended here
    fits = np.flatnonzero(begins[order] - below[:-1] >= nbytes)
    return int(below[fits[0]] if len(fits) else below[-1])


def _highest(sizes: np.ndarray, born: np.ndarray, died: np.ndarray) -> int:
    """The largest sum of live bytes."""
    events = np.concatenate([died, born])
    change = np.concatenate([-sizes, sizes])
    order = np.argsort(events, kind="stable")  # at the same event, what dies makes room for what is born
    return int(change[order].cumsum().max(initial=0))


# -- torch's caching allocator -----------------------------------------------------------------------------------------

_MIB = 2**20
_ROUNDING, _SMALL, _SMALL_SEGMENT, _LARGE_SEGMENT, _OWN_SEGMENT = 512, _MIB, 2 * _MIB, 20 * _MIB, 10 * _MIB


@dataclass(eq=False, slots=True)
class _Block:
    """A part of a segment, in use or free, and its neighbours there."""

    number: int
    nbytes: int
    small: bool
    before: _Block | None = None
    after: _Block | None = None
    free: bool = False


@dataclass(eq=False)
class _CachingAllocator:
    """Torch's caching allocator for CUDA with its default settings: best fit, split blocks, segments that stay."""

    reserved: int = 0
    numbers: Iterator[int] = field(default_factory=count)
    blocks: dict[int, _Block] = field(default_factory=dict)
    unused: dict[bool, list[tuple[int, int]]] = field(default_factory=lambda: {True: [], False: []})
    """By whether they are small: (bytes, number) of free blocks, sorted."""

    def allocate(self, nbytes: int) -> int:
        """The number of the block that is given out."""
        nbytes = -(-max(nbytes, 1) // _ROUNDING) * _ROUNDING
        small = nbytes <= _SMALL
        pool = self.unused[small]
        place = bisect_left(pool, (nbytes, 0))
        block = self.blocks[pool.pop(place)[1]] if place < len(pool) else self._segment(nbytes, small)
        block.free = False
        rest = block.nbytes - nbytes
        if rest >= _ROUNDING if small else rest > _SMALL:
            block.nbytes = nbytes
            behind = self._new(rest, small, block, block.after)
            if behind.after is not None:
                behind.after.before = behind
            block.after = behind
            self._keep(behind)
        return block.number

    def release(self, number: int) -> None:
        block = self.blocks[number]
        for other in (block.before, block.after):
            if other is not None and other.free:
                pool = self.unused[other.small]
                del pool[bisect_left(pool, (other.nbytes, other.number))]
                low, high = (other, block) if other is block.before else (block, other)
                low.nbytes += high.nbytes
                low.after = high.after
                if low.after is not None:
                    low.after.before = low
                del self.blocks[high.number]
                block = low
        self._keep(block)

    def _segment(self, nbytes: int, small: bool) -> _Block:
        room = _SMALL_SEGMENT if small else _LARGE_SEGMENT
        if nbytes >= _OWN_SEGMENT:
            room = -(-nbytes // _SMALL_SEGMENT) * _SMALL_SEGMENT
        self.reserved += room
        return self._new(room, small)

    def _new(self, nbytes: int, small: bool, before: _Block | None = None, after: _Block | None = None) -> _Block:
        number = next(self.numbers)
        block = self.blocks[number] = _Block(number, nbytes, small, before, after)
        return block

    def _keep(self, block: _Block) -> None:
        block.free = True
        insort(self.unused[block.small], (block.nbytes, block.number))


def caching_allocator_reserves(window: MemoryWindow) -> int:
    """The bytes that torch's caching allocator takes from the device for a window's allocations, if it begins empty."""
    columns, allocator, given = window.columns, _CachingAllocator(), dict[int, int]()
    events = [(int(event), 1, block) for block, event in enumerate(columns["born"])]
    events += [(int(event), 0, block) for block, event in enumerate(columns["died"]) if event >= 0]
    for _, is_birth, block in sorted(events):
        if is_birth:
            given[block] = allocator.allocate(int(columns["bytes"][block]))
        elif block in given:
            allocator.release(given.pop(block))
    return allocator.reserved


def described(profile: MemoryProfile) -> Iterator[str]:
    """For each device, what a static plan takes beside what the caching allocator reserves."""
    for device, window in sorted(profile.windows.items()):
        found = plan(window)
        if not found.least:
            continue
        reserved, left_out = caching_allocator_reserves(window), ""
        if window.forgotten:
            left_out = f" {window.forgotten:,} short-lived buffers are left out."
        measured = profile.facts.reserved.get(device)
        yield (
            f"{device}: a static plan of the addresses of {len(found.addresses):,} buffers takes {size(found.nbytes)}, "
            f"{found.nbytes / found.least:.3f}x of the most live bytes. Torch's caching allocator, simulated, reserves "
            f"{size(reserved)} ({reserved / found.least:.3f}x)"
            + (f", and held {size(measured)} in the run" if measured else "")
            + f" for the same buffers.{left_out}"
        )
