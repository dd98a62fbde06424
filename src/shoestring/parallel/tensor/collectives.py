"""Collectives among ranks that share layers, for activations in forward and gradients in backward passes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from shoestring.core.trace import Trace, span
from shoestring.parallel.tensor.names import REDUCED_FACT, WAITED_FACT


class SharingRanks:
    """The group of ranks that share layers, with the collectives among them.

    Args:
        trace: trace that counts the exchanged bytes and the seconds spent on them in training.
    """

    def __init__(self, group: dist.ProcessGroup, trace: Trace) -> None:
        self.group, self.trace = group, trace
        self.size, self.index = group.size(), dist.get_rank(group)
        trace.facts |= {REDUCED_FACT: 0.0, WAITED_FACT: 0.0}

    def sum(self, tensor: Tensor, *, counted: bool = True) -> Tensor:
        """Sum a tensor over the ranks, in place."""
        began = time.perf_counter()
        with span("tensor", "wire", tensor.nbytes):
            dist.all_reduce(tensor, group=self.group)
        self._count(tensor.nbytes * counted, began)
        return tensor

    def gather(self, tensor: Tensor, sizes: Sequence[int], *, counted: bool = True) -> Tensor:
        """Concatenate the parts of all ranks along the last dimension; `sizes` are the sizes of the parts there."""
        began, widest = time.perf_counter(), max(sizes)
        padded = torch.nn.functional.pad(tensor, (0, widest - tensor.shape[-1])).contiguous()
        parts = [torch.empty_like(padded) for _ in sizes]
        with span("tensor", "wire", padded.nbytes * len(sizes)):
            dist.all_gather(parts, padded, group=self.group)
        self._count(padded.nbytes * len(sizes) * counted, began)
        return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], -1)

    def _count(self, nbytes: int, began: float) -> None:
        if nbytes:
            self.trace.facts[REDUCED_FACT] += nbytes
            self.trace.facts[WAITED_FACT] += time.perf_counter() - began


class SumGradients(torch.autograd.Function):
    """Identity whose backward pass sums over ranks: for a tensor that all ranks have, but that each uses in part."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, ranks: SharingRanks) -> Tensor:
        ctx.ranks = ranks
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        (gradient,) = grad_outputs
        return ctx.ranks.sum(gradient.clone(memory_format=torch.contiguous_format)), None


class SumParts(torch.autograd.Function):
    """Sum over ranks whose backward pass is the identity, because all ranks have the same gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: SharingRanks) -> Tensor:
        return ranks.sum(part.clone(memory_format=torch.contiguous_format), counted=ctx.needs_input_grad[0])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return grad_outputs[0], None


class GatherParts(torch.autograd.Function):
    """All-gather along the last dimension; its backward pass returns this rank's part of the gradient."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: SharingRanks, sizes: Sequence[int]) -> Tensor:
        ctx.first, ctx.size = sum(sizes[: ranks.index]), sizes[ranks.index]
        return ranks.gather(part, sizes, counted=ctx.needs_input_grad[0])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        return grad_outputs[0].narrow(-1, ctx.first, ctx.size), None, None


class SharedInput:
    """`SumGradients` for layers that read the same input, so that its gradient is all-reduced once for all of them."""

    def __init__(self, ranks: SharingRanks) -> None:
        self.ranks = ranks
        self._last: tuple[Any, Any] | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        if self._last is not None:
            known, read = (pointer() for pointer in self._last)
            if known is hidden and read is not None and read.requires_grad == hidden.requires_grad:
                return read
        read = SumGradients.apply(hidden, self.ranks)
        assert isinstance(read, Tensor)
        self._last = ref(hidden), ref(read)
        return read
