"""Buffers, such as the running averages of batch norms: what a forward pass changed becomes the first rank's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from shoestring.memory.zero.collectives import Collectives


class Buffers:
    """Notices changes by a copy of each buffer: batch norms change theirs without torch's count of versions."""

    def __init__(self, buffers: Iterable[Tensor], collectives: Collectives) -> None:
        self.collectives = collectives
        self.buffers = list(buffers) if collectives.size > 1 else []
        self.before = [buffer.clone() for buffer in self.buffers]
        self.noted = [False] * len(self.buffers)

    def changed(self) -> list[bool]:
        """Whether each differs from what it was at the last `align`."""
        return [not torch.equal(one, other) for one, other in zip(self.buffers, self.before, strict=True)]

    def see(self, changed: Sequence[int]) -> None:
        """Note which have changed on any rank."""
        self.noted = [one or bool(other) for one, other in zip(self.noted, changed, strict=True)]

    @torch.no_grad()
    def align(self) -> None:
        """Broadcast the first rank's, of those noted; between a backward pass, which may need them, and the next."""
        pairs = [
            (one, before) for one, before, noted in zip(self.buffers, self.before, self.noted, strict=True) if noted
        ]
        self.collectives.broadcast([buffer for buffer, _ in pairs])
        for buffer, before in pairs:
            before.copy_(buffer)
        self.noted = [False] * len(self.buffers)
