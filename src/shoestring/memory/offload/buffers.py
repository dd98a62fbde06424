"""A pool of buffers in host memory that every step reuses."""

from __future__ import annotations

from bisect import bisect_left, insort

import torch
from torch import Tensor

from shoestring._torch import is_fake
from shoestring.core.attachments import Attachments
from shoestring.memory.offload.copying import CopyStream
from shoestring.memory.offload.host_memory import HostRegion

LEASE = "offloaded activations"


class HostBuffer:
    """Host memory for one tensor of at most `nbytes` at a time; a buffer for fake tensors has no memory."""

    def __init__(self, source: Tensor) -> None:
        self.nbytes = source.nbytes
        self.region = None if is_fake(source) else HostRegion(source.nbytes, source.device)
        self.used = True  # whether the buffer was used since the last `trim`

    def like(self, source: Tensor) -> Tensor:
        """A tensor in this memory with the length and data type of the 1-d `source`; its content is undefined."""
        if self.region is None:
            return torch.empty_like(source, device="meta")
        return self.region.bytes[: source.nbytes].view(source.dtype)

    def close(self) -> None:
        """Unpin the memory, which is freed when the last tensor in it is freed."""
        if self.region is not None:
            self.region.close()


class HostBuffers:
    """A pool of leased host buffers; if no free buffer fits, a buffer of the exact size is allocated."""

    def __init__(self, attachments: Attachments, copies: CopyStream) -> None:
        self.copies, self.memory = copies, attachments.world.memory
        self.nbytes = 0
        self._free: list[HostBuffer] = []  # free buffers, in ascending order of size
        self._taken: set[HostBuffer] = set()
        attachments.exits.callback(self.close)

    def take(self, source: Tensor) -> HostBuffer:
        """Take the smallest free buffer that fits a tensor and is at most twice as large, or else a new buffer."""
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
        """Return a buffer to the pool; later copies into the buffer run after the copies that have already started."""
        if buffer in self._taken:
            self._taken.remove(buffer)
            insort(self._free, buffer, key=_size)

    def trim(self) -> None:
        """Free the buffers that were not used since the last call of `trim`."""
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
        """Free all buffers."""
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
