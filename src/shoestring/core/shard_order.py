"""The order in which ranks hold slices of a parameter if each rank has several slices, as of a fused weight."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Stretch = tuple[int, int]
"""First index and size of a contiguous slice along one dimension."""


@dataclass(frozen=True)
class ShardOrder:
    """The order of the slices of a fused weight in its DTensor, which differs from their order in the parameter.

    A rank that has half of the queries, keys and values holds three slices of the fused weight. The rank's local shard,
    and so the DTensor, has these slices one after another. PyTorch has no placement for slices of unequal sizes. It
    needs none, because an optimizer does not depend on the order of the elements.
    """

    shape: tuple[int, ...]
    dim: int
    """The dimension that is split."""
    stretches: tuple[Stretch, ...]
    """Slices of the parameter, in the DTensor's order."""

    @classmethod
    def of(cls, shape: Sequence[int], dim: int, sections: Sequence[int], ranks: int) -> ShardOrder:
        """Return the order in which each rank has an equal part of every section along `dim`, and ranks follow each
        other."""
        starts = itertools.accumulate(sections, initial=0)
        parts = [(start, size // ranks) for start, size in zip(starts, sections, strict=False)]
        return cls(
            tuple(shape), dim, tuple((start + rank * size, size) for rank in range(ranks) for start, size in parts)
        )

    def describes(self, tensor: Tensor) -> bool:
        """Whether a tensor that belongs to the parameter, such as a moment of its gradient, has the same order."""
        return tensor.ndim == len(self.shape) and tensor.shape[self.dim] == self.shape[self.dim]

    def of_range(self, first: int, size: int) -> Iterator[tuple[int, int, int]]:
        """Yield (start, size, offset from `first`) of each slice of the parameter that the DTensor holds in [first,
        first + size)."""
        at = 0
        for start, extent in self.stretches:
            low, high = max(first, at), min(first + size, at + extent)
            if low < high:
                yield start + low - at, high - low, low - first
            at += extent

    def into(self, whole: Tensor) -> Tensor:
        """Reorder a tensor from the parameter's order into the DTensor's."""
        return torch.cat([whole.narrow(self.dim, start, size) for start, size in self.stretches], self.dim)

    def back(self, ordered: Tensor) -> Tensor:
        """Reorder a tensor from the DTensor's order into the parameter's."""
        whole, at = torch.empty_like(ordered), 0
        for start, size in self.stretches:
            whole.narrow(self.dim, start, size).copy_(ordered.narrow(self.dim, at, size))
            at += size
        return whole


Orders = Mapping[str, ShardOrder]
"""Name of a parameter -> the order of its DTensor, for parameters whose DTensor has a different order."""
