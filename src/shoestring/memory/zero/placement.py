"""Where the shards that the optimizer steps lie, with their gradients: on the parameters' own device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from shoestring.memory.zero.buckets import ShardedParameter

Wait = Callable[[], None]


class Placement(Protocol):
    """Makes shards, and moves what the device computes to them and what the optimizer wrote back."""

    def shard(self, part: ShardedParameter) -> Tensor:
        """What the optimizer steps of a parameter, on this rank."""
        ...

    def keep(self, part: ShardedParameter, mean: Tensor) -> Tensor:
        """The shard of a mean gradient where the optimizer wants it; it may arrive until `settle` returns."""
        ...

    def settle(self) -> None:
        """Wait until all gradients have arrived."""
        ...

    def write(self, parts: Sequence[ShardedParameter]) -> Wait:
        """Start writing what the optimizer stepped into this rank's rows of parameters; returns what waits for it."""
        ...


class OnDevice:
    """Shards are views of the parameters, or master copies of them."""

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
    """Whether its elements have 16 bits."""
    return tensor.dtype in (torch.bfloat16, torch.float16)
