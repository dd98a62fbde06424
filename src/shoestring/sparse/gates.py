"""Gated activations of feed-forward layers, fused with the multiplication by the gate, in any memory layout.

cuSPARSELt computes W·xᵀ, so the cheapest layout of a sparse layer's output (tokens, hidden) is column-major, with
`stride(0) == 1`. An operation that reads a column-major output row by row reads a cache line for each entry. Here one
kernel reads gate and input in their layout, and writes the result in the same layout, which the next product and the
random draws also read.

Memory traffic per 16-bit hidden entry is 6 bytes in the forward pass (2 entries read, 1 written) and 10 bytes in the
backward pass (3 read, 2 written). Without fusion, silu and product move 10 bytes forward and 22 backward, and each copy
to the other layout moves 4 bytes more.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring.sparse import kernels

Activation = Literal["relu", "relu2", "silu", "gelu", "gelu_tanh"]
"""`relu2` is the square of `relu`; `gelu_tanh` is the approximation of `gelu` by tanh."""
Form = Literal["alone", "apart", "gate_first", "gate_last"]
"""Inputs of an activation: one tensor without a gate (`alone`); gate and input in two tensors (`apart`); or the halves
of one tensor, with the gate first or last."""
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
FORMS: tuple[Form, ...] = get_args(Form)
TANH_INNER, TANH_CUBE = 0.7978845608028654, 0.044715  # sqrt(2 / pi), and Hendrycks and Gimpel's constant (2016)
INVERSE_ROOT_2, INVERSE_ROOT_2_PI = 0.7071067811865476, 0.3989422804014327  # 1 / sqrt(2), 1 / sqrt(2 pi)


def gated(x: Tensor, other: Tensor | None, activation: Activation, form: Form) -> Tensor:
    """Multiply the input by the activation of the gate; with the form `alone`, return the activation of `x`.

    Args:
        x: (…, hidden), or (…, 2 hidden) with the forms `gate_first` and `gate_last`. With the form `apart`, `x` is the
            gate.
        other: the input with the form `apart`, else None.

    Returns:
        (…, hidden), in the type of `x`; computed in fp32 or wider, and rounded once.
    """
    flat = None if other is None else other.flatten(0, -2)
    return _gated(x.flatten(0, -2), flat, activation, form).unflatten(0, x.shape[:-1])


@torch.library.custom_op("shoestring::gated", mutates_args=())
def _gated(x: Tensor, other: Tensor | None, activation: str, form: str) -> Tensor:
    gate, up = parts(x, other, form)
    out = empty_like(x, gate.shape[1])
    if kernels.usable_in_single(x):
        return kernels.gated(gate, up, out, activation)
    value, _ = _with_slope(_wide(gate), activation)
    return out.copy_(value if up is None else value * _wide(up))


@_gated.register_fake
def _(x: Tensor, other: Tensor | None, activation: str, form: str) -> Tensor:
    return empty_like(x, x.shape[1] // 2 if form.startswith("gate") else x.shape[1])


@torch.library.custom_op("shoestring::gated_backward", mutates_args=())
def _gated_backward(grad: Tensor, x: Tensor, other: Tensor | None, activation: str, form: str) -> tuple[Tensor, Tensor]:
    """The gradients of `x` and of `other`; the gradient of `other` is an empty tensor if `other` is None."""
    gate, up = parts(x, other, form)
    of_x, of_other = empty_like(x, x.shape[1]), empty_like(x, x.shape[1] if form == "apart" else 0)
    of_gate, of_up = parts(of_x, of_other if form == "apart" else None, form)
    if kernels.usable_in_single(x):
        kernels.gated_backward(grad, gate, up, of_gate, of_up, activation)
        return of_x, of_other
    value, slope = _with_slope(_wide(gate), activation)
    wide = _wide(grad)
    of_gate.copy_(wide * slope if up is None else wide * _wide(up) * slope)
    if of_up is not None:
        of_up.copy_(wide * value)
    return of_x, of_other


@_gated_backward.register_fake
def _(grad: Tensor, x: Tensor, other: Tensor | None, activation: str, form: str) -> tuple[Tensor, Tensor]:
    return empty_like(x, x.shape[1]), empty_like(x, x.shape[1] if form == "apart" else 0)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, other, ctx.activation, ctx.form = inputs
    ctx.save_for_backward(x, other)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
    x, other = ctx.saved_tensors
    of_x, of_other = _gated_backward(grad, x, other, ctx.activation, ctx.form)
    return of_x, None if other is None else of_other, None, None


_gated.register_autograd(_differentiate, setup_context=_save)


def by_columns(x: Tensor) -> bool:
    """Whether a matrix is column-major: neighbouring entries of a column are adjacent in memory, and neighbouring
    entries of a row are not."""
    return x.stride(0) == 1 and x.stride(1) != 1


def empty_like(like: Tensor, columns: int) -> Tensor:
    """An uninitialised matrix with the rows, type and layout of `like`."""
    return like.new_empty(columns, like.shape[0]).t() if by_columns(like) else like.new_empty(like.shape[0], columns)


def parts(x: Tensor, other: Tensor | None, form: str) -> tuple[Tensor, Tensor | None]:
    """Split the arguments into (gate, input) according to the form; the input is None with the form `alone`."""
    if not form.startswith("gate"):
        return x, other
    first, last = x.chunk(2, dim=1)
    return (first, last) if form == "gate_first" else (last, first)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _with_slope(x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """The value and the derivative of the activation at x; the same as `gate_kernels.with_slope`."""
    if activation == "relu":
        return x.relu(), (x > 0).to(x)
    if activation == "relu2":
        return x.relu().square(), 2 * x.relu()
    if activation == "silu":
        share = x.sigmoid()
        return x * share, share * (1 + x * (1 - share))
    if activation == "gelu":
        share = (1 + (x * INVERSE_ROOT_2).erf()) / 2
        return x * share, share + x * INVERSE_ROOT_2_PI * (-x.square() / 2).exp()
    share = (2 * TANH_INNER * (x + TANH_CUBE * x**3)).sigmoid()  # (1 + tanh(z)) / 2 is sigmoid(2 z)
    inner = 2 * TANH_INNER * (1 + 3 * TANH_CUBE * x.square())
    return x * share, share * (1 + x * inner * (1 - share))


def reference(x: Tensor, activation: Activation) -> Tensor:
    """The activation of `x`, computed by torch's own functions."""
    if activation == "relu2":
        return F.relu(x).square()
    return F.gelu(x, approximate="tanh") if activation == "gelu_tanh" else getattr(F, activation)(x)
