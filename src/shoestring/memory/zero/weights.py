"""Gathers parameters in buckets after the step; the next forward pass waits for each unit just before using it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoestring.memory.zero.buckets import Bucket
from shoestring.memory.zero.collectives import Collectives
from shoestring.memory.zero.placement import Placement, Wait

TAG = 1 << 20  # tag of the first bucket's messages, distinct from the tags of other messages in the group


class Weights:
    """All-gathers parameters from the updated shards of all ranks.

    Args:
        placement: writes the updated shards into this rank's rows of the parameters.
    """

    def __init__(self, buckets: Sequence[Bucket], collectives: Collectives, placement: Placement) -> None:
        self.buckets, self.collectives, self.placement = buckets, collectives, placement
        self._pending: dict[int, Wait] = {}  # bucket index -> wait, in the order of the forward pass

    @torch.no_grad()
    def start(self, index: int) -> None:
        """Start to gather a bucket; all ranks must start the same buckets in the same order."""
        bucket = self.buckets[index]
        written = self.placement.write(bucket.parts)
        if self.collectives.size == 1:
            self._pending[index] = written
            return
        written()
        matrix = bucket.matrix()
        gathered = self.collectives.start_gather(matrix, TAG + index)

        def arrive() -> None:
            gathered()
            bucket.unpack(matrix)

        self._pending[index] = arrive

    @torch.no_grad()
    def wait(self, unit: int | None = None) -> None:
        """Wait for the parameters of one unit of the model, or for all parameters if `unit` is None."""
        if not self._pending:
            return
        for index in [index for index in self._pending if unit is None or self.buckets[index].unit == unit]:
            with self.collectives.waiting():
                self._pending.pop(index)()

    def refresh(self) -> None:
        """Gather all parameters and wait for them; called after a checkpoint was loaded."""
        self.wait()
        for index in range(len(self.buckets)):
            self.start(index)
        self.wait()
