"""Reduces gradients bucket by bucket while the backward pass computes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoestring.memory.zero.buckets import Bucket, ShardedParameter
from shoestring.memory.zero.buffers import Buffers
from shoestring.memory.zero.collectives import Collectives
from shoestring.memory.zero.placement import Placement


class Gradients:
    """Reduce-scatters gradients in rounds: whole gradients come in, this rank's shards of the means come out.

    In a round, every bucket is exchanged once, in the reverse order of the forward pass. A bucket waits for the buckets
    before it, so all ranks have the same order, even with unused parameters and at unequal speed. A gradient that is
    missing on only some of the ranks counts as zeros on these ranks. A second gradient for the same parameter ends the
    round.

    Args:
        buckets: all buckets, in the order of the forward pass.
        buffers: the model's buffers; at the end of each round, ranks exchange flags of the buffers that have changed.
        in_flight: maximum bytes of gradients in exchange while the backward pass continues.
        placement: stores the shards of mean gradients.
        give: function called at the end of each round for each parameter, with this rank's shard of the mean gradient.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        buffers: Buffers,
        collectives: Collectives,
        in_flight: float,
        placement: Placement,
        give: Callable[[ShardedParameter, Tensor], None],
    ) -> None:
        self.buckets, self.collectives, self.in_flight = list(reversed(buckets)), collectives, in_flight
        self.buffers, self.placement, self.give = buffers, placement, give
        self.parts = {part.name: part for bucket in self.buckets for part in bucket.parts}
        self.bucket_of = {part.name: index for index, bucket in enumerate(self.buckets) for part in bucket.parts}
        self.exchanging = True  # whether gradients are exchanged as they arrive
        self.narrow = True  # whether means have the parameters' data type, whose 16 bits are enough for one micro-batch
        self._means: dict[str, Tensor] = {}  # mean shards of the current round
        self._flags: Callable[[], Tensor] | None = None  # waits for the flags of a closed round and returns them
        self._pending: deque[tuple[Bucket, Callable[[torch.dtype], Tensor]]] = deque()  # buckets in exchange
        self._begin()

    def _begin(self) -> None:
        """Begin a new round of exchanges."""
        self.arrived: set[str] = set()  # names of parameters whose gradient has arrived
        self._missing = [len(bucket.parts) for bucket in self.buckets]  # missing gradients per bucket
        self._started = 0  # number of buckets whose exchange has started

    def arrive(self, part: ShardedParameter) -> None:
        """Take the gradient of a parameter; autograd calls this when `parameter.grad` is set."""
        if not self.exchanging:
            return
        if part.name in self.arrived:
            self.close()
        if self._flags is not None:
            self.collect()
        self.arrived.add(part.name)
        self._missing[self.bucket_of[part.name]] -= 1
        while self._started < len(self.buckets) and not self._missing[self._started]:
            self._start()

    def close(self) -> None:
        """End the round: exchange missing gradients as zeros, and start the exchange of flags."""
        if self._flags is not None:
            self.collect()
        while self._started < len(self.buckets):
            self._start()
        flags = [part.name in self.arrived for part in self.parts.values()] + self.buffers.changed()
        device = self.buckets[0].device
        self._flags = self.collectives.start_any(torch.tensor(flags, dtype=torch.uint8, device=device))
        self._begin()

    def collect(self) -> None:
        """Wait for a closed round, and call `give` with the round's mean gradients."""
        if self._flags is None:
            return
        with self.collectives.waiting():
            while self._pending:
                self._finish()
            flags, self._flags = self._flags().tolist(), None
            self.placement.settle()
        used, changed = flags[: len(self.parts)], flags[len(self.parts) :]
        self.buffers.see(changed)
        means, self._means = self._means, {}
        for part, any_used in zip(self.parts.values(), used, strict=True):
            if any_used:
                self.give(part, means.pop(part.name))

    def finish(self) -> None:
        """Exchange all remaining gradients, in case the training loop does not mark the last backward pass."""
        self.exchanging, before = True, self.exchanging
        for part in reversed(self.parts.values()):
            if part.parameter.grad is not None and part.name not in self.arrived:
                self.arrive(part)
        if self.arrived:
            self.close()
        self.collect()
        self.exchanging = before

    def abandon(self) -> None:
        """Drop all gradients and the current round, after an error."""
        for part in self.parts.values():
            part.parameter.grad = None
        self._pending.clear()
        self._means.clear()
        self._flags = None
        self._begin()

    def _start(self) -> None:
        """Start to exchange the next bucket, after waiting for earlier buckets if `in_flight` would be exceeded."""
        bucket = self.buckets[self._started]
        self._started += 1
        while self._pending and sum(other.nbytes for other, _ in self._pending) + bucket.nbytes > self.in_flight:
            self._finish()
        grads = []
        for part in bucket.parts:
            grad, part.parameter.grad = part.parameter.grad, None
            if grad is not None:
                self.arrived.add(part.name)  # the gradient may be of an earlier micro-batch, not exchanged yet
            grads.append(torch.zeros_like(part.parameter) if grad is None else grad)
        self._pending.append((bucket, self.collectives.start_mean(bucket.pack(grads))))
        if self.collectives.size == 1:  # there is nothing to wait for
            self._finish()

    def _finish(self) -> None:
        """Wait for the oldest bucket in exchange, and store its means."""
        bucket, wait = self._pending.popleft()
        alone = self.collectives.size == 1  # with one rank, there is no sum, which would need more bits
        mean = wait(bucket.dtype if self.narrow or alone else torch.promote_types(bucket.dtype, torch.float32))
        for part, shard in zip(bucket.parts, bucket.shards(mean), strict=True):
            self._means[part.name] = self.placement.keep(part, shard)
