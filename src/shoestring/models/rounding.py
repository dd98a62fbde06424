"""Weights rounded to 8 or 4 bits, to nearest, with a scale for every 32 inputs of a row; and their order in memory.

The numbers are those of llama.cpp's Q8_0 and Q4_0: w = scale · q, q from -127 to 127 or from -8 to 7, the scale in
fp16, together 8.5 and 4.5 bits a weight. So its files can be taken over as they are. In memory they have the order that
the native product reads, sixteen rows side by side; see `native/skinny_quantized.c`. A zero stays a zero.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor

from shoestring import native
from shoestring.core.errors import ConfigError

Bits = Literal[8, 4]

GROUP = 32
"""Inputs that share a scale."""
LANES = 16
"""Rows that lie side by side."""
ZERO = {8: 128, 4: 8}
"""The byte or the nibble that stands for 0, by bits."""
_CANDIDATES = torch.linspace(6.0, 9.0, 13)
_WEIGHTS_AT_ONCE = 1 << 22  # that are rounded at a time, which bounds the memory that it takes


@torch.no_grad()
def quantize(weight: Tensor, bits: Bits) -> tuple[Tensor, Tensor]:
    """Round a weight to 8 or 4 bits.

    For 4 bits each group takes, of 26 scales around that which its largest weight asks for, the one with the least sum
    of squared errors, refined once by least squares: 16 levels are too few for the largest weight to decide alone.

    Args:
        weight: (N, K), finite, K a multiple of 32.

    Returns:
        Numbers (N, K / 32, 32) with the zero at 128 or 8, as bytes, and scales (N, K / 32) in fp16.

    Raises:
        ConfigError: the shape cannot be quantised, a weight is not finite, or too large for fp16.
    """
    if why := unfit(weight):
        raise ConfigError(f"a weight of shape {tuple(weight.shape)} cannot be quantised: {why}")
    if not weight.isfinite().all():
        raise ConfigError("the weight has entries that are not finite")
    groups = weight.detach().reshape(-1, GROUP)
    parts = [_rounded(part.float(), bits) for part in groups.split(max(1, _WEIGHTS_AT_ONCE // GROUP))]
    numbers, scales = (torch.cat(each) for each in zip(*parts, strict=True))
    if not scales.isfinite().all():
        raise ConfigError(f"weights of up to {float(weight.abs().max()):.3g} need scales beyond those of fp16")
    return numbers.view(len(weight), -1, GROUP), scales.view(len(weight), -1)


def _rounded(groups: Tensor, bits: Bits) -> tuple[Tensor, Tensor]:
    """Numbers and scales of groups, (n, 32) in fp32."""
    largest = groups.abs().amax(1)
    if bits == 8:
        scales = (largest / 127).half()
        return _numbers(groups, scales, 8), scales
    best, least = torch.zeros_like(largest), torch.full_like(largest, torch.inf)
    for levels in (*_CANDIDATES.tolist(), *(-_CANDIDATES).tolist()):
        scales = (largest / levels).half().float()
        q = (groups * _inverse(scales)[:, None]).round_().clamp_(-8, 7)
        refined = ((groups * q).sum(1) / q.square().sum(1).clamp_min(1)).half().float()
        for each in (scales, refined):
            q = (groups * _inverse(each)[:, None]).round_().clamp_(-8, 7)
            error = (q * each[:, None] - groups).square_().sum(1)
            better = error < least
            best, least = torch.where(better, each, best), torch.where(better, error, least)
    scales = best.half()
    return _numbers(groups, scales, 4), scales


def _numbers(groups: Tensor, scales: Tensor, bits: Bits) -> Tensor:
    least = -127 if bits == 8 else -8
    q = (groups * _inverse(scales.float())[:, None]).round_().clamp_(least, 127 if bits == 8 else 7)
    return (q + ZERO[bits]).byte()


def _inverse(scales: Tensor) -> Tensor:
    """1 / scale; 0 where the scale is 0, that of a group of zeros."""
    return torch.where(scales == 0, 0.0, 1 / scales)


def unfit(weight: Tensor) -> str | None:
    """Why a weight cannot be quantised; None where it can."""
    if weight.dim() != 2 or not weight.is_floating_point():
        return "it is no matrix of floating-point numbers"
    if weight.shape[1] % GROUP or not weight.numel():
        return f"its inputs are no multiple of {GROUP}"
    return None


def pack(numbers: Tensor, scales: Tensor, bits: Bits) -> tuple[Tensor, Tensor]:
    """The order of the native product.

    Args:
        numbers, scales: as `quantize` returns them, N rows and G groups.

    Returns:
        Bytes (N / 16, G, 512 or 256), N rounded up, and the bits of scales (N / 16, G, 16), int16, which no cast of a
        model to another type changes.
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
    """Numbers (rows, G, 32) and scales (rows, G) of what `pack` returned."""
    sixteens, groups, size = weight.shape
    numbers = weight.view(sixteens, groups, -1, LANES, 4).permute(0, 3, 1, 2, 4).reshape(sixteens * LANES, groups, -1)
    if size == 16 * LANES:
        numbers = torch.cat((numbers & 15, numbers >> 4), -1)
    of_rows = scales.view(torch.float16).transpose(1, 2).reshape(sixteens * LANES, groups)
    return numbers[:rows], of_rows[:rows]


@torch.library.custom_op("shoestring::dequantize", mutates_args=())
def dequantize(weight: Tensor, scales: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """The weight (rows, K) that packed numbers stand for.

    It is written in one pass, where torch's operations take six: on a GPU, and on a CPU in fp32 and bf16.
    """
    if weight.device.type == "cuda" and find_spec("triton") is not None:
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
    """`dequantize` by operations of torch."""
    numbers, of_rows = unpack(weight, scales, rows)
    values = (numbers.to(wide(dtype)) - ZERO[bits_of(weight)]).mul_(of_rows[..., None])
    return values.flatten(1).to(dtype)


@cache
def _kernel() -> Any:
    """The C function; None on a machine that cannot compile it."""
    size, pointer = ctypes.c_int64, ctypes.c_void_p
    types = [ctypes.c_int, ctypes.c_int, size, size, pointer, pointer, pointer, ctypes.c_int]
    said = "weights of 8 and 4 bits are dequantised by torch's operations, which is slower"
    return native.function("dequantize", types, said, file="skinny_quantized")


def pack_places(indices: Tensor) -> Tensor:
    """The order of the native product of the places that `packed24.pack` gives.

    Args:
        indices: (N, K / 8), bytes, K a multiple of 64.

    Returns:
        Bytes (N / 16, K / 64, 128), N rounded up.
    """
    rows, groups = -(-len(indices) // LANES) * LANES, indices.shape[1] // 8
    padded = indices.new_zeros(rows, indices.shape[1])
    padded[: len(indices)] = indices
    return padded.view(rows // LANES, LANES, groups, 2, 4).permute(0, 2, 3, 1, 4).flatten(2).contiguous()


def unpack_places(places: Tensor, rows: int) -> Tensor:
    """The places (rows, K / 8) of what `pack_places` returned."""
    sixteens, groups, _ = places.shape
    of_rows = places.view(sixteens, groups, 2, LANES, 4).permute(0, 3, 1, 2, 4)
    return of_rows.reshape(sixteens * LANES, -1)[:rows].contiguous()


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type to compute in: single precision at least."""
    return torch.promote_types(dtype, torch.float32)


def bits_of(weight: Tensor) -> Bits:
    """8 or 4, by the shape of packed numbers."""
    return 8 if weight.shape[2] == GROUP * LANES else 4
