"""What the ranks that share a layer exchange, forward and backward: activations and their gradients."""

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
    """The ranks that share layers.

    Args:
        trace: counts what they exchange in training.
    """

    def __init__(self, group: dist.ProcessGroup, trace: Trace) -> None:
        self.group, self.trace = group, trace
        self.size, self.index = group.size(), dist.get_rank(group)
        trace.facts |= {REDUCED_FACT: 0.0, WAITED_FACT: 0.0}

    def sum(self, tensor: Tensor, *, counted: bool = True) -> Tensor:
        """The sum over the ranks, in place."""
        began = time.perf_counter()
        with span("tensor", "wire", tensor.nbytes):
            dist.all_reduce(tensor, group=self.group)
        self._count(tensor.nbytes * counted, began)
        return tensor

    def gather(self, tensor: Tensor, sizes: Sequence[int], *, counted: bool = True) -> Tensor:
        """The parts of all ranks, of these sizes, one behind the other along the last dimension."""
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
    """The identity; backward, the sum over ranks: of what ranks read whole and use in part."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, ranks: SharingRanks) -> Tensor:
        ctx.ranks = ranks
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        (gradient,) = grad_outputs
        return ctx.ranks.sum(gradient.clone(memory_format=torch.contiguous_format)), None


class SumParts(torch.autograd.Function):
    """The sum over ranks; backward, the identity, for all ranks have the same gradient of it."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: SharingRanks) -> Tensor:
        return ranks.sum(part.clone(memory_format=torch.contiguous_format), counted=ctx.needs_input_grad[0])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return grad_outputs[0], None


class GatherParts(torch.autograd.Function):
    """The parts of all ranks along the last dimension; backward, this rank's part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: SharingRanks, sizes: Sequence[int]) -> Tensor:
        ctx.first, ctx.size = sum(sizes[: ranks.index]), sizes[ranks.index]
        return ranks.gather(part, sizes, counted=ctx.needs_input_grad[0])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        return grad_outputs[0].narrow(-1, ctx.first, ctx.size), None, None


class SharedInput:
    """What layers with the same input read: one all-reduce of its gradient for all of them."""

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
