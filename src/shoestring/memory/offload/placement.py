"""Shards in host memory, which the CPU steps: gradients stream down and weights stream up beside the device's work."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from shoestring.core.feature import Phase
from shoestring.core.job import Job
from shoestring.core.leases import Priority
from shoestring.memory.offload.copying import CopyStream
from shoestring.memory.offload.host_memory import HostRegion, aligned
from shoestring.memory.zero.buckets import ShardedParameter
from shoestring.memory.zero.placement import Wait, is_half

LEASE = "offloaded optimizer state"


class OnHost:
    """Masters and, for what travels, a buffer each of the parameter's type: gradients on the way down, weights up.

    A GPU copies on a stream of its own, so that what comes down overwrites nothing that is still on its way up.

    Args:
        masters: whether what has 16 bits is stepped in float32.
        twice: whether gradients may be set aside, for which there are two buffers.
    """

    def __init__(self, job: Job, parts: Sequence[ShardedParameter], masters: bool, twice: bool = False) -> None:
        self.masters = masters
        device = job.world.device
        self.copies = CopyStream(device)
        shapes = {part.name: part.shard_of(part.parameter).shape for part in parts}
        types = {part.name: (self._type_of(part), part.parameter.dtype) for part in parts}
        taken = [(name, each) for name, (own, parameter) in types.items() for each in (own, *[parameter] * (1 + twice))]
        self.region = HostRegion(sum(aligned(shapes[name].numel() * each.itemsize) for name, each in taken), device)
        self._more: dict[str, Tensor] = {}
        self._exits = job.exits
        job.exits.callback(self.region.close)
        # With what the optimizer will keep: two averages, as Adam does.
        needed = self.region.nbytes + 8 * sum(shape.numel() for shape in shapes.values())
        job.world.memory.take(LEASE, needed)
        job.exits.callback(job.world.memory.give, LEASE)
        self.shards = {name: self.region.take(shapes[name], types[name][0]) for name in shapes}
        self.travelling = {name: self.region.take(shapes[name], types[name][1]) for name in shapes}
        self.second = {name: self.region.take(shapes[name], types[name][1]) for name in shapes} if twice else {}
        self._arrived: set[str] = set()  # whose buffer holds a gradient
        self._memory, self._turn = job.world.memory, ExitStack()
        self._copying = False
        job.at(Phase.CAPTURE, self._end_turn)
        job.exits.callback(self._end_turn)

    def _type_of(self, part: ShardedParameter) -> torch.dtype:
        return torch.float32 if self.masters and is_half(part.parameter) else part.parameter.dtype

    def shard(self, part: ShardedParameter) -> Tensor:
        """See `Placement`."""
        return self.shards[part.name].copy_(part.shard_of(part.parameter.detach()))

    @torch.no_grad()
    def keep(self, part: ShardedParameter, mean: Tensor) -> Tensor:
        """See `Placement`."""
        if not self._copying:  # from the first gradient of a step to its end, what is less urgent waits
            self._turn.enter_context(self._memory.turn(Priority.REQUIRED))
            self._copying = True
        buffer = self.travelling[part.name]
        if part.name in self._arrived or buffer.dtype != mean.dtype:  # the gradients of several micro-batches
            buffer = self._another(part.name, mean)
        else:
            self._arrived.add(part.name)
        with self.copies.after_compute():
            buffer.copy_(mean, non_blocking=True)
            if self.copies.stream is not None:
                mean.record_stream(self.copies.stream)
        return buffer

    def _another(self, name: str, mean: Tensor) -> Tensor:
        """A buffer for the gradients of later micro-batches, which are added to the first ones."""
        if name not in self._more:
            region = HostRegion(mean.nbytes, mean.device)
            self._exits.callback(region.close)
            self._more[name] = region.take(mean.shape, mean.dtype)
        return self._more[name]

    def set_aside(self, name: str) -> None:
        """Leave the buffer of a gradient alone until the next call for this parameter."""
        self.travelling[name], self.second[name] = self.second[name], self.travelling[name]
        self._arrived.discard(name)

    def _end_turn(self) -> None:
        self._turn.close()
        self._copying = False

    def settle(self) -> None:
        """See `Placement`."""
        self.copies.synchronize()

    @torch.no_grad()
    def write(self, parts: Sequence[ShardedParameter]) -> Wait:
        """See `Placement`."""
        for part in parts:
            self.travelling[part.name].copy_(self.shards[part.name])
            self._arrived.discard(part.name)
            with self.copies.after_compute():
                part.shard_of(part.parameter.detach()).copy_(self.travelling[part.name], non_blocking=True)
        return self.copies.mark()
