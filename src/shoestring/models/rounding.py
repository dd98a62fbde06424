"""Rounds weights to 8 or 4 bits, with a scale for every 32 inputs of a row, and packs them for the native product.

The formats are llama.cpp's Q8_0 and Q4_0, so llama.cpp's files need no further rounding: w = scale · q, with q from
-127 to 127 or from -8 to 7 and the scale in fp16. This takes 8.5 or 4.5 bits a weight. Zeros stay zero. In memory the
codes q of sixteen rows are interleaved, in the order in which the native product reads them; see
`native/skinny_quantized.c`.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from shoestring import native
from shoestring.core.errors import ConfigError
from shoestring.naming import installed

Bits = Literal[8, 4]

GROUP = 32
"""Number of inputs that share a scale."""
LANES = 16
"""Number of rows that are interleaved in memory."""
ZERO = {8: 128, 4: 8}
"""The zero point (the code that stands for 0), by bits."""
_CANDIDATES = torch.linspace(6.0, 9.0, 13)
"""Candidate codes for the largest weight of a group at 4 bits; tried with both signs, because the range from -8 to 7 is
not symmetric."""
_WEIGHTS_AT_ONCE = 1 << 22  # number of weights rounded at once, which limits temporary memory


@torch.no_grad()
def quantize(weight: Tensor, bits: Bits) -> tuple[Tensor, Tensor]:
    """Round a weight to 8 or 4 bits.

    For 8 bits, the largest weight of a group sets its scale. With the 16 levels of 4 bits, this scale would be poor, so
    26 similar scales are tried, each also refined by least squares, and the scale with the least squared error is used.

    Args:
        weight: (N, K), finite, K a multiple of 32.

    Returns:
        Codes (N, K / 32, 32) as unsigned bytes, with a zero point of 128 (8 bits) or 8 (4 bits), and scales (N, K / 32)
        in fp16.

    Raises:
        ConfigError: the shape cannot be quantised, or an entry is not finite or needs a scale too large for fp16.
    """
    if reason := unfit(weight):
        raise ConfigError(f"a weight of shape {tuple(weight.shape)} cannot be quantised: {reason}")
    if not weight.isfinite().all():
        raise ConfigError("the weight has entries that are not finite")
    groups = weight.detach().reshape(-1, GROUP)
    parts = [_rounded(part.float(), bits) for part in groups.split(max(1, _WEIGHTS_AT_ONCE // GROUP))]
    numbers, scales = (torch.cat(column) for column in zip(*parts, strict=True))
    if not scales.isfinite().all():
        raise ConfigError(f"weights of up to {float(weight.abs().max()):.3g} need scales beyond those of fp16")
    return numbers.view(len(weight), -1, GROUP), scales.view(len(weight), -1)


def _rounded(groups: Tensor, bits: Bits) -> tuple[Tensor, Tensor]:
    """Quantise groups (n, 32) in fp32 to codes and scales."""
    largest = groups.abs().amax(1)
    if bits == 8:
        scales = (largest / 127).half()
        return _numbers(groups, scales, 8), scales
    best, least = torch.zeros_like(largest), torch.full_like(largest, torch.inf)
    for levels in (*_CANDIDATES.tolist(), *(-_CANDIDATES).tolist()):
        scales = (largest / levels).half().float()
        q = (groups * _inverse(scales)[:, None]).round_().clamp_(-8, 7)
        refined = ((groups * q).sum(1) / q.square().sum(1).clamp_min(1)).half().float()
        for candidate in (scales, refined):
            q = (groups * _inverse(candidate)[:, None]).round_().clamp_(-8, 7)
            error = (q * candidate[:, None] - groups).square_().sum(1)
            better = error < least
            best, least = torch.where(better, candidate, best), torch.where(better, error, least)
    scales = best.half()
    return _numbers(groups, scales, 4), scales


def _numbers(groups: Tensor, scales: Tensor, bits: Bits) -> Tensor:
    """The codes of groups for the given scales, as unsigned bytes."""
    least = -127 if bits == 8 else -8
    q = (groups * _inverse(scales.float())[:, None]).round_().clamp_(least, 127 if bits == 8 else 7)
    return (q + ZERO[bits]).byte()


def _inverse(scales: Tensor) -> Tensor:
    """1 / scale; 0 for the scale 0 of a group of zeros."""
    return torch.where(scales == 0, 0.0, 1 / scales)


def unfit(weight: Tensor) -> str | None:
    """The reason why a weight cannot be quantised; None if it can."""
    if weight.dim() != 2 or not weight.is_floating_point():
        return "it is not a matrix of floating-point numbers"
    if weight.shape[1] % GROUP or not weight.numel():
        return f"its number of inputs is not a multiple of {GROUP}"
    return None


def pack(numbers: Tensor, scales: Tensor, bits: Bits) -> tuple[Tensor, Tensor]:
    """Pack codes and scales in the layout of the native product.

    Args:
        numbers, scales: codes and scales as `quantize` returns them, with N rows and G groups a row.

    Returns:
        Codes as bytes (N / 16, G, 512 or 256), with N rounded up to a multiple of 16, and scales (N / 16, G, 16). The
        scales are stored as the bits of fp16 numbers in int16, so that casts of the model do not change them.
    """
    rows = -(-len(numbers) // LANES) * LANES
    padded = numbers.new_full((rows, *numbers.shape[1:]), ZERO[bits])
    padded[: len(numbers)] = numbers
    of_rows = scales.new_zeros(rows, scales.shape[1])
    of_rows[: len(scales)] = scales
    if bits == 4:
        padded = padded[..., :16] | padded[..., 16:] << 4
    chunks = padded.view(rows // LANES, LANES, padded.shape[1], -1, 4).permute(0, 2, 3, 1, 4)
    of_rows = of_rows.half().view(rows // LANES, LANES, -1).transpose(1, 2)
    return chunks.flatten(2).contiguous(), of_rows.contiguous().view(torch.int16)


def unpack(weight: Tensor, scales: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Codes (rows, G, 32) and scales (rows, G) from the results of `pack`."""
    sixteens, groups, size = weight.shape
    numbers = weight.view(sixteens, groups, -1, LANES, 4).permute(0, 3, 1, 2, 4).reshape(sixteens * LANES, groups, -1)
    if size == 16 * LANES:
        numbers = torch.cat((numbers & 15, numbers >> 4), -1)
    of_rows = scales.view(torch.float16).transpose(1, 2).reshape(sixteens * LANES, groups)
    return numbers[:rows], of_rows[:rows]


@torch.library.custom_op("shoestring::dequantize", mutates_args=())
def dequantize(weight: Tensor, scales: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """The dequantised weight (rows, K) from packed codes and scales.

    On a GPU, and on a CPU in fp32 and bf16, a kernel writes the weight in one pass over memory; torch's operations take
    six passes.
    """
    if weight.device.type == "cuda" and installed("triton"):
        from shoestring.models.rounding_kernel import dequantized

        return dequantized(weight, scales, rows, dtype)
    if weight.device.type == "cpu" and dtype in (torch.float32, torch.bfloat16) and (kernel := _kernel()) is not None:
        weight, scales, groups = weight.contiguous(), scales.contiguous(), weight.shape[1]
        dense = torch.empty(rows, groups * GROUP, dtype=dtype)
        places = (weight.data_ptr(), scales.data_ptr(), dense.data_ptr())
        kernel(bits_of(weight), dtype is torch.bfloat16, rows, groups, *places, torch.get_num_threads())
        return dense
    return plain_dequantize(weight, scales, rows, dtype)


@dequantize.register_fake
def _(weight: Tensor, scales: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    return weight.new_empty(rows, weight.shape[1] * GROUP, dtype=dtype)


def plain_dequantize(weight: Tensor, scales: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """Like `dequantize`, with torch's operations alone."""
    numbers, of_rows = unpack(weight, scales, rows)
    values = (numbers.to(wide(dtype)) - ZERO[bits_of(weight)]).mul_(of_rows[..., None])
    return values.flatten(1).to(dtype)


@cache
def _kernel() -> Any:
    """The C function that dequantises weights, or None if it cannot be compiled."""
    size, pointer = ctypes.c_int64, ctypes.c_void_p
    types = [ctypes.c_int, ctypes.c_int, size, size, pointer, pointer, pointer, ctypes.c_int]
    otherwise = "weights of 8 and 4 bits are dequantised by torch's operations, which is slower"
    return native.function("dequantize", types, otherwise, file="skinny_quantized")


def pack_places(indices: Tensor) -> Tensor:
    """Pack the places that `packed24.pack` returns in the layout of the native product.

    Args:
        indices: (N, K / 8), bytes, K a multiple of 64.

    Returns:
        Bytes (N / 16, K / 64, 128), with N rounded up to a multiple of 16.
    """
    rows, groups = -(-len(indices) // LANES) * LANES, indices.shape[1] // 8
    padded = indices.new_zeros(rows, indices.shape[1])
    padded[: len(indices)] = indices
    return padded.view(rows // LANES, LANES, groups, 2, 4).permute(0, 2, 3, 1, 4).flatten(2).contiguous()


def unpack_places(places: Tensor, rows: int) -> Tensor:
    """The places (rows, K / 8) from the result of `pack_places`."""
    sixteens, groups, _ = places.shape
    of_rows = places.view(sixteens, groups, 2, LANES, 4).permute(0, 3, 1, 2, 4)
    return of_rows.reshape(sixteens * LANES, -1)[:rows].contiguous()


def wide(dtype: torch.dtype) -> torch.dtype:
    """The data type to compute in: `dtype`, but at least single precision."""
    return torch.promote_types(dtype, torch.float32)


def bits_of(weight: Tensor) -> Bits:
    """The number of bits of packed codes, from their shape."""
    return 8 if weight.shape[2] == GROUP * LANES else 4
