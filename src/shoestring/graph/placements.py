"""Placements of tensors on ranks, and rules: ways to compute an operator on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Placement = int
"""How a tensor lies on the ranks: the number of the dimension along which it is sharded, or WHOLE, or SUM."""
WHOLE: Placement = -1
"""Every rank has the whole tensor."""
SUM: Placement = -2
"""The tensor is the sum of what the ranks have."""


def named(placement: Placement) -> str:
    """A placement as torch writes it: R, P, or S(0) for shards along dimension 0."""
    return {WHOLE: "R", SUM: "P"}.get(placement, f"S({placement})")


@dataclass(frozen=True)
class InnerExchange:
    """What ranks exchange within an operator, where each cannot compute its part by itself.

    `compute(op, args, kwargs, ranks)` is a generator that computes one rank's outputs: it yields tensors, is sent their
    sums over the ranks, and returns the outputs.
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
        """Whether each rank computes only a part."""
        return any(placement >= 0 for placement in (*self.outputs, *self.inputs))

    def __str__(self) -> str:
        arrow = " -> " if self.exchange is None else " -exchange-> "
        return ", ".join(map(named, self.inputs)) + arrow + ", ".join(map(named, self.outputs))


@dataclass(frozen=True)
class RuleSet:
    """The rules of an operator; the first is that every rank computes it whole."""

    rules: tuple[ShardingRule, ...]
    reason: str = ""
    """Why the operator can only be computed whole; empty if it can be divided."""


OwnRules = Callable[..., Iterable[ShardingRule]]
"""(args, kwargs) of an operator, with tensors without data -> rules."""


def can_be(placement: Placement, tensor: Tensor, ranks: int) -> bool:
    """Whether a tensor can lie on so many ranks in this way: shards have equal sizes, and sums are of real numbers."""
    if placement == SUM:
        return tensor.is_floating_point()
    if placement == WHOLE:
        return True
    return placement < tensor.ndim and tensor.shape[placement] > 0 and tensor.shape[placement] % ranks == 0
