"""Packs integers of 1 to 32 bits into bytes, and ascending indices into nearly the minimum number of bits.

Packed sizes depend only on counts and ranges of values, not on the values, so they are the same on all ranks.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def packed_bytes(count: int, bits: int) -> int:
    """Bytes of one packed row of `count` codes; padding adds fewer than 8 codes."""
    per, filled = _period(bits)
    return -(-count // per) * filled


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes (rows, count) from 0 to 2^bits - 1 into bytes (rows, packed_bytes); bits from 1 to 32.

    Codes have any integer dtype. A period is the smallest number of codes that fills whole bytes. If a period of p
    codes fills b bytes, a row of codes is split into p contiguous planes, and the packed bytes into b contiguous
    planes, so that all copies are contiguous.
    """
    per, filled = _period(bits)
    missing = -codes.shape[1] % per
    planes = (F.pad(codes, (0, missing)) if missing else codes).unflatten(1, (per, -1))
    packed = torch.zeros(len(codes), filled, planes.shape[2], dtype=torch.uint8, device=codes.device)
    for plane in range(per):
        for byte, shift in _overlaps(plane, bits):
            code = planes[:, plane]
            packed[:, byte] |= (code << shift if shift >= 0 else code >> -shift).to(torch.uint8)
    return packed.flatten(1)


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """Convert the bytes from `pack` back to codes (rows, count), in uint8 for up to 8 bits, else in int64."""
    per, filled = _period(bits)
    parts = packed.unflatten(1, (filled, -1))
    dtype = torch.uint8 if bits <= 8 else torch.int64
    planes = torch.empty(len(packed), per, parts.shape[2], dtype=dtype, device=packed.device)
    for plane in range(per):
        (byte, shift), *others = _overlaps(plane, bits)
        torch.bitwise_right_shift(parts[:, byte].to(dtype), shift, out=planes[:, plane])
        for byte, shift in others:
            planes[:, plane] |= parts[:, byte].to(dtype) << -shift
    return planes.bitwise_and_(2**bits - 1).flatten(1)[:, :count]


def _period(bits: int) -> tuple[int, int]:
    """The smallest number of codes that fill whole bytes, and the number of these bytes."""
    common = math.gcd(bits, 8)
    return 8 // common, bits // common


def _overlaps(plane: int, bits: int) -> list[tuple[int, int]]:
    """The bytes of a period that code `plane` overlaps, as (byte, left shift of the code into this byte)."""
    start, end = plane * bits, (plane + 1) * bits
    return [(byte, start - 8 * byte) for byte in range(start // 8, -(-end // 8))]


def index_bytes(count: int, n: int) -> int:
    """Number of bytes that `encode_indices` writes for `count` indices below n."""
    low = _low_bits(count, n)
    return packed_bytes(count, low) * (low > 0) + packed_bytes(_marks(count, n, low), 1)


def encode_indices(indices: Tensor, n: int) -> Tensor:
    """Encode indices (rows, count) below n, ascending in each row, as bytes (rows, index_bytes); indices may repeat.

    This is the Elias-Fano code (1974). The low bits of each index are stored unchanged. The high bits are stored in a
    bit vector: the i-th index of a row, with high bits h, sets bit h + i. The code takes 2 + log2(n / count) bits per
    index, at most half a bit above the entropy.
    """
    rows, count = indices.shape
    low = _low_bits(count, n)
    marks = torch.zeros(rows, _marks(count, n, low), dtype=torch.uint8, device=indices.device)
    marks.scatter_(1, (indices >> low) + _positions(indices), 1)
    high = pack(marks, 1)
    return torch.cat([pack(indices & (2**low - 1), low), high], dim=1) if low else high


def decode_indices(packed: Tensor, count: int, n: int) -> Tensor:
    """The inverse of `encode_indices`: (rows, count), int64."""
    rows, low = len(packed), _low_bits(count, n)
    length = packed_bytes(count, low) if low else 0
    marks = unpack(packed[:, length:], 1, 8 * (packed.shape[1] - length))  # includes the padding bits, which are zero
    before = torch.arange(rows, device=packed.device)[:, None] * marks.shape[1]
    high = marks.view(-1).nonzero().view(rows, count).sub_(_positions(marks[:, :count])).sub_(before)
    return torch.add(unpack(packed[:, :length], low, count), high, alpha=2**low) if low else high


def _low_bits(count: int, n: int) -> int:
    """The number of low bits that makes the code shortest."""
    return min(range(32), key=lambda low: count * low + _marks(count, n, low))


def _marks(count: int, n: int, low: int) -> int:
    """Number of bits in the high part: one per index, and one per possible value of the high bits."""
    return count + (max(n - 1, 0) >> low) + 1


def _positions(indices: Tensor) -> Tensor:
    """Positions of the indices in a row, (count,)."""
    return torch.arange(indices.shape[1], device=indices.device)
