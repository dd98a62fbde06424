"""Triton kernels of `ternary`. Import this module only if Triton is installed.

Blocks, tables and arguments are as in `bucket_kernel`. A code is a level (-1, 0 or 1) plus 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shoestring.comm.codecs.bucket_kernel import KEYS, as_float, draw, find, pack, places, read, rounded, unpack, write


@triton.jit
def measure(
    table: tl.tensor,
    most: tl.tensor,  # (buckets,)
    squares: tl.tensor,  # (buckets,)
    buckets: tl.tensor,
    tensors: tl.tensor,
    bucket: tl.tensor,
    width: tl.tensor,
    DEPTH: tl.constexpr,
    KIND: tl.constexpr,
    FIRST: tl.constexpr,
    TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    PER: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """Compute the sum of squares and the largest magnitude of each bucket's entries; both are non-finite if an entry
    is."""
    b = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tensor, begin, count, handled = find(table, b, tensors, bucket, DEPTH, KIND, FIRST)
    handled = handled & (b < buckets)
    at = tl.arange(0, PER * WIDE)[None, None, :]  # in memory order, because no codes are packed
    inside = (at < count[:, None, None]) & handled[:, None, None]
    whole = tl.min(tl.where(handled, count, 0)) == WIDE * PER
    x = read(table, tensor, begin, at, inside, whole, TYPE, ALIGNED)
    largest = tl.max(tl.max(tl.abs(x), 2), 1) + tl.sum(tl.sum(x * 0.0, 2), 1)
    tl.store(most + b, largest, mask=handled)
    tl.store(squares + b, tl.sum(tl.sum(x * x, 2), 1), mask=handled)


@triton.jit
def scale(
    table: tl.tensor,
    most: tl.tensor,
    squares: tl.tensor,
    scales: tl.tensor,  # (tensors,)
    tensors: tl.tensor,
    clip: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Compute the scale of each tensor: the largest magnitude, limited to `clip` times the root mean square; one
    program per tensor."""
    tensor = tl.program_id(0)
    starts = table + 3 * (tensors + 1) + tensor
    b, last = tl.load(starts), tl.load(starts + 1)
    largest, wrong, total = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    while b < last:
        at = b + tl.arange(0, BLOCK)
        magnitudes = tl.load(most + at, mask=at < last, other=0.0)
        largest = tl.maximum(largest, magnitudes)
        wrong += magnitudes * 0.0  # NaN if a magnitude is not finite
        total += tl.load(squares + at, mask=at < last, other=0.0)
        b += BLOCK
    entries = tl.load(table + 2 * (tensors + 1) + tensor).to(tl.float32)
    sigma = tl.sqrt_rn(tl.div_rn(tl.sum(total, 0), entries))
    tl.store(scales + tensor, tl.minimum(tl.max(largest, 0), clip * sigma) + tl.sum(wrong, 0))


@triton.jit(do_not_specialize=KEYS)
def encode(
    table: tl.tensor,
    scales: tl.tensor,  # (tensors,)
    codes: tl.tensor,  # (buckets, width), uint8
    buckets: tl.tensor,
    tensors: tl.tensor,
    bucket: tl.tensor,
    width: tl.tensor,
    low_key: tl.tensor,
    high_key: tl.tensor,
    DEPTH: tl.constexpr,
    KIND: tl.constexpr,
    FIRST: tl.constexpr,
    TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    PER: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """Encode entries as levels -1, 0 and 1 by stochastic rounding; as zeros if the scale is zero or not finite."""
    b = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tensor, begin, count, handled = find(table, b, tensors, bucket, DEPTH, KIND, FIRST)
    handled = handled & (b < buckets)
    at, there = places(WIDE, PER, width)
    inside = there & (at < count[:, None, None]) & handled[:, None, None]
    whole = tl.min(tl.where(handled, count, 0)) == WIDE * PER
    x = read(table, tensor, begin, at, inside, whole, TYPE, ALIGNED)
    s = tl.load(scales + tensor)
    usable = (s > 0) & (s <= 3.4028234663852886e38)
    inverse = tl.div_rn(tl.zeros_like(s) + 1.0, tl.where(usable, s, 1.0))
    usable = usable & (inverse <= 3.4028234663852886e38)
    q = tl.where(usable[:, None, None], x * inverse[:, None, None], 0.0)
    q = tl.minimum(tl.maximum(q, -2.0), 2.0)  # `rounded` is correct for small numbers only
    q = rounded((q + draw(b[:, None, None] * bucket + at, low_key, high_key)) + 0.00000762939453125)
    byte = tl.arange(0, WIDE)[None, :]
    packed = pack(tl.where(there, tl.minimum(tl.maximum(q, -1.0), 1.0), -1.0), 2, 1, 0, PER)
    tl.store(codes + b[:, None] * width + byte, packed, mask=(byte < width) & handled[:, None])


@triton.jit
def decode(
    table: tl.tensor,
    scales: tl.tensor,  # (tensors,)
    codes: tl.tensor,  # (ranks, buckets, width), uint8, with stride `stride` between ranks
    buckets: tl.tensor,
    stride: tl.tensor,
    tensors: tl.tensor,
    bucket: tl.tensor,
    width: tl.tensor,
    RANKS: tl.constexpr,
    DEPTH: tl.constexpr,
    KIND: tl.constexpr,
    FIRST: tl.constexpr,
    TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    PER: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """Set g to the mean of the levels over ranks, times the scale."""
    b = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tensor, begin, count, handled = find(table, b, tensors, bucket, DEPTH, KIND, FIRST)
    handled = handled & (b < buckets)
    at, there = places(WIDE, PER, width)
    inside = there & (at < count[:, None, None]) & handled[:, None, None]
    whole = tl.min(tl.where(handled, count, 0)) == WIDE * PER
    byte = tl.arange(0, WIDE)[None, :]
    stored = (byte < width) & handled[:, None]
    total = tl.zeros([ROWS, PER, WIDE], tl.int32)
    for rank in range(RANKS):
        behind = (tl.zeros_like(b) + rank) * stride + b * width
        total += unpack(tl.load(codes + behind[:, None] + byte, mask=stored, other=0), 2, 1, 0, PER)
    s = tl.load(scales + tensor)
    share = tl.div_rn(s, tl.zeros_like(s) + RANKS)
    write(table, tensor, begin, at, inside, whole, as_float(total) * share[:, None, None], TYPE, ALIGNED)
