"""The order in which ranks hold a dimension of a parameter of which each has several stretches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Stretch = tuple[int, int]
"""First index and size."""


@dataclass(frozen=True)
class ShardOrder:
    """How the DTensor of a fused weight lies in the parameter.

    A rank that has half of the queries, keys and values each holds three stretches of the fused weight. Its shard has
    them one behind the other, and so the DTensor has them, as if the parameter were in the order of the ranks. torch
    has no placement for stretches of unequal sizes, and need not know: an optimizer does not depend on the order.
    """

    shape: tuple[int, ...]
    dim: int
    """The dimension that is split."""
    stretches: tuple[Stretch, ...]
    """Stretches of the parameter, in the DTensor's order."""

    @classmethod
    def of(cls, shape: Sequence[int], dim: int, sections: Sequence[int], ranks: int) -> ShardOrder:
        """The order in which each rank has an equal part of each section of a dimension, one behind the other."""
        starts = itertools.accumulate(sections, initial=0)
        parts = [(start, size // ranks) for start, size in zip(starts, sections, strict=False)]
        return cls(
            tuple(shape), dim, tuple((start + rank * size, size) for rank in range(ranks) for start, size in parts)
        )

    def describes(self, tensor: Tensor) -> bool:
        """Whether a tensor kept for the parameter, such as a moment of its gradient, lies in the same order."""
        return tensor.ndim == len(self.shape) and tensor.shape[self.dim] == self.shape[self.dim]

    def of_range(self, first: int, size: int) -> Iterator[tuple[int, int, int]]:
        """What [first, first + size) of the DTensor is of the parameter: start, size, and distance from `first`."""
        at = 0
        for start, extent in self.stretches:
            low, high = max(first, at), min(first + size, at + extent)
            if low < high:
                yield start + low - at, high - low, low - first
            at += extent

    def into(self, whole: Tensor) -> Tensor:
        """A tensor in the parameter's order, in that of the DTensor."""
        return torch.cat([whole.narrow(self.dim, start, size) for start, size in self.stretches], self.dim)

    def back(self, ordered: Tensor) -> Tensor:
        """The inverse of `into`."""
        whole, at = torch.empty_like(ordered), 0
        for start, size in self.stretches:
            whole.narrow(self.dim, start, size).copy_(ordered.narrow(self.dim, at, size))
            at += size
        return whole


Orders = Mapping[str, ShardOrder]
"""Name of a parameter -> the order of its DTensor, for those that are in another order than their parameter."""
