"""A Triton kernel that dequantises 8-bit and 4-bit weights in one pass; see `rounding`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUPS = 16  # number of groups of a row that one program writes


@triton.jit
def dequantize_kernel(
    weight: tl.tensor,  # (blocks of 16 rows, groups, chunks, 16 rows, 4 bytes)
    scales: tl.tensor,  # (blocks of 16 rows, groups, 16 rows)
    dense: tl.tensor,  # (rows, columns)
    rows: tl.tensor,
    groups: tl.tensor,
    BITS: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """Dequantise a tile of 16 rows and 32 GROUPS columns."""
    sixteen = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, 16)[:, None]
    column = tl.program_id(1) * GROUPS * 32 + tl.arange(0, GROUPS * 32)[None, :]
    group, k = column // 32, column % 32
    there = (sixteen * 16 + lane < rows) & (group < groups)
    chunk = k // 4 if BITS == 8 else k % 16 // 4
    byte = ((sixteen * groups + group) * BITS + chunk) * 64 + lane * 4 + k % 4
    number = tl.load(weight + byte, mask=there, other=0).to(tl.int32)
    if BITS == 4:
        number = (number >> tl.where(k < 16, 0, 4)) & 15
    zero: tl.constexpr = 128 if BITS == 8 else 8
    scale = tl.load(scales + (sixteen * groups + group) * 16 + lane, mask=there, other=0).to(tl.float32)
    value = (number - zero).to(tl.float32) * scale
    where = (sixteen * 16 + lane) * (groups * 32) + column
    tl.store(dense + where, value.to(dense.dtype.element_ty), mask=there)


def dequantized(weight: Tensor, scales: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """The dequantised weight (rows, K); see `rounding.dequantize`."""
    kernel: Any = dequantize_kernel
    sixteens, groups, size = weight.shape
    dense = torch.empty(rows, groups * 32, dtype=dtype, device=weight.device)
    kernel[sixteens, triton.cdiv(groups, GROUPS)](
        weight.contiguous(), scales.contiguous().view(torch.float16), dense, rows, groups,
        BITS=size // 64, GROUPS=GROUPS,
    )  # fmt: skip
    return dense
