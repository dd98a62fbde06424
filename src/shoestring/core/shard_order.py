"""The order in which a DTensor stores a parameter of which each rank holds several slices, such as a fused weight."""

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
    and so the DTensor, has these slices one after another. PyTorch has no placement for several slices of unequal sizes
    per rank. None is needed, because the result of an optimizer step does not depend on the order of the elements.
    """

    shape: tuple[int, ...]
    dim: int
    """The dimension that is split."""
    stretches: tuple[Stretch, ...]
    """Slices of the parameter, in the DTensor's order."""

    @classmethod
    def of(cls, shape: Sequence[int], dim: int, sections: Sequence[int], ranks: int) -> ShardOrder:
        """Return the order of a parameter whose sections are all split over ranks: the slices of rank 0, of rank 1, ….

        Along `dim` the parameter has sections of the sizes `sections`; each rank holds an equal slice of every section.
        """
        starts = itertools.accumulate(sections, initial=0)
        parts = [(start, size // ranks) for start, size in zip(starts, sections, strict=False)]
        return cls(
            tuple(shape), dim, tuple((start + rank * size, size) for rank in range(ranks) for start, size in parts)
        )

    def describes(self, tensor: Tensor) -> bool:
        """Whether the order applies to a tensor of the parameter's optimizer state: to a moment, not to a step
        count."""
        return tensor.ndim == len(self.shape) and tensor.shape[self.dim] == self.shape[self.dim]

    def of_range(self, first: int, size: int) -> Iterator[tuple[int, int, int]]:
        """Yield the slices of the parameter that make up [first, first + size) of the DTensor.

        Each slice is (start in the parameter, size, offset from `first` in the DTensor).
        """
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
