"""Collectives among ranks that share layers, for activations in forward and gradients in backward passes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
import torch.nn.functional as F
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

    def begin_sum(self, tensor: Tensor, *, counted: bool = True) -> Callable[[], None]:
        """Begin to sum a contiguous tensor over the ranks, in place; returns a function that waits for the sum."""
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        assert work is not None

        def wait() -> None:
            began = time.perf_counter()
            with span("tensor", "wire", tensor.nbytes):
                work.wait()
            self._count(tensor.nbytes * counted, began)

        return wait

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
    """Identity whose backward pass sums over ranks: for the input of layers of which each rank has a part."""

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


class SumTiles(torch.autograd.Function):
    """A linear layer whose outputs are summed over ranks in tiles: one tile travels while the next one is computed.

    A tile holds some of the positions, so the tiles are independent of each other.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, ranks: SharingRanks, tiles: int) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        outputs, waits = list[Tensor](), list[Callable[[], None]]()
        whole = hidden.reshape(-1, hidden.shape[-1])
        for rows in whole.tensor_split(max(min(tiles, len(whole)), 1)):
            outputs.append(F.linear(rows, weight))
            waits.append(ranks.begin_sum(outputs[-1], counted=ctx.needs_input_grad[0]))
        for wait in waits:
            wait()
        return torch.cat(outputs).view(*hidden.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden, weight = ctx.saved_tensors
        return (
            _input_gradient(grad_outputs[0], hidden, weight),
            _weight_gradient(grad_outputs[0], hidden, weight),
            None,
            None,
        )


class OverlappedColumns(torch.autograd.Function):
    """A linear layer that is the only reader of its input.

    The gradient of the input is summed over ranks while the gradient of the weight is computed.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, ranks: SharingRanks) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.ranks = ranks
        return F.linear(hidden, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None, None]:
        (gradient,), (hidden, weight) = grad_outputs, ctx.saved_tensors
        of_input, wait = None, None
        if ctx.needs_input_grad[0]:
            of_input = _input_gradient(gradient, hidden, weight)
            wait = ctx.ranks.begin_sum(of_input)
        of_weight = _weight_gradient(gradient, hidden, weight)
        of_bias = gradient.flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[2] else None
        if wait is not None:
            wait()
        return of_input, of_weight, of_bias, None


def _input_gradient(gradient: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
    """The gradient of a linear layer's input, contiguous."""
    return (gradient @ weight.to(gradient.dtype)).to(hidden.dtype).contiguous()


def _weight_gradient(gradient: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
    """The gradient of a linear layer's weight."""
    rows, columns = gradient.reshape(-1, gradient.shape[-1]), hidden.reshape(-1, hidden.shape[-1])
    return (rows.t() @ columns.to(gradient.dtype)).to(weight.dtype)


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
