"""Keeps buffers equal on all ranks: buffers that a forward pass changed, such as running averages of batch norms, are
broadcast from the first rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from shoestring.collectives import bytes_of
from shoestring.memory.zero.collectives import Collectives


class Buffers:
    """Detects changed buffers by comparing them with copies, because batch norms do not raise buffers' versions."""

    def __init__(self, buffers: Iterable[Tensor], collectives: Collectives) -> None:
        self.collectives = collectives
        self.buffers = list(buffers) if collectives.size > 1 else []
        self.before = [buffer.clone() for buffer in self.buffers]
        self.noted = [False] * len(self.buffers)

    def changed(self) -> list[bool]:
        """For each buffer, whether it has changed on this rank since the last `align`."""
        return [
            not torch.equal(bytes_of(buffer), bytes_of(before))
            for buffer, before in zip(self.buffers, self.before, strict=True)
        ]

    def see(self, changed: Sequence[int]) -> None:
        """Note which buffers have changed on any rank."""
        self.noted = [noted or bool(now) for noted, now in zip(self.noted, changed, strict=True)]

    @torch.no_grad()
    def align(self) -> None:
        """Broadcast the first rank's values of the noted buffers; must run between steps, outside backward passes."""
        pairs = [
            (buffer, before)
            for buffer, before, noted in zip(self.buffers, self.before, self.noted, strict=True)
            if noted
        ]
        self.collectives.broadcast([buffer for buffer, _ in pairs])
        for buffer, before in pairs:
            before.copy_(buffer)
        self.noted = [False] * len(self.buffers)
