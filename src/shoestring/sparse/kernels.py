"""Masks and draws on devices that Triton compiles for; see `triton_kernels`. Elsewhere, torch's operations do them."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

ROW_GROUPS = 1024  # groups of four that a program masks
TILES = 64  # 4×4 tiles that a program scores
COLUMNS = 128  # columns of a group that a program draws


def usable(tensor: Tensor) -> bool:
    """Whether the kernels serve this tensor. Inside torch.compile they do not: it fuses torch's operations itself."""
    return tensor.device.type == "cuda" and not torch.compiler.is_compiling() and _has_triton()


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


def mvue(x: Tensor, key: Tensor, first: int) -> Tensor:
    """See `mvue.mvue`."""
    from shoestring.sparse.triton_kernels import mvue_kernel

    kernel: Any = mvue_kernel
    x = x.contiguous()
    rows, columns = x.shape
    estimate = torch.empty_like(x)
    groups = -(-rows // 4)
    kernel[(groups, -(-columns // COLUMNS))](x, estimate, key, rows, columns, first, BLOCK=COLUMNS)
    return estimate
