"""The products of a sparse linear layer, and the gradients that pass straight through to its dense weight.

Everything is an autograd function of torch's operations, which torch.compile traces without a break.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring.sparse.mvue import mvue
from shoestring.sparse.semi_structured import times, times_transposed, usable

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
    """inputs (…, columns), weight (rows, columns) -> (…, rows): in 8 bits, with a weight gradient of draws, and on the
    sparse units of a GPU where an operand is 2:4."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, key: Tensor | None, first: int, fp8: bool, sparse_along: int
    ) -> Tensor:
        if fp8:
            x, weight = rounded(x, FORWARD), rounded(weight, FORWARD)
        ctx.save_for_backward(x, weight, *(() if key is None else (key,)))
        ctx.first, ctx.fp8, ctx.draws, ctx.sparse_along = first, fp8, key is not None, sparse_along
        return times_transposed(x, weight) if sparse_along else F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:  # pyrefly: ignore[bad-override]
        x, weight, *key = ctx.saved_tensors
        of_weight = grad.flatten(0, -2)
        if ctx.draws:
            of_weight = mvue(of_weight, key[0], first=ctx.first)
        if ctx.fp8:
            grad, of_weight = rounded(grad, BACKWARD), rounded(of_weight, BACKWARD)
        of_input = times_transposed(grad, weight.t()) if ctx.sparse_along == 2 else grad @ weight
        times_inputs = times if ctx.draws else torch.mm
        return of_input, times_inputs(of_weight.t(), x.flatten(0, -2)), None, None, None, None


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    key: Tensor | None = None,
    *,
    first: int = 0,
    fp8: bool = False,
    sparse_along: int = 0,
) -> Tensor:
    """The output of a linear layer of `weight`.

    Args:
        key: of `mvue.draw_key`; None computes the gradient of the weight from the whole gradient of the output.
        first: the number of the first group of four tokens, where other ranks have those before.
        sparse_along: in how many directions the weight is 2:4: 0, 1 (in its rows) or 2 (in its columns as well).
    """
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if key is None and not fp8 and not (sparse_along and usable(x, weight)):
        return F.linear(x, weight, bias)
    y = Product.apply(x, weight, key, first, fp8, sparse_along)
    return y if bias is None else y + bias
