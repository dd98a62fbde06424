"""The kernels of `kernel_buckets`, for devices that Triton compiles for. Import it only where Triton is installed.

A program has ROWS buckets. A bucket's codes are WIDE bytes, of `width` that are used, and byte w has the codes of the
entries w, width + w, … in its bits from the lowest on, PER of them, as `bits.pack` lays them. Blocks of entries are
therefore (ROWS, PER, WIDE).

`table` (5, tensors + 1) in int64 holds, of each tensor: its address, that of its residual, its size, its first bucket
(behind the last tensor: the number of used buckets), and the number of its type, of which a launch processes one.
"""

from __future__ import annotations

import triton
import triton.language as tl

KEYS = ("one", "other")
"""Arguments that differ in every call: one that is 1 would be a constant, which has no type, and compiled anew."""


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
    """Of buckets b (ROWS,): their tensors, the first entry of each in it, the number of its entries, and whether it is
    of this launch; unused buckets have no entries, and are of the first launch."""
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
    mine = tl.where(used, tl.load(table + 4 * row + low), KIND if FIRST else -1) == KIND
    return low, begin, count, mine


@triton.jit
def places(WIDE: tl.constexpr, PER: tl.constexpr, width: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Numbers of the entries of a bucket, (1, PER, WIDE), and which of them are of its bytes in use."""
    byte = tl.arange(0, WIDE)
    at = tl.arange(0, PER)[None, :, None] * width + byte[None, None, :]
    return at, (byte < width)[None, None, :]


@triton.jit
def read(
    column: tl.tensor,  # of the table: addresses of tensors
    tensor: tl.tensor,
    begin: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    whole: tl.tensor,  # whether all are inside
    TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> tl.tensor:
    """Entries in fp32, zero outside. Where all are inside and addresses are aligned, 16 bytes are loaded at once."""
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
    """The inverse of `read`."""
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
    """A hash of 32 bits, of Wellons's family of two multiplications."""
    h = (h ^ (h >> 16)) * 0x21F0AAAD
    h = (h ^ (h >> 15)) * 0x735A2D97
    return h ^ (h >> 15)


@triton.jit
def as_float(i: tl.tensor) -> tl.tensor:
    """Whole numbers of magnitudes below 2^22 in fp32, by 1.5 x 2^23: a GPU converts a quarter as many at a time as it
    adds."""
    return (i + 0x4B400000).to(tl.float32, bitcast=True) - 12582912.0


@triton.jit
def as_int(q: tl.tensor) -> tl.tensor:
    """The inverse of `as_float`."""
    return (q + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def draw(numbers: tl.tensor, one: tl.tensor, other: tl.tensor) -> tl.tensor:
    """Noise in (-½, ½) of 16 bits, a function of the entry's number and of two keys."""
    h = mix(mix(numbers.to(tl.uint32) ^ one.to(tl.uint32)) + other.to(tl.uint32))
    return as_float((h >> 16).to(tl.int32) - 32768) * 0.0000152587890625


@triton.jit
def rounded(q: tl.tensor) -> tl.tensor:
    """To the nearest whole number, of two the even one; of magnitudes below 2^22."""
    return (q + 12582912.0) - 12582912.0


@triton.jit
def levels_of(
    x: tl.tensor, scale: tl.tensor, noise: tl.tensor, TOP: tl.constexpr, STOCHASTIC: tl.constexpr
) -> tl.tensor:
    """Levels from -TOP to TOP, whole numbers in fp32; zeros of a bucket without a usable scale. TOP 0: signs."""
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
    """Of each bucket, (ROWS,): not finite where an entry is not. TOP 0: the mean magnitude."""
    if TOP == 0:
        total = tl.sum(tl.sum(tl.abs(x), 2), 1)
        scale = tl.div_rn(total, tl.maximum(count, 1).to(tl.float32))
    else:
        most = tl.max(tl.max(tl.abs(x), 2), 1)
        scale = tl.div_rn(most + tl.sum(tl.sum(x * 0.0, 2), 1), tl.zeros_like(most) + TOP)
    return scale


@triton.jit
def pack(q: tl.tensor, BITS: tl.constexpr, OFFSET: tl.constexpr, SHIFT: tl.constexpr, PER: tl.constexpr) -> tl.tensor:
    """Bytes (ROWS, WIDE) of levels."""
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
    one: tl.tensor,
    other: tl.tensor,
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
    """Codes and scales of buckets of M = g + e, and e = M - what they stand for where all of the bucket is finite.

    With MEASURE the largest magnitudes alone, in the place of the scales.
    """
    b = first + tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tensor, begin, count, mine = find(table, b, tensors, bucket, DEPTH, KIND, FIRST)
    mine = mine & (b < last)
    at, there = places(WIDE, PER, width)
    inside = there & (at < count[:, None, None]) & mine[:, None, None]
    whole = tl.min(tl.where(mine, count, 0)) == WIDE * PER
    x = read(table, tensor, begin, at, inside, whole, TYPE, ALIGNED)
    residuals = table + tensors + 1
    if FEEDBACK:
        x += read(residuals, tensor, begin, at, inside, whole, tl.float32, ALIGNED)
    if MEASURE:
        most = tl.max(tl.max(tl.abs(x), 2), 1) + tl.sum(tl.sum(x * 0.0, 2), 1)
        tl.store(scales + b - first, most, mask=mine)
    else:
        scale = scale_of(x, count, TOP)
        noise = x * 0.0
        if STOCHASTIC:
            noise = draw(b[:, None, None] * bucket + at, one, other)
        q = levels_of(x, scale, noise, TOP, STOCHASTIC)
        byte = tl.arange(0, WIDE)[None, :]
        packed = pack(tl.where(there & (at < bucket), q, -OFFSET), BITS, OFFSET, SHIFT, PER)
        tl.store(codes + (b - first)[:, None] * width + byte, packed, mask=(byte < width) & mine[:, None])
        tl.store(scales + b - first, scale, mask=mine)
        if FEEDBACK:
            kept = (tl.abs(scale) <= 3.4028234663852886e38) & mine
            sure = whole & (tl.min(kept.to(tl.int32)) == 1)
            left = x - q * scale[:, None, None]
            write(residuals, tensor, begin, at, inside & kept[:, None, None], sure, left, tl.float32, ALIGNED)


@triton.jit(do_not_specialize=KEYS)
def encode_average(
    table: tl.tensor,
    sent: tl.tensor,  # (ranks, last - first, width): those of a rank `code_stride` after those of the one before
    of_sent: tl.tensor,  # (ranks, last - first), `scale_stride` apart
    codes: tl.tensor,  # (last - first, width), uint8
    scales: tl.tensor,  # (last - first,)
    errors: tl.tensor,  # (last - first, bucket), fp32: of the sum over the ranks
    first: tl.tensor,
    last: tl.tensor,
    tensors: tl.tensor,
    bucket: tl.tensor,
    width: tl.tensor,
    own: tl.tensor,
    code_stride: tl.tensor,
    scale_stride: tl.tensor,
    one: tl.tensor,
    other: tl.tensor,
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
    """Codes and scales of the mean over the ranks of what they sent and of this rank's own M, and its errors."""
    b = first + tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tensor, begin, count, mine = find(table, b, tensors, bucket, DEPTH, KIND, FIRST)
    mine = mine & (b < last)
    at, there = places(WIDE, PER, width)
    inside = there & (at < count[:, None, None]) & mine[:, None, None]
    whole = tl.min(tl.where(mine, count, 0)) == WIDE * PER
    x = read(table, tensor, begin, at, inside, whole, TYPE, ALIGNED)
    if FEEDBACK:
        x += read(table + tensors + 1, tensor, begin, at, inside, whole, tl.float32, ALIGNED)
    byte, row = tl.arange(0, WIDE)[None, :], b - first
    stored = (byte < width) & mine[:, None]
    total = tl.zeros([ROWS, PER, WIDE], tl.float32)
    for rank in range(RANKS):
        if rank == own:
            total += x
        else:
            behind = tl.zeros_like(row) + rank  # of 64 bits
            of_rank = (behind * code_stride + row * width)[:, None] + byte
            theirs = tl.load(sent + of_rank, mask=stored, other=0)
            scale = tl.load(of_sent + behind * scale_stride + row, mask=mine, other=0.0)
            total += as_float(unpack(theirs, BITS, OFFSET, SHIFT, PER)) * scale[:, None, None]
    average = tl.where(inside, tl.div_rn(total, tl.zeros_like(total) + RANKS), 0.0)
    scale = scale_of(average, count, TOP)
    noise = average * 0.0
    if STOCHASTIC:
        noise = draw(b[:, None, None] * bucket + at, one, other)
    q = levels_of(average, scale, noise, TOP, STOCHASTIC)
    packed = pack(tl.where(there & (at < bucket), q, -OFFSET), BITS, OFFSET, SHIFT, PER)
    tl.store(codes + row[:, None] * width + byte, packed, mask=stored)
    tl.store(scales + row, scale, mask=mine)
    if FEEDBACK:
        left = (average - q * scale[:, None, None]) * RANKS
        tl.store(errors + row[:, None, None] * bucket + at, left, mask=inside)


@triton.jit
def decode(
    table: tl.tensor,
    codes: tl.tensor,  # (rows, buckets of a row, width)
    scales: tl.tensor,  # (rows, buckets of a row)
    sent: tl.tensor,  # (rows x buckets, width): what this rank encoded; of its own row nothing
    of_sent: tl.tensor,  # (rows x buckets,)
    errors: tl.tensor,  # (buckets, bucket) of its own row
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
    """g = what the codes stand for, and e = the errors of this rank's own row, where all went well.

    Otherwise g = NaN, and e what it was before `encode`, up to rounding: e + what was sent - g. Where that may be
    rounding alone, as beside gradients that have overflowed, e is 0.
    """
    b = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tensor, begin, count, mine = find(table, b, tensors, bucket, DEPTH, KIND, FIRST)
    mine = mine & (b < rows * row_buckets)
    at, there = places(WIDE, PER, width)
    inside = there & (at < count[:, None, None]) & mine[:, None, None]
    whole = tl.min(tl.where(mine, count, 0)) == WIDE * PER
    residuals = table + tensors + 1
    row, within = b // row_buckets, b % row_buckets
    byte = tl.arange(0, WIDE)[None, :]
    stored = (byte < width) & mine[:, None]
    here = row == own
    if tl.load(fine) != 0:
        theirs = tl.load(codes + row[:, None] * code_stride + within[:, None] * width + byte, mask=stored, other=0)
        scale = tl.load(scales + row * scale_stride + within, mask=mine, other=0.0)
        x = as_float(unpack(theirs, BITS, OFFSET, SHIFT, PER)) * scale[:, None, None]
        if FEEDBACK:  # known when it is compiled  # noqa: SIM102
            if tl.max((here & mine).to(tl.int32)) == 1:
                its = inside & here[:, None, None]
                left = tl.load(errors + within[:, None, None] * bucket + at, mask=its, other=0.0)
                write(residuals, tensor, begin, at, its, False, left, tl.float32, False)
        write(table, tensor, begin, at, inside, whole, x, TYPE, ALIGNED)
    else:
        g = read(table, tensor, begin, at, inside, False, TYPE, False)
        if FEEDBACK:
            scale = tl.load(of_sent + b, mask=mine & ~here, other=0.0)
            undone = mine & ~here & (tl.abs(scale) <= 3.4028234663852886e38)
            theirs = tl.load(sent + b[:, None] * width + byte, mask=stored & undone[:, None], other=0)
            its = inside & undone[:, None, None]
            e = read(residuals, tensor, begin, at, its, False, tl.float32, False)
            x = as_float(unpack(theirs, BITS, OFFSET, SHIFT, PER)) * scale[:, None, None]
            before = e + x - g
            rounding = (tl.abs(g) + tl.abs(x)) * 0.00000095367431640625  # 2^-20
            before = tl.where(tl.abs(before) > rounding, before, 0.0)
            write(residuals, tensor, begin, at, its, False, before, tl.float32, False)
        write(table, tensor, begin, at, inside, False, g * 0.0 + float("nan"), TYPE, False)
