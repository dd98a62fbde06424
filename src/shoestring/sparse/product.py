"""The products of a sparse linear layer, and the gradients that pass straight through to its dense weight.

Everything is an autograd function of torch's operations, which torch.compile traces without a break.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring.sparse.mvue import mvue, mvue_by_columns
from shoestring.sparse.operands import times_weight
from shoestring.sparse.semi_structured import times, usable

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2


def pack(mask: Tensor) -> Tensor:
    """A mask as bits: bool (rows, columns) -> uint8 (rows, columns / 8, rounded up), the first column lowest."""
    bits = F.pad(mask.to(torch.uint8), (0, -mask.shape[1] % 8)).unflatten(1, (-1, 8))
    return (bits << _places(mask)).sum(-1, dtype=torch.uint8)


def unpack(packed: Tensor, columns: int) -> Tensor:
    """The mask of `pack`; bool (rows, columns)."""
    return (packed[..., None] >> _places(packed) & 1).flatten(1)[:, :columns].bool()


def _places(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)


class Pruned(torch.autograd.Function):
    """weight (rows, columns), packed mask -> weight with zeros; the gradient goes to all of it."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, packed: Tensor) -> Tensor:
        return weight.masked_fill(~unpack(packed, weight.shape[1]), 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyrefly: ignore[bad-override]
        return grad, None


def shrink(weight: Tensor) -> Tensor:
    """The soft threshold of S-STE: of every four entries of a row, each moves towards zero by the third largest
    magnitude, and stops there. It is continuous in the weight, and at most two of four are left."""
    a, b, c, d = weight.abs().unflatten(-1, (-1, 4)).movedim(-1, 0).contiguous()
    lower = torch.maximum(torch.minimum(a, b), torch.minimum(c, d))
    upper = torch.minimum(torch.maximum(a, b), torch.maximum(c, d))
    third = torch.minimum(lower, upper)[..., None]
    groups = weight.unflatten(-1, (-1, 4))
    return (groups - groups.clamp(-third, third)).flatten(-2)


class Shrinking(torch.autograd.Function):
    """weight, scale (0-d) -> scale x shrink(weight); the gradient goes to the weight as it is."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, scale: Tensor) -> Tensor:
        return shrink(weight) * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyrefly: ignore[bad-override]
        return grad, None


def rounded(x: Tensor, to: torch.dtype) -> Tensor:
    """`x` rounded to a type of 8 bits, with one scale that puts its largest magnitude at the type's."""
    scale = torch.finfo(to).max / x.abs().amax().float().clamp_min(2.0**-100)
    return ((x.float() * scale).to(to).float() / scale).to(x.dtype)


class Product(torch.autograd.Function):
    """inputs (…, columns), weight (rows, columns) -> (…, rows): in 8 bits, or with a weight gradient of draws."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, key: Tensor | None, first: int, fp8: bool) -> Tensor:
        if fp8:
            x, weight = rounded(x, FORWARD), rounded(weight, FORWARD)
        ctx.save_for_backward(x, weight, *(() if key is None else (key,)))
        ctx.first, ctx.fp8, ctx.draws = first, fp8, key is not None
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:  # pyrefly: ignore[bad-override]
        x, weight, *key = ctx.saved_tensors
        of_weight = grad.flatten(0, -2)
        if ctx.draws:
            of_weight = mvue(of_weight, key[0], first=ctx.first)
        if ctx.fp8:
            grad, of_weight = rounded(grad, BACKWARD), rounded(of_weight, BACKWARD)
        return grad @ weight, of_weight.t() @ x.flatten(0, -2), None, None, None


@dataclass(frozen=True)
class SparseUnits:
    """How a layer's products run on the sparse units of a GPU."""

    operand: int
    """The number of its `operands.SparseOperand`."""
    outputs_by_columns: bool = False
    """The layout of its output, for an activation that is fused."""
    inputs_by_columns: bool = False
    """The layout of its input's gradient."""


class UnitProduct(torch.autograd.Function):
    """As `Product`, on sparse units, of the dense weight, which is all that is saved of it for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, key: Tensor | None, first: int, fp8: bool, operand: int,
        outputs_by_columns: bool, inputs_by_columns: bool,
    ) -> Tensor:  # fmt: skip
        flat = x.flatten(0, -2)
        flat = rounded(flat, FORWARD) if fp8 else flat
        ctx.save_for_backward(flat, weight, *(() if key is None else (key,)))
        ctx.first, ctx.fp8, ctx.operand, ctx.by_columns = first, fp8, operand, inputs_by_columns
        ctx.shape = x.shape[:-1]
        return times_weight(flat, weight, operand, False, outputs_by_columns).unflatten(0, ctx.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        x, weight, *key = ctx.saved_tensors
        grad = grad.flatten(0, -2)
        transposed = mvue_by_columns(grad, key[0], ctx.first) if key else grad.t()
        if ctx.fp8:
            grad, transposed = rounded(grad, BACKWARD), rounded(transposed, BACKWARD)
        of_weight = (times if key else torch.mm)(transposed, x).to(weight.dtype)
        if not ctx.needs_input_grad[0]:
            return None, of_weight, *[None] * 6
        of_input = times_weight(grad, weight, ctx.operand, True, ctx.by_columns)
        return of_input.unflatten(0, ctx.shape), of_weight, *[None] * 6


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    key: Tensor | None = None,
    *,
    first: int = 0,
    fp8: bool = False,
    units: SparseUnits | None = None,
) -> Tensor:
    """The output of a linear layer of `weight`: of the sparse one, or with `units` of the dense one that is trained.

    Args:
        key: of `mvue.draw_key`; None computes the gradient of the weight from the whole gradient of the output.
        first: the number of the first group of four tokens, where other ranks have those before.
    """
    if dtype := autocast_dtype(x):
        x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
        weight = weight if units else weight.to(dtype)
    if units is not None:
        layouts = units.outputs_by_columns, units.inputs_by_columns
        y = UnitProduct.apply(x, weight, key, first, fp8, units.operand, *layouts)
    elif key is not None or fp8:
        y = Product.apply(x, weight, key, first, fp8)
    else:
        return F.linear(x, weight, bias)
    return y if bias is None else y + bias


def on_units(x: Tensor, weight: Tensor) -> bool:
    """Whether a layer's products are of a type and of sizes for sparse units; by what a compiled graph knows."""
    dtype = autocast_dtype(x)
    same = dtype is not None or x.dtype == weight.dtype
    return same and x.dim() > 1 and usable(dtype or weight.dtype, weight.shape, weight.device)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast has products of `x` computed in; None where it is off."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
