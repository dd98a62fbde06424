"""Parameters, gathered in buckets after the step; the next forward pass waits for each where it begins to use it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoestring.memory.zero.buckets import Bucket
from shoestring.memory.zero.collectives import Collectives
from shoestring.memory.zero.placement import Placement, Wait

TAG = 1 << 20  # of the first bucket's messages: apart from what else a program sends in the group


class Weights:
    """Gathers parameters from the shards that ranks have stepped.

    Args:
        placement: writes what the optimizer stepped into this rank's rows of the parameters.
    """

    def __init__(self, buckets: Sequence[Bucket], collectives: Collectives, placement: Placement) -> None:
        self.buckets, self.collectives, self.placement = buckets, collectives, placement
        self._pending: dict[int, Wait] = {}  # by the bucket's number, in the order of the forward pass

    @torch.no_grad()
    def start(self, index: int) -> None:
        """Start gathering a bucket; all ranks start the same buckets in the same order."""
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
        """Wait for the parameters of one unit of the model, or for all."""
        if not self._pending:
            return
        for index in [each for each in self._pending if unit is None or self.buckets[each].unit == unit]:
            with self.collectives.waiting():
                self._pending.pop(index)()

    def refresh(self) -> None:
        """Gather all parameters now, after a state was loaded."""
        self.wait()
        for index in range(len(self.buckets)):
            self.start(index)
        self.wait()
