"""Triton kernels of `gates`, for tensors of any strides. Import this module only if Triton is installed.

Each program processes a square tile of tokens by columns, so that memory accesses are coalesced in row-major and in
column-major layout: Triton orders the threads along the dimension with stride 1, and moves values between threads if
two tensors have different layouts.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def with_slope(x: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """The value and the derivative of the activation at x; fp32."""
    if ACTIVATION == "relu":
        value = tl.maximum(x, 0.0)
        slope = tl.where(x > 0, 1.0, 0.0)
    elif ACTIVATION == "relu2":
        value = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
        slope = 2.0 * tl.maximum(x, 0.0)
    elif ACTIVATION == "silu":
        share = tl.sigmoid(x)
        value = x * share
        slope = share * (1.0 + x * (1.0 - share))
    elif ACTIVATION == "gelu":
        share = (1.0 + tl.erf(x * 0.7071067811865476)) / 2.0
        value = x * share
        slope = share + x * 0.3989422804014327 * tl.exp(-x * x / 2.0)
    else:  # gelu_tanh
        share = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        value = x * share
        slope = share * (1.0 + x * 1.5957691216057308 * (1.0 + 0.134145 * x * x) * (1.0 - share))
    return value, slope


@triton.jit
def gated_kernel(
    gate: tl.tensor,  # `gate`, `up` and `out` are (rows, columns)
    up: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    gate_row: tl.tensor,  # strides
    gate_column: tl.tensor,
    up_row: tl.tensor,
    up_column: tl.tensor,
    out_row: tl.tensor,
    out_column: tl.tensor,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Compute one tile of the activation of `gate`, multiplied by `up` if GATED."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    x = tl.load(gate + row * gate_row + column * gate_column, mask=inside, other=0.0).to(tl.float32)
    value, _ = with_slope(x, ACTIVATION)
    if GATED:
        value *= tl.load(up + row * up_row + column * up_column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_row + column * out_column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gated_backward_kernel(
    grad: tl.tensor,  # the first five tensors are (rows, columns)
    gate: tl.tensor,
    up: tl.tensor,
    of_gate: tl.tensor,
    of_up: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    grad_row: tl.tensor,  # strides
    grad_column: tl.tensor,
    gate_row: tl.tensor,
    gate_column: tl.tensor,
    up_row: tl.tensor,
    up_column: tl.tensor,
    of_gate_row: tl.tensor,
    of_gate_column: tl.tensor,
    of_up_row: tl.tensor,
    of_up_column: tl.tensor,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Compute one tile of the gradient of `gate` and, if GATED, of the gradient of `up`."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    x = tl.load(gate + row * gate_row + column * gate_column, mask=inside, other=0.0).to(tl.float32)
    flow = tl.load(grad + row * grad_row + column * grad_column, mask=inside, other=0.0).to(tl.float32)
    value, slope = with_slope(x, ACTIVATION)
    if GATED:
        there = of_up + row * of_up_row + column * of_up_column
        tl.store(there, (flow * value).to(of_up.dtype.element_ty), mask=inside)
        flow *= tl.load(up + row * up_row + column * up_column, mask=inside, other=0.0).to(tl.float32)
    there = of_gate + row * of_gate_row + column * of_gate_column
    tl.store(there, (flow * slope).to(of_gate.dtype.element_ty), mask=inside)
