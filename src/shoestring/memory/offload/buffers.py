"""Buffers in host memory that are used again in each step."""

from __future__ import annotations

from bisect import bisect_left, insort

import torch
from torch import Tensor

from shoestring._torch import is_fake
from shoestring.core.job import Job
from shoestring.memory.offload.copying import CopyStream
from shoestring.memory.offload.host_memory import HostRegion

LEASE = "offloaded activations"


class HostBuffer:
    """Host memory for one tensor at a time, of at most `nbytes`. A fake tensor takes none."""

    def __init__(self, source: Tensor) -> None:
        self.nbytes = source.nbytes
        self.region = None if is_fake(source) else HostRegion(source.nbytes, source.device)
        self.used = True  # since buffers were last trimmed

    def like(self, source: Tensor) -> Tensor:
        """A tensor in this memory, with undefined content, of a one-dimensional source's length and type."""
        if self.region is None:
            return torch.empty_like(source, device="meta")
        return self.region.bytes[: source.nbytes].view(source.dtype)

    def close(self) -> None:
        """Unpin the memory; it is freed with the last tensor in it."""
        if self.region is not None:
            self.region.close()


class HostBuffers:
    """Allocates a buffer of exact size where none that is free fits. All of them are leased."""

    def __init__(self, job: Job, copies: CopyStream) -> None:
        self.copies, self.memory = copies, job.world.memory
        self.nbytes = 0
        self._free: list[HostBuffer] = []  # the smallest first
        self._taken: set[HostBuffer] = set()
        job.exits.callback(self.close)

    def take(self, source: Tensor) -> HostBuffer:
        """The smallest free buffer that the tensor fits into, of at most twice its size; or a new one."""
        place = bisect_left(self._free, source.nbytes, key=_size)
        if place < len(self._free) and self._free[place].nbytes <= 2 * source.nbytes:
            buffer = self._free.pop(place)
        else:
            buffer = HostBuffer(source)
            self._count(buffer.nbytes)
        buffer.used = True
        self._taken.add(buffer)
        return buffer

    def give(self, buffer: HostBuffer) -> None:
        """Let others use a buffer, once the copies so far are done."""
        if buffer in self._taken:
            self._taken.remove(buffer)
            insort(self._free, buffer, key=_size)

    def trim(self) -> None:
        """Free the buffers that were not used since the last call."""
        idle = [buffer for buffer in self._free if not buffer.used]
        if idle:
            self.copies.synchronize()
            self._free = [buffer for buffer in self._free if buffer.used]
            for buffer in idle:
                buffer.close()
            self._count(-sum(buffer.nbytes for buffer in idle))
        for buffer in self._free:
            buffer.used = False

    def close(self) -> None:
        """Free all of them."""
        self.copies.synchronize()
        for buffer in (*self._free, *self._taken):
            buffer.close()
        self._free, self._taken = [], set()
        self.nbytes = 0
        self.memory.give(LEASE)

    def _count(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self.memory.take(LEASE, self.nbytes)


def _size(buffer: HostBuffer) -> int:
    return buffer.nbytes
