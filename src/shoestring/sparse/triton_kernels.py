"""Triton kernels of masks and random draws, launched by `kernels`. Import this module only if Triton is installed.

Results are bit-identical to the results of torch's operations: comparisons and the integer arithmetic of draws are
exact, and sums add the same terms in the same order. There are two exceptions: the scores of tiles, because the order
of summation depends on the device, and entries in the same group as a NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def two_of(a: tl.tensor, b: tl.tensor, c: tl.tensor) -> tl.tensor:
    """Whether at least two of the three are true."""
    return (a & b) | (c & (a | b))


@triton.jit
def row_mask_kernel(
    scores: tl.tensor,  # (4 groups,)
    mask: tl.tensor,  # (4 groups,) uint8
    groups: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """See `masks.row_mask`: 1 at the two largest magnitudes of each group; of equal magnitudes, at the first. NaN
    counts as largest."""
    group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = group < groups
    a = tl.abs(tl.load(scores + 4 * group, mask=inside, other=0.0))
    b = tl.abs(tl.load(scores + 4 * group + 1, mask=inside, other=0.0))
    c = tl.abs(tl.load(scores + 4 * group + 2, mask=inside, other=0.0))
    d = tl.abs(tl.load(scores + 4 * group + 3, mask=inside, other=0.0))
    ab, ac, ad = (a >= b) | (a != a), (a >= c) | (a != a), (a >= d) | (a != a)
    bc, bd, cd = (b >= c) | (b != b), (b >= d) | (b != b), (c >= d) | (c != c)
    tl.store(mask + 4 * group, two_of(ab, ac, ad).to(tl.uint8), mask=inside)
    tl.store(mask + 4 * group + 1, two_of(ab == 0, bc, bd).to(tl.uint8), mask=inside)
    tl.store(mask + 4 * group + 2, two_of(ac == 0, bc == 0, cd).to(tl.uint8), mask=inside)
    tl.store(mask + 4 * group + 3, two_of(ad == 0, bd == 0, cd == 0).to(tl.uint8), mask=inside)


@triton.jit
def tile_codes_kernel(
    weight: tl.tensor,  # (rows, 4 * across)
    bank: tl.tensor,  # (PATTERNS, 16)
    codes: tl.tensor,  # (tiles,) uint8
    tiles: tl.tensor,
    across: tl.tensor,  # number of tiles side by side
    SQUARES: tl.constexpr,
    PATTERNS: tl.constexpr,
    BLOCK: tl.constexpr,
    BANK: tl.constexpr,  # PATTERNS, rounded up to a power of two
) -> None:
    """See `masks.tile_codes`: for each 4×4 tile, the lowest code among the patterns with the best score."""
    tile = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = tile < tiles
    corner = (tile // across) * 16 * across + (tile % across) * 4
    pattern = tl.arange(0, BANK)
    score = tl.zeros((BANK, BLOCK), bank.dtype.element_ty)
    for entry in tl.static_range(16):
        value = tl.load(weight + corner + (entry // 4) * 4 * across + entry % 4, mask=inside, other=0.0)
        value = value.to(bank.dtype.element_ty)
        value = value * value if SQUARES else tl.abs(value)
        member = tl.load(bank + pattern * 16 + entry, mask=pattern < PATTERNS, other=0.0)
        score += member[:, None] * value[None, :]
    score = tl.where((pattern < PATTERNS)[:, None], score, -1.0)
    best = tl.max(score, 0)
    code = tl.min(tl.where(score == best[None, :], pattern[:, None], PATTERNS - 1), 0)
    tl.store(codes + tile, code.to(tl.uint8), mask=inside)


@triton.jit
def mixed(x: tl.tensor) -> tl.tensor:
    """The bijection of uint32 that `mvue._mixed` computes with signed integers."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def mvue_kernel(
    x: tl.tensor,  # (rows, columns)
    estimate: tl.tensor,  # (rows, columns)
    key: tl.tensor,  # (2,) int32
    rows: tl.tensor,
    columns: tl.tensor,
    first: tl.tensor,
    x_row: tl.tensor,  # strides
    x_column: tl.tensor,
    estimate_row: tl.tensor,
    estimate_column: tl.tensor,
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """The same steps as `mvue.mvue`, for GROUPS groups of four rows and COLUMNS columns."""
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    row, inside = (group * 4).to(tl.int64), column < columns
    there = x + row * x_row + column.to(tl.int64) * x_column
    a = tl.load(there, mask=inside & (row < rows), other=0.0).to(tl.float32)
    b = tl.load(there + x_row, mask=inside & (row + 1 < rows), other=0.0).to(tl.float32)
    c = tl.load(there + 2 * x_row, mask=inside & (row + 2 < rows), other=0.0).to(tl.float32)
    d = tl.load(there + 3 * x_row, mask=inside & (row + 3 < rows), other=0.0).to(tl.float32)
    high, low = tl.maximum(tl.abs(a), tl.abs(b)), tl.minimum(tl.abs(a), tl.abs(b))
    higher, lower = tl.maximum(tl.abs(c), tl.abs(d)), tl.minimum(tl.abs(c), tl.abs(d))
    others = low + lower + tl.minimum(high, higher)
    total = others + tl.maximum(high, higher)
    unit = tl.maximum(tl.minimum(others, total / 2), 1.1754943508222875e-38)
    number = ((group + first) * columns + column).to(tl.uint32, bitcast=True)
    word = mixed(
        mixed(number ^ tl.load(key).to(tl.uint32, bitcast=True)) ^ tl.load(key + 1).to(tl.uint32, bitcast=True)
    )
    u = (word >> 8).to(tl.float32) * 5.960464477539063e-08
    reach_a = tl.minimum(tl.abs(a) / unit, 1.0)
    reach_b = reach_a + tl.minimum(tl.abs(b) / unit, 1.0)
    reach_c = reach_b + tl.minimum(tl.abs(c) / unit, 1.0)
    reach_d = reach_c + tl.minimum(tl.abs(d) / unit, 1.0)
    before_b = tl.minimum(tl.floor(reach_a + u), 1.0)
    before_c = tl.minimum(tl.floor(reach_b + u), 2.0)
    before_d = tl.minimum(tl.floor(reach_c + u), 2.0)
    all_four = tl.where(unit > 1.1754943508222875e-38, 2.0, tl.minimum(tl.floor(reach_d + u), 2.0))
    there = estimate + row * estimate_row + column.to(tl.int64) * estimate_column
    store(there, a, unit, before_b, inside & (row < rows))
    store(there + estimate_row, b, unit, before_c - before_b, inside & (row + 1 < rows))
    store(there + 2 * estimate_row, c, unit, before_d - before_c, inside & (row + 2 < rows))
    store(there + 3 * estimate_row, d, unit, all_four - before_d, inside & (row + 3 < rows))


@triton.jit
def store(where: tl.tensor, x: tl.tensor, unit: tl.tensor, crossed: tl.tensor, inside: tl.tensor) -> None:
    """Write the estimate of an entry: 0, or the entry divided by the probability of keeping it; NaN stays NaN."""
    magnitude = tl.maximum(tl.abs(x), unit) * tl.minimum(crossed, 1.0)
    tl.store(where, tl.where(x < 0, -magnitude, tl.where(x > 0, magnitude, x + 0.0)), mask=inside)


@triton.jit
def prune_kernel(
    weight: tl.tensor,  # (rows, columns)
    mask: tl.tensor,  # bits; (rows, columns / 8, rounded up)
    straight: tl.tensor,  # (rows, columns)
    transposed: tl.tensor,  # (columns, rows)
    rows: tl.tensor,
    columns: tl.tensor,
    weight_row: tl.tensor,  # stride of a row
    mask_row: tl.tensor,
    STRAIGHT: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write one square tile of the masked weight, of its transpose, or of both."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    value = tl.load(weight + row * weight_row + column, mask=inside, other=0.0)
    byte = tl.load(mask + row * mask_row + column // 8, mask=inside, other=0).to(tl.int32)
    bit = ((byte >> (column % 8).to(tl.int32)) & 1) != 0
    if STRAIGHT:
        masked = tl.where(bit, value, 0.0).to(straight.dtype.element_ty)
        tl.store(straight + row * columns + column, masked, mask=inside)
    if TRANSPOSED:
        masked = tl.where(bit, value, 0.0).to(transposed.dtype.element_ty)
        tl.store(transposed + column * rows + row, masked, mask=inside)


@triton.jit
def shrink_kernel(
    weight: tl.tensor,  # (4 groups,)
    scale: tl.tensor,  # (1,)
    shrunk: tl.tensor,  # (4 groups,)
    groups: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Compute `scale` times `product.shrink` of each group of four weights."""
    group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = group < groups
    a = tl.load(weight + 4 * group, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(weight + 4 * group + 1, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(weight + 4 * group + 2, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(weight + 4 * group + 3, mask=inside, other=0.0).to(tl.float32)
    lower = tl.maximum(tl.minimum(tl.abs(a), tl.abs(b)), tl.minimum(tl.abs(c), tl.abs(d)))
    upper = tl.minimum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))
    third = tl.minimum(lower, upper)
    by = tl.load(scale).to(tl.float32)
    store_left(shrunk + 4 * group, a, third, by, inside)
    store_left(shrunk + 4 * group + 1, b, third, by, inside)
    store_left(shrunk + 4 * group + 2, c, third, by, inside)
    store_left(shrunk + 4 * group + 3, d, third, by, inside)


@triton.jit
def store_left(where: tl.tensor, x: tl.tensor, third: tl.tensor, by: tl.tensor, inside: tl.tensor) -> None:
    """Shrink an entry by `third`, multiply it by `by`, and write it."""
    shrunk = (x - tl.minimum(tl.maximum(x, -third), third)) * by
    tl.store(where, shrunk.to(where.dtype.element_ty), mask=inside)
