"""Gradients, exchanged bucket by bucket while the backward pass makes them."""

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
    """Exchanges whole gradients for this rank's shards of their mean over the ranks, in rounds.

    In a round every bucket is exchanged once, in reverse of the forward pass's order, on all ranks alike: a bucket
    waits for those before it, so unused parameters and ranks of unequal speed change no order. A parameter without a
    gradient counts as zeros, unless no rank has one. A second gradient of one parameter ends the round.

    Args:
        buckets: in the order of the forward pass.
        buffers: which rounds align, because a round is where ranks learn of each other.
        in_flight: bytes of gradients that may be under way while the backward pass continues.
        placement: where shards of mean gradients go.
        give: takes a parameter and this rank's shard of its mean gradient, at the end of each round.
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
        self.narrow = True  # whether means have the parameters' 16 bits, which is enough where none is added
        self._means: dict[str, Tensor] = {}  # of the round that is being collected
        self._flags: Callable[[], Tensor] | None = None
        self._pending: deque[tuple[Bucket, Callable[[torch.dtype], Tensor]]] = deque()
        self._begin()

    def _begin(self) -> None:
        self.arrived: set[str] = set()
        self._missing = [len(bucket.parts) for bucket in self.buckets]
        self._started = 0  # buckets

    def arrive(self, part: ShardedParameter) -> None:
        """A gradient of the parameter has been accumulated; called by autograd, after `parameter.grad` was set."""
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
        """End the round: exchange what has not arrived as zeros."""
        if self._flags is not None:
            self.collect()
        while self._started < len(self.buckets):
            self._start()
        flags = [part.name in self.arrived for part in self.parts.values()] + self.buffers.changed()
        device = self.buckets[0].device
        self._flags = self.collectives.start_any(torch.tensor(flags, dtype=torch.uint8, device=device))
        self._begin()

    def collect(self) -> None:
        """Wait for a round that was closed."""
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
        """Exchange all gradients there are, for a loop that does not say where a step's last backward pass ends."""
        self.exchanging, before = True, self.exchanging
        for part in reversed(self.parts.values()):
            if part.parameter.grad is not None and part.name not in self.arrived:
                self.arrive(part)
        if self.arrived:
            self.close()
        self.collect()
        self.exchanging = before

    def abandon(self) -> None:
        """Drop a round that an error broke off, and all gradients."""
        for part in self.parts.values():
            part.parameter.grad = None
        self._pending.clear()
        self._means.clear()
        self._flags = None
        self._begin()

    def _start(self) -> None:
        bucket = self.buckets[self._started]
        self._started += 1
        while self._pending and self._in_flight() + bucket.nbytes > self.in_flight:
            self._finish()
        grads = []
        for part in bucket.parts:
            grad, part.parameter.grad = part.parameter.grad, None
            if grad is not None:
                self.arrived.add(part.name)  # in an earlier micro-batch, if not now
            grads.append(torch.zeros_like(part.parameter) if grad is None else grad)
        self._pending.append((bucket, self.collectives.start_mean(bucket.pack(grads))))
        if self.collectives.size == 1:  # nothing is under way
            self._finish()

    def _in_flight(self) -> int:
        return sum(bucket.nbytes for bucket, _ in self._pending)

    def _finish(self) -> None:
        bucket, wait = self._pending.popleft()
        alone = self.collectives.size == 1  # nothing was added up
        mean = wait(bucket.dtype if self.narrow or alone else torch.promote_types(bucket.dtype, torch.float32))
        for part, shard in zip(bucket.parts, bucket.shards(mean), strict=True):
            self._means[part.name] = self.placement.keep(part, shard)
