"""Launches the Triton kernels of masks, draws and activations (`triton_kernels`, `gate_kernels`) on CUDA devices.

Callers check `usable` first; if it is False, they use torch's operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoestring._torch import is_fake
from shoestring.naming import installed

# Sizes of the block that one program (thread block) processes.
ROW_GROUPS = 1024  # row masks: groups of four entries
TILES = 64  # transposable masks: 4×4 tiles
GROUPS, COLUMNS = 16, 64  # draws: groups of four rows times columns
SQUARE, WARPS = 64, 8  # activations and pruning: side of a square tile, and warps per program
_TRITON = installed("triton")


def usable(tensor: Tensor) -> bool:
    """Whether the kernels can process this tensor; False inside torch.compile, which fuses torch's operations
    itself."""
    here = tensor.device.type == "cuda" and not torch.compiler.is_compiling() and _TRITON
    return here and not is_fake(tensor)


def usable_in_single(tensor: Tensor) -> bool:
    """Whether kernels that compute in fp32 can process this tensor; False for fp64."""
    return usable(tensor) and tensor.dtype != torch.float64


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
    # Scores of fp64 weights are summed in fp64, scores of other weights in fp32.
    bank = patterns.flatten(1).to(torch.float64 if weight.dtype == torch.float64 else torch.float32)
    programs = -(-codes.numel() // TILES)
    kernel[(programs,)](
        weight, bank, codes, codes.numel(), columns // 4, SQUARES=squares, PATTERNS=len(bank), BLOCK=TILES, BANK=128
    )
    return codes


def mvue(x: Tensor, key: Tensor, first: int, *, by_columns: bool = False) -> Tensor:
    """See `mvue.mvue`. `x` may have any strides; the result is column-major if `by_columns`, else row-major."""
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
    """Compute the masked weight in `dtype` and its transpose, in one pass over the weight.

    Args:
        weight: (rows, columns), row-major.
        mask: mask packed by `product.pack`.
        straight: whether to return the masked weight.
        transposed: whether to return the transpose of the masked weight.

    Returns:
        The masked weight (rows, columns) and its transpose (columns, rows), each None unless requested. Memory traffic
        from an fp32 weight to both results in bf16 is 8.1 bytes per entry: 4 bytes and one mask bit are read, and 2 + 2
        bytes are written.
    """
    from shoestring.sparse.triton_kernels import prune_kernel

    kernel: Any = prune_kernel
    rows, columns = weight.shape
    masked = weight.new_empty(rows, columns, dtype=dtype) if straight else None
    transpose = weight.new_empty(columns, rows, dtype=dtype) if transposed else None
    placeholder = transpose if masked is None else masked  # an argument must be a tensor, even if it is not written
    kernel[_squares(weight)](
        weight, mask, placeholder if masked is None else masked, placeholder if transpose is None else transpose,
        rows, columns, weight.stride(0), mask.stride(0),
        STRAIGHT=straight, TRANSPOSED=transposed, BLOCK=SQUARE, num_warps=WARPS,
    )  # fmt: skip
    return masked, transpose


def shrunk(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute `scale * product.shrink(weight)` in `dtype`; memory traffic from fp32 to bf16 is 6 bytes per entry."""
    from shoestring.sparse.triton_kernels import shrink_kernel

    kernel: Any = shrink_kernel
    weight = weight.detach().contiguous()
    result = torch.empty_like(weight, dtype=dtype)
    groups = weight.numel() // 4
    kernel[(-(-groups // ROW_GROUPS),)](weight, scale, result, groups, BLOCK=ROW_GROUPS)
    return result


def gated(gate: Tensor, up: Tensor | None, out: Tensor, activation: str) -> Tensor:
    """Compute a gated activation (see `gates`) into `out`, and return `out`. All tensors are (rows, columns), of any
    strides."""
    from shoestring.sparse.gate_kernels import gated_kernel

    kernel: Any = gated_kernel
    read = gate if up is None else up  # an argument must be a tensor, even if it is not read
    kernel[_squares(gate)](
        gate, read, out, *gate.shape, *gate.stride(), *read.stride(), *out.stride(),
        ACTIVATION=activation, GATED=up is not None, BLOCK=SQUARE, num_warps=WARPS,
    )  # fmt: skip
    return out


def gated_backward(
    grad: Tensor, gate: Tensor, up: Tensor | None, of_gate: Tensor, of_up: Tensor | None, activation: str
) -> None:
    """Compute the gradients of a gated activation (see `gates`) into `of_gate` and `of_up`. All tensors are (rows,
    columns), of any strides."""
    from shoestring.sparse.gate_kernels import gated_backward_kernel

    kernel: Any = gated_backward_kernel
    read, written = (gate, of_gate) if up is None or of_up is None else (up, of_up)
    kernel[_squares(gate)](
        grad, gate, read, of_gate, written, *gate.shape,
        *grad.stride(), *gate.stride(), *read.stride(), *of_gate.stride(), *written.stride(),
        ACTIVATION=activation, GATED=up is not None, BLOCK=SQUARE, num_warps=WARPS,
    )  # fmt: skip


def _squares(x: Tensor) -> tuple[int, int]:
    """The grid of programs that covers a matrix with square tiles."""
    return -(-x.shape[0] // SQUARE), -(-x.shape[1] // SQUARE)
