"""Computes a static allocation plan: a fixed address for every buffer of a step, if all steps make equal allocations.

The plan is computed from the lifetimes of the buffers, as in EasyDist for static graphs. The plan is only reported, not
executed, because torch's statistics and debugging tools cannot see memory that a plan allocates. The report compares
the plan's size with the memory that torch's caching allocator would reserve for the same allocations, according to a
simulation of the allocator.

Buffers are placed one by one, large buffers first, at the lowest address that is free during the buffer's lifetime. The
size of such a plan is close to the lower bound (Pisarchyk and Lee, 2020). The planner tries several orders of the
buffers. Then, for some rounds, the planner moves the buffers with the highest end addresses to the front of the best
order.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from shoestring.figures import memory
from shoestring.memory.tracing.recording import MemoryProfile, MemoryWindow

ALIGNMENT = 64
"""Alignment of addresses in bytes: a cache line of a CPU."""

_CLOSE = 1.001
"""A plan whose size is at most this multiple of the peak of live bytes is good enough: the planner tries no further."""
_ROUNDS = 12
"""Maximum number of attempts to improve the best order."""
_FOREVER = np.iinfo(np.int64).max
"""Release event of a block that is not freed in the window."""


@dataclass(frozen=True, eq=False)
class AllocationPlan:
    """Addresses for the blocks of a window."""

    addresses: np.ndarray
    """(N,) offset of each block in bytes from the start of the planned memory."""
    nbytes: int
    """Size of the planned memory."""
    least: int
    """Peak of live bytes, which is a lower bound of the size of any plan."""


def plan(window: MemoryWindow, alignment: int = ALIGNMENT) -> AllocationPlan:
    """Plan the addresses of a window's blocks, so that blocks that live at the same time do not overlap.

    Args:
        alignment: alignment of addresses in bytes.
    """
    lives = _Lives.of(window, alignment)
    order = min(lives.orders(), key=lambda candidate: lives.place(candidate)[1])
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
    """Sizes and lifetimes of N blocks, as (N,) arrays: bytes, event of the allocation, event of the release."""

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
        """Yield the orders to try: by size, by size times lifetime, by lifetime; blocks never freed come first."""
        last = max(int(self.born.max(initial=0)), int(self.died[self.died < _FOREVER].max(initial=0))) + 1
        first = int(self.born.min(initial=0))
        span = np.minimum(self.died, last) - np.maximum(self.born, first)
        always = (self.died == _FOREVER) & (self.born <= first)
        for key in (self.sizes, self.sizes * span.astype(float), span):
            yield np.lexsort((self.born, -key, ~always))

    def place(self, order: np.ndarray) -> tuple[np.ndarray, int]:
        """Place the blocks, in this order, at the lowest address that is free during the block's lifetime.

        Returns:
            Addresses of the blocks, (N,), and the highest end address.
        """
        addresses = np.zeros(len(order), np.int64)
        born, died, begins, ends = (np.empty(len(order), np.int64) for _ in range(4))
        top = 0
        for placed, block in enumerate(order):
            beside = (born[:placed] < self.died[block]) & (died[:placed] > self.born[block])
            lower, upper = begins[:placed][beside], ends[:placed][beside]
            by_address = np.argsort(lower, kind="stable")
            # Address ranges may overlap, because the blocks need not live at the same time as each other. The end of
            # all blocks below a gap is therefore a running maximum.
            below = np.maximum.accumulate(np.concatenate([[0], upper[by_address]]))
            fits = np.flatnonzero(lower[by_address] - below[:-1] >= self.sizes[block])
            address = int(below[fits[0]] if len(fits) else below[-1])
            addresses[block] = begins[placed] = address
            ends[placed] = address + self.sizes[block]
            born[placed], died[placed] = self.born[block], self.died[block]
            top = max(top, int(ends[placed]))
        return addresses, top


def _highest(sizes: np.ndarray, born: np.ndarray, died: np.ndarray) -> int:
    """The largest number of bytes that are live at the same time."""
    events = np.concatenate([died, born])
    change = np.concatenate([-sizes, sizes])
    order = np.argsort(events, kind="stable")  # stable: at the same event, releases come first
    return int(change[order].cumsum().max(initial=0))


# -- torch's caching allocator -----------------------------------------------------------------------------------------

_MIB = 2**20
# In torch's source: kMinBlockSize, kSmallSize, kSmallBuffer (and kRoundLarge), kLargeBuffer, kMinLargeAlloc.
_ROUNDING, _SMALL, _SMALL_SEGMENT, _LARGE_SEGMENT, _OWN_SEGMENT = 512, _MIB, 2 * _MIB, 20 * _MIB, 10 * _MIB


@dataclass(eq=False, slots=True)
class _Block:
    """A block of a segment, in use or free, linked to the adjacent blocks."""

    number: int
    nbytes: int
    small: bool
    before: _Block | None = None
    after: _Block | None = None
    free: bool = False


@dataclass(eq=False)
class _CachingAllocator:
    """Simulates torch's CUDA caching allocator with default settings: best fit, splits blocks, frees no segments."""

    reserved: int = 0
    """Total bytes of all segments."""
    numbers: Iterator[int] = field(default_factory=count)
    blocks: dict[int, _Block] = field(default_factory=dict)
    unused: dict[bool, list[tuple[int, int]]] = field(default_factory=lambda: {True: [], False: []})
    """Free blocks in the pools of small (True) and large (False) blocks: sorted (bytes, number of the block)."""

    def allocate(self, nbytes: int) -> int:
        """Allocate a block, and return its number."""
        nbytes = -(-max(nbytes, 1) // _ROUNDING) * _ROUNDING
        small = nbytes <= _SMALL
        pool = self.unused[small]
        place = bisect_left(pool, (nbytes, 0))
        if place < len(pool):
            block = self.blocks[pool.pop(place)[1]]
        else:
            room = _SMALL_SEGMENT if small else _LARGE_SEGMENT
            if nbytes >= _OWN_SEGMENT:
                room = -(-nbytes // _SMALL_SEGMENT) * _SMALL_SEGMENT
            self.reserved += room
            block = self._new(room, small)
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
        """Free a block, and merge it with adjacent free blocks."""
        block = self.blocks[number]
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                pool = self.unused[neighbour.small]
                del pool[bisect_left(pool, (neighbour.nbytes, neighbour.number))]
                low, high = (neighbour, block) if neighbour is block.before else (block, neighbour)
                low.nbytes += high.nbytes
                low.after = high.after
                if low.after is not None:
                    low.after.before = low
                del self.blocks[high.number]
                block = low
        self._keep(block)

    def _new(self, nbytes: int, small: bool, before: _Block | None = None, after: _Block | None = None) -> _Block:
        number = next(self.numbers)
        block = self.blocks[number] = _Block(number, nbytes, small, before, after)
        return block

    def _keep(self, block: _Block) -> None:
        block.free = True
        insort(self.unused[block.small], (block.nbytes, block.number))


def caching_allocator_reserves(window: MemoryWindow) -> int:
    """Bytes that torch's caching allocator, initially empty, reserves on the device for a window's allocations."""
    columns, allocator, numbers = window.columns, _CachingAllocator(), dict[int, int]()
    events = [(int(event), 1, block) for block, event in enumerate(columns["born"])]
    events += [(int(event), 0, block) for block, event in enumerate(columns["died"]) if event >= 0]
    for _, is_birth, block in sorted(events):
        if is_birth:
            numbers[block] = allocator.allocate(int(columns["bytes"][block]))
        elif block in numbers:
            allocator.release(numbers.pop(block))
    return allocator.reserved


def described(profile: MemoryProfile) -> Iterator[str]:
    """Yield a sentence for each device that compares the plan's size with the caching allocator's reserved memory."""
    for device, window in sorted(profile.windows.items()):
        best = plan(window)
        if not best.least:
            continue
        reserved, left_out = caching_allocator_reserves(window), ""
        if window.forgotten:
            left_out = f" {window.forgotten:,} short-lived buffers are left out."
        measured = profile.facts.reserved.get(device)
        yield (
            f"{device}: a static plan of the addresses of {len(best.addresses):,} buffers takes "
            f"{memory(best.nbytes)}, {best.nbytes / best.least:.3f}x of the most live bytes. "
            f"Torch's caching allocator, simulated, reserves {memory(reserved)} ({reserved / best.least:.3f}x)"
            + (f", and held {memory(measured)} in the run" if measured else "")
            + f" for the same buffers.{left_out}"
        )
