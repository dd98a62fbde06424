"""Masks and draws on devices that Triton compiles for; see `triton_kernels`. Elsewhere, torch's operations do them."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from shoestring._torch import is_fake

ROW_GROUPS = 1024  # groups of four that a program masks
TILES = 64  # 4×4 tiles that a program scores
GROUPS, COLUMNS = 16, 64  # groups of four rows, and columns of them, that a program draws
SQUARE, WARPS = 64, 8  # tokens and hidden entries that a program gates, and its warps


def usable(tensor: Tensor) -> bool:
    """Whether the kernels serve this tensor. Inside torch.compile they do not: it fuses torch's operations itself."""
    here = tensor.device.type == "cuda" and not torch.compiler.is_compiling() and _has_triton()
    return here and not is_fake(tensor)


def usable_in_single(tensor: Tensor) -> bool:
    """Whether the kernels that compute in fp32 serve this tensor."""
    return usable(tensor) and tensor.dtype != torch.float64


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def row_mask(scores: Tensor) -> Tensor:
    """See `masks.row_mask`."""
    from shoestring.sparse.triton_kernels import row_mask_kernel

    kernel: Any = row_mask_kernel
    scores = scores.detach().contiguous()
    mask = torch.empty(scores.shape, dtype=torch.bool, device=scores.device)
    groups = scores.numel() // 4
    kernel[(-(-groups // ROW_GROUPS),)](scores, mask.view(torch.uint8), groups, BLOCK=ROW_GROUPS)
    return mask


def tile_codes(weight: Tensor, patterns: Tensor, *, squares: bool) -> Tensor:
    """See `masks.tile_codes`."""
    from shoestring.sparse.triton_kernels import tile_codes_kernel

    kernel: Any = tile_codes_kernel
    weight = weight.detach().contiguous()
    rows, columns = weight.shape
    codes = torch.empty(rows // 4, columns // 4, dtype=torch.uint8, device=weight.device)
    bank = patterns.flatten(1).to(torch.float64 if weight.dtype == torch.float64 else torch.float32)
    programs = -(-codes.numel() // TILES)
    kernel[(programs,)](
        weight, bank, codes, codes.numel(), columns // 4, SQUARES=squares, PATTERNS=len(bank), BLOCK=TILES, BANK=128
    )
    return codes


def mvue(x: Tensor, key: Tensor, first: int, *, by_columns: bool = False) -> Tensor:
    """See `mvue.mvue`; of any strides, into rows that lie one after the other, or columns."""
    from shoestring.sparse.triton_kernels import mvue_kernel

    kernel: Any = mvue_kernel
    rows, columns = x.shape
    estimate = x.new_empty(columns, rows).t() if by_columns else x.new_empty(rows, columns)
    programs = -(-rows // (4 * GROUPS)), -(-columns // COLUMNS)
    kernel[programs](
        x, estimate, key, rows, columns, first, *x.stride(), *estimate.stride(), GROUPS=GROUPS, COLUMNS=COLUMNS
    )
    return estimate


def pruned(
    weight: Tensor, mask: Tensor, dtype: torch.dtype, *, straight: bool, transposed: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The weight in `dtype`, with zeros where its packed mask has them: as it lies, transposed, or both in one pass.

    Args:
        weight: (rows, columns), with columns side by side. mask: of `product.pack`.

    Returns:
        (rows, columns) and (columns, rows), each None where it is not asked for. Of a weight in fp32, both in bf16 move
        8.1 bytes an entry: 4 and a bit are read, 2 + 2 are written.
    """
    from shoestring.sparse.triton_kernels import prune_kernel

    kernel: Any = prune_kernel
    rows, columns = weight.shape
    one = weight.new_empty(rows, columns, dtype=dtype) if straight else None
    other = weight.new_empty(columns, rows, dtype=dtype) if transposed else None
    anything = other if one is None else one
    kernel[_squares(weight)](
        weight, mask, anything if one is None else one, anything if other is None else other,
        rows, columns, weight.stride(0), mask.stride(0),
        STRAIGHT=straight, TRANSPOSED=transposed, BLOCK=SQUARE, num_warps=WARPS,
    )  # fmt: skip
    return one, other


def shrunk(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`scale` times `product.shrink` of a weight, in `dtype`; 6 bytes move an entry of fp32 that becomes bf16."""
    from shoestring.sparse.triton_kernels import shrink_kernel

    kernel: Any = shrink_kernel
    weight = weight.detach().contiguous()
    left = torch.empty_like(weight, dtype=dtype)
    groups = weight.numel() // 4
    kernel[(-(-groups // ROW_GROUPS),)](weight, scale, left, groups, BLOCK=ROW_GROUPS)
    return left


def gated(gate: Tensor, up: Tensor | None, out: Tensor, activation: str) -> Tensor:
    """See `gates`; into `out`, which it returns. All are (rows, columns) of any strides."""
    from shoestring.sparse.gate_kernels import gated_kernel

    kernel: Any = gated_kernel
    read = gate if up is None else up
    kernel[_squares(gate)](
        gate, read, out, *gate.shape, *gate.stride(), *read.stride(), *out.stride(),
        ACTIVATION=activation, GATED=up is not None, BLOCK=SQUARE, num_warps=WARPS,
    )  # fmt: skip
    return out


def gated_backward(
    grad: Tensor, gate: Tensor, up: Tensor | None, of_gate: Tensor, of_up: Tensor | None, activation: str
) -> None:
    """See `gates`; into `of_gate` and `of_up`. All are (rows, columns) of any strides."""
    from shoestring.sparse.gate_kernels import gated_backward_kernel

    kernel: Any = gated_backward_kernel
    read, written = (gate, of_gate) if up is None or of_up is None else (up, of_up)
    kernel[_squares(gate)](
        grad, gate, read, of_gate, written, *gate.shape,
        *grad.stride(), *gate.stride(), *read.stride(), *of_gate.stride(), *written.stride(),
        ACTIVATION=activation, GATED=up is not None, BLOCK=SQUARE, num_warps=WARPS,
    )  # fmt: skip


def _squares(x: Tensor) -> tuple[int, int]:
    return -(-x.shape[0] // SQUARE), -(-x.shape[1] // SQUARE)
