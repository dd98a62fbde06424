"""Matrix products of sparse linear layers, with straight-through gradients to the dense weight.

The products are autograd functions made of torch's operations and custom operators, so that torch.compile traces them
without a graph break.
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

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2  # gradients need range more than precision


def pack(mask: Tensor) -> Tensor:
    """Pack a mask to bits: bool (rows, columns) -> uint8 (rows, ceil(columns / 8)). The first column is bit 0."""
    bits = F.pad(mask.to(torch.uint8), (0, -mask.shape[1] % 8)).unflatten(1, (-1, 8))
    return (bits << _places(mask)).sum(-1, dtype=torch.uint8)


def unpack(packed: Tensor, columns: int) -> Tensor:
    """Unpack a mask that `pack` packed; bool (rows, columns)."""
    return (packed[..., None] >> _places(packed) & 1).flatten(1)[:, :columns].bool()


def _places(like: Tensor) -> Tensor:
    """The positions of the bits of a byte, on the device of `like`."""
    return torch.arange(8, dtype=torch.uint8, device=like.device)


class Pruned(torch.autograd.Function):
    """Applies a packed mask to a weight (rows, columns); the gradient passes unchanged to all weights."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, packed: Tensor) -> Tensor:
        return weight.masked_fill(~unpack(packed, weight.shape[1]), 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyrefly: ignore[bad-override]
        return grad, None


def shrink(weight: Tensor) -> Tensor:
    """The soft threshold of S-STE. In every four entries of a row, magnitudes shrink by the third largest magnitude,
    down to zero. At most two of four entries stay nonzero, and the result is continuous in the weight."""
    # The third largest of four is min(the larger of the two pairs' minima, the smaller of the two pairs' maxima).
    a, b, c, d = weight.abs().unflatten(-1, (-1, 4)).movedim(-1, 0).contiguous()
    lower = torch.maximum(torch.minimum(a, b), torch.minimum(c, d))
    upper = torch.minimum(torch.maximum(a, b), torch.maximum(c, d))
    third = torch.minimum(lower, upper)[..., None]
    groups = weight.unflatten(-1, (-1, 4))
    return (groups - groups.clamp(-third, third)).flatten(-2)


class Shrinking(torch.autograd.Function):
    """Computes scale * shrink(weight) from a weight and a scale (0-d); the gradient passes unchanged to the weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, scale: Tensor) -> Tensor:
        return shrink(weight) * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyrefly: ignore[bad-override]
        return grad, None


def rounded(x: Tensor, to: torch.dtype) -> Tensor:
    """Round `x` to an 8-bit type and back, with one scale that maps the largest magnitude of `x` to the type's
    maximum."""
    scale = torch.finfo(to).max / x.abs().amax().float().clamp_min(2.0**-100)
    return ((x.float() * scale).to(to).float() / scale).to(x.dtype)


class Product(torch.autograd.Function):
    """Linear layer computed by dense products: x (…, columns), weight (rows, columns) -> (…, rows).

    With `fp8`, operands are rounded to 8 bits. With a key, the weight gradient is computed from a 2:4 estimate of
    `grad` (MVUE).
    """

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
    """Operand and memory layouts of a layer's products on the sparse units of a GPU."""

    operand: int
    """Number of the layer's `operands.SparseOperand`."""
    outputs_by_columns: bool = False
    """Whether the output is column-major, which a fused activation after the layer reads fastest."""
    inputs_by_columns: bool = False
    """Whether the gradient of the input is column-major, which a fused activation before the layer reads fastest."""


class UnitProduct(torch.autograd.Function):
    """`Product` on a GPU's sparse units. Only the dense form of the weight is saved for the backward pass, because the
    layer's `SparseOperand` holds the packed forms."""

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
    """The output of a sparse linear layer.

    Args:
        weight: the sparse weight; if `units` is given, the trained dense weight.
        key: key from `mvue.draw_key`, to estimate the weight gradient from a 2:4 draw; None computes the exact
            gradient.
        first: index of the first group of four tokens; not 0 if other ranks hold earlier tokens.
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
    """Whether type and shape allow a layer's products to run on sparse units; uses only information known at compile
    time."""
    dtype = autocast_dtype(x)
    same = dtype is not None or x.dtype == weight.dtype
    return same and x.dim() > 1 and usable(dtype or weight.dtype, weight.shape, weight.device)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The type in which autocast computes products of `x`; None if autocast is off."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
