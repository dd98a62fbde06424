"""Divides parameters among ranks, and groups the shards into the buckets that ranks exchange.

Every parameter is divided along its first dimension as by `torch.chunk`, like a DTensor with `Shard(0)`.
A bucket is a matrix with a row for each rank: row r holds rank r's shards of the bucket's parameters, padded to equal
length. A large parameter that divides evenly already has the layout of such a matrix, so it is exchanged without a
copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

LARGE = 2**18
"""Minimum size in bytes of a parameter with its own bucket. Sending this size takes 2 ms at 1 Gbit/s, ten times a
collective's latency."""


@dataclass(frozen=True, eq=False)
class ShardedParameter:
    """A parameter that is divided among ranks, and the layout of its shards.

    Args:
        unit: number of the only block of the model that uses the parameter; 0 if there is no such block.
        ranks: number of ranks that hold shards.
    """

    name: str
    parameter: Tensor
    unit: int
    ranks: int
    rank: int

    @property
    def whole(self) -> bool:
        """Whether every rank holds the whole parameter, because a 0-d tensor cannot be divided."""
        return self.parameter.ndim == 0

    @cached_property
    def chunk(self) -> int:
        """Number of rows in the largest shard."""
        return 1 if self.whole else -(-len(self.parameter) // self.ranks)

    @cached_property
    def width(self) -> int:
        """Number of elements in the largest shard."""
        return self.chunk if self.whole else self.chunk * self.parameter[:1].numel()

    @property
    def even(self) -> bool:
        """Whether all shards have the same size and are adjacent in memory."""
        return self.parameter.is_contiguous() and self.width * self.ranks == self.parameter.numel()

    def rows(self, rank: int) -> slice:
        """The rows of the parameter in a rank's shard."""
        length = len(self.parameter)
        return slice(min(rank * self.chunk, length), min((rank + 1) * self.chunk, length))

    def shard_of(self, tensor: Tensor, rank: int | None = None) -> Tensor:
        """A view of a rank's shard (this rank's if `rank` is None) in a tensor of the parameter's shape."""
        return tensor if self.whole else tensor[self.rows(self.rank if rank is None else rank)]


class Bucket:
    """Parameters of one data type and unit that are exchanged together."""

    def __init__(self, parts: Sequence[ShardedParameter]) -> None:
        self.parts = tuple(parts)
        first = self.parts[0]
        self.unit, self.ranks, self.rank = first.unit, first.ranks, first.rank
        self.dtype, self.device = first.parameter.dtype, first.parameter.device
        self.width = sum(part.width for part in self.parts)
        self.in_place = len(self.parts) == 1 and first.even
        self.nbytes = self.ranks * self.width * first.parameter.element_size()

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """Pack tensors of the parameters' shapes into a matrix (ranks, width), without a copy for a single tensor."""
        if self.in_place and tensors[0].is_contiguous():
            return tensors[0].view(self.ranks, self.width)
        matrix = torch.zeros(self.ranks, self.width, dtype=self.dtype, device=self.device)
        for part, tensor, columns in zip(self.parts, tensors, self._columns(matrix), strict=True):
            for rank in range(self.ranks):
                shard = part.shard_of(tensor, rank)
                columns[rank, : shard.numel()].view(shard.shape).copy_(shard)
        return matrix

    def shards(self, row: Tensor) -> list[Tensor]:
        """Split this rank's row, (width,), into views with the shapes of the shards."""
        shapes = [part.shard_of(part.parameter).shape for part in self.parts]
        pieces = row.split([part.width for part in self.parts])
        return [piece[: shape.numel()].view(shape) for piece, shape in zip(pieces, shapes, strict=True)]

    def matrix(self) -> Tensor:
        """A matrix (ranks, width) for an all-gather, with this rank's row filled; may be a view of a parameter."""
        if self.in_place:
            return self.parts[0].parameter.detach().view(self.ranks, self.width)
        matrix = torch.empty(self.ranks, self.width, dtype=self.dtype, device=self.device)
        for part, shard in zip(self.parts, self.shards(matrix[self.rank]), strict=True):
            shard.copy_(part.shard_of(part.parameter.detach()))
        return matrix

    def unpack(self, matrix: Tensor) -> None:
        """Copy the other ranks' rows of a gathered matrix into the parameters."""
        if self.in_place:
            return
        for part, columns in zip(self.parts, self._columns(matrix), strict=True):
            for rank in range(self.ranks):
                if rank != self.rank and not part.whole:
                    shard = part.shard_of(part.parameter.detach(), rank)
                    shard.copy_(columns[rank, : shard.numel()].view(shard.shape))

    def _columns(self, matrix: Tensor) -> Sequence[Tensor]:
        return matrix.split([part.width for part in self.parts], dim=1)


def deal_buckets(parts: Iterable[ShardedParameter], nbytes: int) -> list[Bucket]:
    """Group parameters into buckets; parameters and buckets are in the order of the forward pass.

    Args:
        nbytes: maximum size in bytes of a bucket with several parameters.
    """
    buckets: list[Bucket] = []
    run: list[ShardedParameter] = []
    for part in parts:
        if run and part.unit != run[0].unit:
            buckets += _deal_unit(run, nbytes)
            run = []
        run.append(part)
    return buckets + _deal_unit(run, nbytes)


def _deal_unit(parts: Sequence[ShardedParameter], nbytes: int) -> list[Bucket]:
    """Group the parameters of one unit into buckets; buckets of small parameters come first.

    Small parameters come first because buckets are exchanged in reverse order, and a bucket with many parameters is
    complete only near the end of the backward pass.
    """
    large = [[part] for part in parts if part.parameter.nbytes >= LARGE]
    small: list[list[ShardedParameter]] = []
    for part in sorted((part for part in parts if part.parameter.nbytes < LARGE), key=_type_of):
        full = small and sum(other.parameter.nbytes for other in small[-1]) + part.parameter.nbytes > nbytes
        if not small or full or _type_of(small[-1][0]) != _type_of(part):
            small.append([])
        small[-1].append(part)
    return [Bucket(group) for group in (*small, *large)]


_type_of: Callable[[ShardedParameter], str] = lambda part: str(part.parameter.dtype)  # noqa: E731
