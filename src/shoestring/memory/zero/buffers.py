"""Makes buffers equal on all ranks by broadcasting from the first rank the buffers that a forward pass has changed,
such as the running averages of batch norms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from shoestring.collectives import bytes_of
from shoestring.memory.zero.collectives import Collectives


class Buffers:
    """Detects changed buffers by comparison with copies, because batch norms do not increment a buffer's version."""

    def __init__(self, buffers: Iterable[Tensor], collectives: Collectives) -> None:
        self.collectives = collectives
        self.buffers = list(buffers) if collectives.size > 1 else []
        self.before = [buffer.clone() for buffer in self.buffers]
        self.noted = [False] * len(self.buffers)

    def changed(self) -> list[bool]:
        """For each buffer, whether the buffer has changed on this rank since the last `align`."""
        return [
            not torch.equal(bytes_of(buffer), bytes_of(before))
            for buffer, before in zip(self.buffers, self.before, strict=True)
        ]

    def see(self, changed: Sequence[int]) -> None:
        """Note which buffers have changed on any rank."""
        self.noted = [noted or bool(now) for noted, now in zip(self.noted, changed, strict=True)]

    @torch.no_grad()
    def align(self) -> None:
        """Broadcast the noted buffers from the first rank; must run between steps, outside of backward passes."""
        pairs = [
            (buffer, before)
            for buffer, before, noted in zip(self.buffers, self.before, self.noted, strict=True)
            if noted
        ]
        self.collectives.broadcast([buffer for buffer, _ in pairs])
        for buffer, before in pairs:
            before.copy_(buffer)
        self.noted = [False] * len(self.buffers)
