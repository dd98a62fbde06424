"""Packs integers of few bits into bytes, and ascending indices into nearly the fewest bits possible.

Sizes depend only on counts and ranges, so that they are the same on all ranks whatever the values are.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def packed_bytes(count: int, bits: int) -> int:
    """Bytes of one row of `pack`: at most 8 codes more than `count` codes need."""
    per, filled = _period(bits)
    return -(-count // per) * filled


def pack(codes: Tensor, bits: int) -> Tensor:
    """Bytes (rows, packed_bytes) of codes (rows, count) from 0 to 2^bits - 1, of any integer dtype; bits from 1 to 32.

    A row is cut into as many equal planes as codes fill whole bytes, and so are its bytes: all copies are contiguous.
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
    """The inverse of `pack`: (rows, count), uint8 for up to 8 bits and int64 beyond."""
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
    """The least number of codes that fill whole bytes, and the number of those bytes."""
    common = math.gcd(bits, 8)
    return 8 // common, bits // common


def _overlaps(plane: int, bits: int) -> list[tuple[int, int]]:
    """The bytes that code `plane` of a period enters, each with the left shift that takes the code there."""
    start, end = plane * bits, (plane + 1) * bits
    return [(byte, start - 8 * byte) for byte in range(start // 8, -(-end // 8))]


def index_bytes(count: int, n: int) -> int:
    """Bytes of `count` indices below n as `encode_indices` writes them."""
    low = _low_bits(count, n)
    return packed_bytes(count, low) * (low > 0) + packed_bytes(_marks(count, n, low), 1)


def encode_indices(indices: Tensor, n: int) -> Tensor:
    """Bytes (rows, index_bytes) of ascending indices (rows, count) below n; equal ones may follow each other.

    Elias-Fano code (1974): the low bits as they are, and for the high bits one mark an index, at their value plus the
    index's position in its row. This takes 2 + log2(n / count) bits an index, at most half a bit above the entropy.
    """
    rows, count = indices.shape
    low = _low_bits(count, n)
    marks = torch.zeros(rows, _marks(count, n, low), dtype=torch.uint8, device=indices.device)
    marks.scatter_(1, (indices >> low) + _places(indices), 1)
    high = pack(marks, 1)
    return torch.cat([pack(indices & (2**low - 1), low), high], dim=1) if low else high


def decode_indices(packed: Tensor, count: int, n: int) -> Tensor:
    """The inverse of `encode_indices`: (rows, count), int64."""
    rows, low = len(packed), _low_bits(count, n)
    length = packed_bytes(count, low) if low else 0
    marks = unpack(packed[:, length:], 1, 8 * (packed.shape[1] - length))  # with padding, which is zero
    before = torch.arange(rows, device=packed.device)[:, None] * marks.shape[1]
    high = marks.view(-1).nonzero().view(rows, count).sub_(_places(marks[:, :count])).sub_(before)
    return torch.add(unpack(packed[:, :length], low, count), high, alpha=2**low) if low else high


def _low_bits(count: int, n: int) -> int:
    return min(range(32), key=lambda low: count * low + _marks(count, n, low))


def _marks(count: int, n: int, low: int) -> int:
    return count + (max(n - 1, 0) >> low) + 1


def _places(indices: Tensor) -> Tensor:
    return torch.arange(indices.shape[1], device=indices.device)
