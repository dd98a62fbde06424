"""Placements of tensors on ranks, and rules: ways to compute an operator on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Placement = int
"""How a tensor is distributed over ranks: the dimension along which it is sharded, or WHOLE, or SUM."""
WHOLE: Placement = -1
"""Every rank has the whole tensor."""
SUM: Placement = -2
"""The tensor is the sum of the ranks' local tensors."""


def named(placement: Placement) -> str:
    """A placement as torch writes it: R, P, or S(0) for shards along dimension 0."""
    return {WHOLE: "R", SUM: "P"}.get(placement, f"S({placement})")


@dataclass(frozen=True)
class InnerExchange:
    """An exchange between ranks within an operator, if a rank cannot compute its share of the operator by itself.

    `compute(op, args, kwargs, ranks)` is a generator that computes one rank's outputs: it yields tensors, receives
    their sums over the ranks, and returns the outputs.
    """

    nbytes: int
    """Bytes of the tensors that are summed over the ranks."""
    compute: Callable[..., Any]


@dataclass(frozen=True)
class ShardingRule:
    """One way to compute an operator on all ranks: a placement for each output and for each tensor input."""

    outputs: tuple[Placement, ...]
    inputs: tuple[Placement, ...]
    exchange: InnerExchange | None = None

    @property
    def divides(self) -> bool:
        """Whether each rank computes only a part of the operator."""
        return any(placement >= 0 for placement in (*self.outputs, *self.inputs))

    def __str__(self) -> str:
        arrow = " -> " if self.exchange is None else " -exchange-> "
        return ", ".join(map(named, self.inputs)) + arrow + ", ".join(map(named, self.outputs))


@dataclass(frozen=True)
class RuleSet:
    """The rules of an operator; by the first rule, every rank computes the whole operator."""

    rules: tuple[ShardingRule, ...]
    reason: str = ""
    """Why the operator can only be computed whole; empty if it can be divided."""
    tried: bool = False
    """Whether rules were found by trying the operator (`discovery`)."""


OwnRules = Callable[..., Iterable[ShardingRule]]
"""Function: arguments of an operator, with tensors without data -> rules."""


def can_be(placement: Placement, tensor: Tensor, ranks: int) -> bool:
    """Whether a tensor can have this placement: shards must have equal sizes, and sums must be of floating point."""
    if placement == SUM:
        return tensor.is_floating_point()
    if placement == WHOLE:
        return True
    return placement < tensor.ndim and tensor.shape[placement] > 0 and tensor.shape[placement] % ranks == 0


def divide(tensor: Tensor, placement: Placement, ranks: int, noise: torch.Generator | None = None) -> list[Tensor]:
    """The local tensor of each rank, for a tensor with this placement.

    Args:
        noise: source of random summands for SUM; without it, or if the tensor has entries that are not finite, the
            first rank has the tensor and the others zeros.
    """
    if placement == WHOLE:
        return [tensor] * ranks
    if placement >= 0:
        return [shard.contiguous() for shard in tensor.chunk(ranks, placement)]
    if noise is None or not bool(tensor.isfinite().all()):
        return [tensor, *[torch.zeros_like(tensor)] * (ranks - 1)]
    size = tensor.abs().max() if tensor.numel() else 1.0
    parts = [size * torch.randn(tensor.shape, generator=noise, dtype=tensor.dtype) for _ in range(ranks - 1)]
    return [*parts, tensor - sum(parts)]


def divide_over(tensor: Tensor, placements: Sequence[Placement], mesh: Sequence[int]) -> list[Tensor]:
    """The local tensor of each rank of a mesh, for a tensor with a placement along each axis.

    The last axis varies fastest. Ranks along an axis divide what the earlier axes leave to them, as with torch's
    DTensor.
    """
    parts = [tensor]
    for placement, ranks in zip(placements, mesh, strict=True):
        parts = [shard for part in parts for shard in divide(part, placement, ranks)]
    return parts


def join_over(shards: Sequence[Any], placements: Sequence[Placement], mesh: Sequence[int]) -> Any:
    """Join the local tensors of all ranks of a mesh: the inverse of `divide_over`; None if they are None."""
    parts = list(shards)
    for placement, ranks in reversed([*zip(placements, mesh, strict=True)]):
        parts = [join(parts[first : first + ranks], placement) for first in range(0, len(parts), ranks)]
    (whole,) = parts
    return whole


def join(shards: Sequence[Any], placement: Placement) -> Any:
    """Join the local tensors of all ranks: the inverse of `divide`; None if they are None."""
    if shards[0] is None:
        return None
    if placement == WHOLE:
        return shards[0]
    return torch.cat(list(shards), placement) if placement >= 0 else torch.stack(list(shards)).sum(0)


def difference(ones: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> float:
    """Largest difference of tensors from others, relative to the largest entry of all the others.

    The scale is common to all tensors, since one tensor may be zero but for rounding errors. The difference is infinite
    if shapes, data types, integers or entries that are not finite differ.
    """
    pairs = [(one, other) for one, other in zip(ones, others, strict=True) if other is not None]
    numbers = [other[other.isfinite()].abs().double() for _, other in pairs if other.is_floating_point()]
    scale = max((float(entries.max()) for entries in numbers if entries.numel()), default=0.0)
    return max((_difference(one, other) / max(scale, _TINY) for one, other in pairs), default=0.0)


_TINY = 1e-300
_equal = torch.equal  # bound now, because an operator that is tried could replace it


def _difference(one: Tensor | None, other: Tensor) -> float:
    if one is None or one.shape != other.shape or one.dtype != other.dtype:
        return float("inf")
    if _equal(one, other) or not other.numel():
        return 0.0
    finite = other.isfinite()
    if not other.is_floating_point() or not _equal(one[~finite], other[~finite]) or not bool(finite.any()):
        return float("inf")
    return float((one[finite] - other[finite]).abs().max().nan_to_num(nan=float("inf")))
