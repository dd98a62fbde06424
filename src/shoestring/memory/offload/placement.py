"""Stores shards in host memory, where the CPU updates them; copies between host and device overlap with computation."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from shoestring.core.attachments import Attachments
from shoestring.core.feature import Phase
from shoestring.core.leases import Priority
from shoestring.memory.offload.copying import CopyStream
from shoestring.memory.offload.host_memory import HostRegion, aligned
from shoestring.memory.zero.buckets import ShardedParameter
from shoestring.memory.zero.placement import Wait, is_half

LEASE = "offloaded optimizer state"


class OnHost:
    """A `Placement` in host memory, which stores a shard and a buffer for each parameter. The buffer has the
    parameter's data type, and holds the gradient on its way to the host and the weights on their way to the device.

    On a GPU, all copies share one stream, so that a gradient cannot overwrite weights that are still being copied.

    Args:
        masters: whether shards of 16-bit parameters are float32 master copies.
        twice: whether gradients may be set aside, which needs a second buffer per parameter.
    """

    def __init__(
        self, attachments: Attachments, parts: Sequence[ShardedParameter], masters: bool, twice: bool = False
    ) -> None:
        self.masters = masters
        device = attachments.world.device
        self.copies = CopyStream(device)
        shapes = {part.name: part.shard_of(part.parameter).shape for part in parts}
        types = {part.name: (self._type_of(part), part.parameter.dtype) for part in parts}
        taken = [
            (name, dtype) for name, (own, parameter) in types.items() for dtype in (own, *[parameter] * (1 + twice))
        ]
        self.region = HostRegion(sum(aligned(shapes[name].numel() * dtype.itemsize) for name, dtype in taken), device)
        self._more: dict[str, Tensor] = {}
        self._exits = attachments.exits
        attachments.exits.callback(self.region.close)
        # The lease includes the optimizer's future state, assumed to be two float32 averages per element, as in Adam.
        needed = self.region.nbytes + 8 * sum(shape.numel() for shape in shapes.values())
        attachments.world.memory.take(LEASE, needed)
        attachments.exits.callback(attachments.world.memory.give, LEASE)
        self.shards = {name: self.region.take(shapes[name], types[name][0]) for name in shapes}
        self.travelling = {name: self.region.take(shapes[name], types[name][1]) for name in shapes}
        self.second = {name: self.region.take(shapes[name], types[name][1]) for name in shapes} if twice else {}
        self._arrived: set[str] = set()  # parameters whose buffer holds a gradient
        self._memory, self._turn = attachments.world.memory, ExitStack()
        self._copying = False
        attachments.at(Phase.CAPTURE, self._end_turn)
        attachments.exits.callback(self._end_turn)

    def _type_of(self, part: ShardedParameter) -> torch.dtype:
        return torch.float32 if self.masters and is_half(part.parameter) else part.parameter.dtype

    def shard(self, part: ShardedParameter) -> Tensor:
        """See `Placement`."""
        return self.shards[part.name].copy_(part.shard_of(part.parameter.detach()))

    @torch.no_grad()
    def keep(self, part: ShardedParameter, mean: Tensor) -> Tensor:
        """See `Placement`."""
        if not self._copying:  # from a step's first gradient to the end of the step, less urgent copies wait
            self._turn.enter_context(self._memory.turn(Priority.REQUIRED))
            self._copying = True
        buffer = self.travelling[part.name]
        if part.name in self._arrived or buffer.dtype != mean.dtype:  # gradients of a later micro-batch
            buffer = self._additional_buffer(part.name, mean)
        else:
            self._arrived.add(part.name)
        with self.copies.after_compute():
            buffer.copy_(mean, non_blocking=True)
            if self.copies.stream is not None:
                mean.record_stream(self.copies.stream)
        return buffer

    def _additional_buffer(self, name: str, mean: Tensor) -> Tensor:
        """A buffer for gradients of later micro-batches, until they are added to the first micro-batch's gradient."""
        if name not in self._more:
            region = HostRegion(mean.nbytes, mean.device)
            self._exits.callback(region.close)
            self._more[name] = region.take(mean.shape, mean.dtype)
        return self._more[name]

    def set_aside(self, name: str) -> None:
        """Swap a parameter's two buffers, so that the first buffer's gradient stays until the next swap."""
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
