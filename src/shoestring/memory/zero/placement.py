"""Stores the optimizer's shards and their gradients; `OnDevice` stores them on the parameters' device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from shoestring.memory.zero.buckets import ShardedParameter

Wait = Callable[[], None]
"""Function that waits until the started work is done."""


class Placement(Protocol):
    """Stores shards: moves gradients from the device to the shards, and updated weights back into the parameters."""

    def shard(self, part: ShardedParameter) -> Tensor:
        """Create the tensor that the optimizer updates: this rank's shard of a parameter."""
        ...

    def keep(self, part: ShardedParameter, mean: Tensor) -> Tensor:
        """Store this rank's shard of a mean gradient for the optimizer; the copy may run until `settle` returns."""
        ...

    def settle(self) -> None:
        """Wait until all gradients passed to `keep` are stored."""
        ...

    def write(self, parts: Sequence[ShardedParameter]) -> Wait:
        """Start to write updated shards into this rank's rows of the parameters; return a function that waits."""
        ...


class OnDevice:
    """A `Placement` on the device: shards are views of parameters, or float32 master copies of 16-bit parameters."""

    def __init__(self, masters: bool) -> None:
        self.masters = masters
        self._copies: dict[str, Tensor] = {}

    def shard(self, part: ShardedParameter) -> Tensor:
        """See `Placement`."""
        own = part.shard_of(part.parameter.detach())
        if self.masters and is_half(own):
            own = self._copies[part.name] = own.float()
        return own

    def keep(self, part: ShardedParameter, mean: Tensor) -> Tensor:
        """See `Placement`."""
        return mean

    def settle(self) -> None:
        """See `Placement`."""

    @torch.no_grad()
    def write(self, parts: Sequence[ShardedParameter]) -> Wait:
        """See `Placement`."""
        for part in parts:
            if part.name in self._copies:
                part.shard_of(part.parameter.detach()).copy_(self._copies[part.name])
        return lambda: None


def is_half(tensor: Tensor) -> bool:
    """Whether a tensor is in bfloat16 or float16."""
    return tensor.dtype in (torch.bfloat16, torch.float16)
