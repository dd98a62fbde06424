"""Triton kernels of `kernel_buckets`. Import this module only if Triton is installed.

Each program processes ROWS buckets. The codes of a bucket take WIDE bytes, of which the first `width` are used. Byte w
holds the codes of the PER entries w, width + w, …, starting at the lowest bit, in the layout of `bits.pack`. A block of
entries has the shape (ROWS, PER, WIDE).

`table` (5, tensors + 1), int64, has a column for each tensor, with five rows: address of the tensor, address of its
residual, number of its entries, index of its first bucket, and index of its data type. In the extra last column, row 3
holds the number of used buckets. A launch processes the tensors of one data type.
"""

from __future__ import annotations

import triton
import triton.language as tl

KEYS = ("low_key", "high_key")
"""Kernel arguments that differ in every call. Triton must not specialise on these arguments: it would compile another
kernel whenever one of them is 1."""


@triton.jit
def find(
    table: tl.tensor,
    b: tl.tensor,
    tensors: tl.tensor,
    bucket: tl.tensor,
    DEPTH: tl.constexpr,
    KIND: tl.constexpr,
    FIRST: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Look up buckets b (ROWS,). Returns for each bucket: the index of its tensor, its first entry in that tensor, its
    number of entries, and whether this launch handles it.

    Unused buckets have no entries; the first launch handles them.
    """
    row = tensors + 1
    low, high = tl.zeros_like(b), tl.zeros_like(b) + tensors
    for _ in range(DEPTH):
        middle = (low + high) // 2
        below = (tl.load(table + 3 * row + middle) <= b) & (high - low > 1)
        low, high = tl.where(below, middle, low), tl.where(below | (high - low < 2), high, middle)
    used = b < tl.load(table + 3 * row + tensors)
    begin = (b - tl.load(table + 3 * row + low)) * bucket
    left = tl.load(table + 2 * row + low) - begin
    count = tl.where(used, tl.minimum(tl.maximum(left, 0), bucket), 0)
    handled = tl.where(used, tl.load(table + 4 * row + low), KIND if FIRST else -1) == KIND
    return low, begin, count, handled


@triton.jit
def places(WIDE: tl.constexpr, PER: tl.constexpr, width: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Positions of a block's entries in their bucket, (1, PER, WIDE), and whether each byte is used, (1, 1, WIDE)."""
    byte = tl.arange(0, WIDE)
    at = tl.arange(0, PER)[None, :, None] * width + byte[None, None, :]
    return at, (byte < width)[None, None, :]


@triton.jit
def read(
    column: tl.tensor,  # start of the table's row of addresses to read from
    tensor: tl.tensor,
    begin: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    whole: tl.tensor,  # whether all entries are inside the tensor
    TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> tl.tensor:
    """Load entries as fp32, with zeros outside the tensor. If all entries are inside the tensor and addresses are
    aligned, each load instruction reads 16 bytes."""
    start = tl.load(column + tensor).to(tl.pointer_type(TYPE)) + begin
    where = start[:, None, None] + at
    if ALIGNED:
        if whole:
            x = tl.load(tl.multiple_of(where, [1, 1, 16])).to(tl.float32)
        else:
            x = tl.load(where, mask=inside, other=0.0).to(tl.float32)
    else:
        x = tl.load(where, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit
def write(
    column: tl.tensor,
    tensor: tl.tensor,
    begin: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    whole: tl.tensor,
    x: tl.tensor,
    TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    """Store entries; the inverse of `read`."""
    start = tl.load(column + tensor).to(tl.pointer_type(TYPE)) + begin
    where = start[:, None, None] + at
    if ALIGNED:
        if whole:
            tl.store(tl.multiple_of(where, [1, 1, 16]), x.to(TYPE))
        else:
            tl.store(where, x.to(TYPE), mask=inside)
    else:
        tl.store(where, x.to(TYPE), mask=inside)


@triton.jit
def mix(h: tl.tensor) -> tl.tensor:
    """A 32-bit hash with two multiplications, after Wellons."""
    h = (h ^ (h >> 16)) * 0x21F0AAAD
    h = (h ^ (h >> 15)) * 0x735A2D97
    return h ^ (h >> 15)


@triton.jit
def as_float(i: tl.tensor) -> tl.tensor:
    """Convert whole numbers below 2^22 in magnitude to fp32 by adding 1.5 x 2^23.

    A GPU's throughput of additions is four times its throughput of conversions.
    """
    return (i + 0x4B400000).to(tl.float32, bitcast=True) - 12582912.0


@triton.jit
def as_int(q: tl.tensor) -> tl.tensor:
    """The inverse of `as_float`."""
    return (q + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def draw(numbers: tl.tensor, low_key: tl.tensor, high_key: tl.tensor) -> tl.tensor:
    """16-bit noise in (-½, ½), computed from an entry's number and two keys."""
    h = mix(mix(numbers.to(tl.uint32) ^ low_key.to(tl.uint32)) + high_key.to(tl.uint32))
    return as_float((h >> 16).to(tl.int32) - 32768) * 0.0000152587890625


@triton.jit
def rounded(q: tl.tensor) -> tl.tensor:
    """Round to the nearest whole number, ties to even, for magnitudes below 2^22."""
    return (q + 12582912.0) - 12582912.0


@triton.jit
def levels_of(
    x: tl.tensor, scale: tl.tensor, noise: tl.tensor, TOP: tl.constexpr, STOCHASTIC: tl.constexpr
) -> tl.tensor:
    """Quantise to whole levels from -TOP to TOP, in fp32; if TOP is 0, to signs. Buckets without a usable scale get
    zeros."""
    if TOP == 0:
        q = tl.where(x >= 0, 1.0, -1.0)
    else:
        inverse = tl.div_rn(tl.zeros_like(scale) + 1.0, tl.where(scale > 0, scale, 1.0))
        usable = (scale > 0) & (scale <= 3.4028234663852886e38) & (inverse <= 3.4028234663852886e38)
        q = x * tl.where(usable, inverse, 0.0)[:, None, None]
        if STOCHASTIC:
            q = (q + noise) + 0.00000762939453125
        q = rounded(tl.where(usable[:, None, None], q, 0.0))
        q = tl.minimum(tl.maximum(q, -TOP), TOP)
    return q


@triton.jit
def scale_of(x: tl.tensor, count: tl.tensor, TOP: tl.constexpr) -> tl.tensor:
    """Scale of each bucket, (ROWS,): the largest magnitude divided by TOP, or the mean magnitude if TOP is 0. The scale
    is non-finite if any entry is non-finite."""
    if TOP == 0:
        total = tl.sum(tl.sum(tl.abs(x), 2), 1)
        scale = tl.div_rn(total, tl.maximum(count, 1).to(tl.float32))
    else:
        most = tl.max(tl.max(tl.abs(x), 2), 1)
        scale = tl.div_rn(most + tl.sum(tl.sum(x * 0.0, 2), 1), tl.zeros_like(most) + TOP)
    return scale


@triton.jit
def pack(q: tl.tensor, BITS: tl.constexpr, OFFSET: tl.constexpr, SHIFT: tl.constexpr, PER: tl.constexpr) -> tl.tensor:
    """Pack levels into bytes (ROWS, WIDE)."""
    code = ((as_int(q) + OFFSET) >> SHIFT) & (2**BITS - 1)
    return tl.sum(code << (tl.arange(0, PER) * BITS)[None, :, None], 1).to(tl.uint8)


@triton.jit
def unpack(
    codes: tl.tensor, BITS: tl.constexpr, OFFSET: tl.constexpr, SHIFT: tl.constexpr, PER: tl.constexpr
) -> tl.tensor:
    """The inverse of `pack`, in int32."""
    code = (codes.to(tl.int32)[:, None, :] >> (tl.arange(0, PER) * BITS)[None, :, None]) & (2**BITS - 1)
    if BITS == 8:
        code = (code ^ 128) - 128
    return (code << SHIFT) - OFFSET


@triton.jit(do_not_specialize=KEYS)
def encode(
    table: tl.tensor,
    codes: tl.tensor,  # (last - first, width), uint8
    scales: tl.tensor,  # (last - first,)
    first: tl.tensor,
    last: tl.tensor,
    tensors: tl.tensor,
    bucket: tl.tensor,
    width: tl.tensor,
    low_key: tl.tensor,
    high_key: tl.tensor,
    MEASURE: tl.constexpr,
    FEEDBACK: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    SHIFT: tl.constexpr,
    TOP: tl.constexpr,
    DEPTH: tl.constexpr,
    KIND: tl.constexpr,
    FIRST: tl.constexpr,
    TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    PER: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """Encode buckets of M = g + e (gradient + residual) as codes and scales; in finite buckets set e to M - decoded M.

    With MEASURE, only write the largest magnitude of each bucket, in place of the scale.
    """
    b = first + tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tensor, begin, count, handled = find(table, b, tensors, bucket, DEPTH, KIND, FIRST)
    handled = handled & (b < last)
    at, there = places(WIDE, PER, width)
    inside = there & (at < count[:, None, None]) & handled[:, None, None]
    whole = tl.min(tl.where(handled, count, 0)) == WIDE * PER
    x = read(table, tensor, begin, at, inside, whole, TYPE, ALIGNED)
    residuals = table + tensors + 1
    if FEEDBACK:
        x += read(residuals, tensor, begin, at, inside, whole, tl.float32, ALIGNED)
    if MEASURE:
        most = tl.max(tl.max(tl.abs(x), 2), 1) + tl.sum(tl.sum(x * 0.0, 2), 1)
        tl.store(scales + b - first, most, mask=handled)
    else:
        scale = scale_of(x, count, TOP)
        noise = x * 0.0
        if STOCHASTIC:
            noise = draw(b[:, None, None] * bucket + at, low_key, high_key)
        q = levels_of(x, scale, noise, TOP, STOCHASTIC)
        byte = tl.arange(0, WIDE)[None, :]
        packed = pack(tl.where(there & (at < bucket), q, -OFFSET), BITS, OFFSET, SHIFT, PER)
        tl.store(codes + (b - first)[:, None] * width + byte, packed, mask=(byte < width) & handled[:, None])
        tl.store(scales + b - first, scale, mask=handled)
        if FEEDBACK:
            usable = (tl.abs(scale) <= 3.4028234663852886e38) & handled
            sure = whole & (tl.min(usable.to(tl.int32)) == 1)
            left = x - q * scale[:, None, None]
            write(residuals, tensor, begin, at, inside & usable[:, None, None], sure, left, tl.float32, ALIGNED)


@triton.jit(do_not_specialize=KEYS)
def encode_average(
    table: tl.tensor,
    sent: tl.tensor,  # (ranks, last - first, width) with stride `code_stride` between ranks
    sent_scales: tl.tensor,  # (ranks, last - first) with stride `scale_stride` between ranks
    codes: tl.tensor,  # (last - first, width), uint8
    scales: tl.tensor,  # (last - first,)
    errors: tl.tensor,  # (last - first, bucket), fp32: coding errors of the sum over ranks
    first: tl.tensor,
    last: tl.tensor,
    tensors: tl.tensor,
    bucket: tl.tensor,
    width: tl.tensor,
    own: tl.tensor,
    code_stride: tl.tensor,
    scale_stride: tl.tensor,
    low_key: tl.tensor,
    high_key: tl.tensor,
    RANKS: tl.constexpr,
    FEEDBACK: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    SHIFT: tl.constexpr,
    TOP: tl.constexpr,
    DEPTH: tl.constexpr,
    KIND: tl.constexpr,
    FIRST: tl.constexpr,
    TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    PER: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """Encode the mean of M over ranks, and write the coding errors. This rank's M is exact; the M of every other rank
    is decoded from codes."""
    b = first + tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tensor, begin, count, handled = find(table, b, tensors, bucket, DEPTH, KIND, FIRST)
    handled = handled & (b < last)
    at, there = places(WIDE, PER, width)
    inside = there & (at < count[:, None, None]) & handled[:, None, None]
    whole = tl.min(tl.where(handled, count, 0)) == WIDE * PER
    x = read(table, tensor, begin, at, inside, whole, TYPE, ALIGNED)
    if FEEDBACK:
        x += read(table + tensors + 1, tensor, begin, at, inside, whole, tl.float32, ALIGNED)
    byte, row = tl.arange(0, WIDE)[None, :], b - first
    stored = (byte < width) & handled[:, None]
    total = tl.zeros([ROWS, PER, WIDE], tl.float32)
    for rank in range(RANKS):
        if rank == own:
            total += x
        else:
            behind = tl.zeros_like(row) + rank  # in 64 bits, because offsets may be large
            of_rank = (behind * code_stride + row * width)[:, None] + byte
            received = tl.load(sent + of_rank, mask=stored, other=0)
            scale = tl.load(sent_scales + behind * scale_stride + row, mask=handled, other=0.0)
            total += as_float(unpack(received, BITS, OFFSET, SHIFT, PER)) * scale[:, None, None]
    average = tl.where(inside, tl.div_rn(total, tl.zeros_like(total) + RANKS), 0.0)
    scale = scale_of(average, count, TOP)
    noise = average * 0.0
    if STOCHASTIC:
        noise = draw(b[:, None, None] * bucket + at, low_key, high_key)
    q = levels_of(average, scale, noise, TOP, STOCHASTIC)
    packed = pack(tl.where(there & (at < bucket), q, -OFFSET), BITS, OFFSET, SHIFT, PER)
    tl.store(codes + row[:, None] * width + byte, packed, mask=stored)
    tl.store(scales + row, scale, mask=handled)
    if FEEDBACK:
        left = (average - q * scale[:, None, None]) * RANKS
        tl.store(errors + row[:, None, None] * bucket + at, left, mask=inside)


@triton.jit
def decode(
    table: tl.tensor,
    codes: tl.tensor,  # (rows, buckets of a row, width)
    scales: tl.tensor,  # (rows, buckets of a row)
    sent: tl.tensor,  # (rows x buckets, width): codes that this rank sent; this rank's own row is unused
    sent_scales: tl.tensor,  # (rows x buckets,)
    errors: tl.tensor,  # (buckets, bucket): coding errors of this rank's own row
    fine: tl.tensor,  # (1,) uint8: whether the exchange has succeeded
    rows: tl.tensor,
    row_buckets: tl.tensor,
    own: tl.tensor,
    tensors: tl.tensor,
    bucket: tl.tensor,
    width: tl.tensor,
    code_stride: tl.tensor,
    scale_stride: tl.tensor,
    FEEDBACK: tl.constexpr,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    SHIFT: tl.constexpr,
    DEPTH: tl.constexpr,
    KIND: tl.constexpr,
    FIRST: tl.constexpr,
    TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    PER: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """If the exchange has succeeded, decode the codes into g, and copy the errors of this rank's own row into e.

    If the exchange failed, set g to NaN, and restore e as it was before `encode`, up to rounding: e + decoded - g. Set
    e to 0 where the restored value is within the rounding error, as it is if gradients have overflowed.
    """
    b = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tensor, begin, count, handled = find(table, b, tensors, bucket, DEPTH, KIND, FIRST)
    handled = handled & (b < rows * row_buckets)
    at, there = places(WIDE, PER, width)
    inside = there & (at < count[:, None, None]) & handled[:, None, None]
    whole = tl.min(tl.where(handled, count, 0)) == WIDE * PER
    residuals = table + tensors + 1
    row, within = b // row_buckets, b % row_buckets
    byte = tl.arange(0, WIDE)[None, :]
    stored = (byte < width) & handled[:, None]
    here = row == own
    if tl.load(fine) != 0:
        received = tl.load(codes + row[:, None] * code_stride + within[:, None] * width + byte, mask=stored, other=0)
        scale = tl.load(scales + row * scale_stride + within, mask=handled, other=0.0)
        x = as_float(unpack(received, BITS, OFFSET, SHIFT, PER)) * scale[:, None, None]
        if FEEDBACK:  # a compile-time constant  # noqa: SIM102
            if tl.max((here & handled).to(tl.int32)) == 1:
                its = inside & here[:, None, None]
                left = tl.load(errors + within[:, None, None] * bucket + at, mask=its, other=0.0)
                write(residuals, tensor, begin, at, its, False, left, tl.float32, False)
        write(table, tensor, begin, at, inside, whole, x, TYPE, ALIGNED)
    else:
        g = read(table, tensor, begin, at, inside, False, TYPE, False)
        if FEEDBACK:
            scale = tl.load(sent_scales + b, mask=handled & ~here, other=0.0)
            undone = handled & ~here & (tl.abs(scale) <= 3.4028234663852886e38)
            received = tl.load(sent + b[:, None] * width + byte, mask=stored & undone[:, None], other=0)
            its = inside & undone[:, None, None]
            e = read(residuals, tensor, begin, at, its, False, tl.float32, False)
            x = as_float(unpack(received, BITS, OFFSET, SHIFT, PER)) * scale[:, None, None]
            before = e + x - g
            rounding = (tl.abs(g) + tl.abs(x)) * 0.00000095367431640625  # 2^-20
            before = tl.where(tl.abs(before) > rounding, before, 0.0)
            write(residuals, tensor, begin, at, its, False, before, tl.float32, False)
        write(table, tensor, begin, at, inside, False, g * 0.0 + float("nan"), TYPE, False)
