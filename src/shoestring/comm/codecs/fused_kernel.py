"""Triton kernels of `fused` and `grad_table`. Import this module only if Triton is installed.

`table` (4, tensors + 1), int64, has a column for each tensor, with four rows: address of the tensor, index of its first
entry in the flat vector, index of its first block of BLOCK entries, and index of its data type. In the extra last
column, rows 1 and 2 hold the total numbers of entries and of blocks. A launch processes the tensors of one data type. A
block has entries of one tensor only.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def last_upto(column: tl.tensor, at: tl.tensor, tensors: tl.tensor, DEPTH: tl.constexpr) -> tl.tensor:
    """Find the last tensor whose value in an ascending column of the table is at most `at`, by binary search."""
    low, high = at * 0, at * 0 + tensors
    for _ in range(DEPTH):
        middle = (low + high) // 2
        below = tl.load(column + middle) <= at
        low, high = tl.where(below, middle, low), tl.where(below, high, middle)
    return low


@triton.jit
def read(start: tl.tensor, lane: tl.tensor, inside: tl.tensor, whole: tl.tensor, ALIGNED: tl.constexpr) -> tl.tensor:
    """Load entries as fp32, with zeros outside the tensor. If all entries are inside the tensor and addresses are
    aligned, each load instruction reads 16 bytes."""
    where = start + lane
    if ALIGNED:
        if whole:
            x = tl.load(tl.multiple_of(where, [1, 16])).to(tl.float32)
        else:
            x = tl.load(where, mask=inside, other=0.0).to(tl.float32)
    else:
        x = tl.load(where, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit
def write(
    start: tl.tensor, lane: tl.tensor, inside: tl.tensor, whole: tl.tensor, x: tl.tensor, ALIGNED: tl.constexpr
) -> None:
    """Store fp32 entries; the inverse of `read`."""
    where = start + lane
    if ALIGNED:
        if whole:
            tl.store(tl.multiple_of(where, [1, 16]), x)
        else:
            tl.store(where, x, mask=inside)
    else:
        tl.store(where, x, mask=inside)


@triton.jit
def ones(word: tl.tensor) -> tl.tensor:
    """The number of ones among 32 bits."""
    x = word - ((word >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    return (((x + (x >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24


@triton.jit
def split(
    table: tl.tensor,
    M: tl.tensor,  # (n,) output; may be the memory of the gradients
    e: tl.tensor,  # (n,) residual
    u: tl.tensor,  # (n,) velocity, read only if MOMENTUM
    threshold: tl.tensor,  # (1,)
    scale: tl.tensor,
    momentum: tl.tensor,
    bits: tl.tensor,  # (blocks, BLOCK / 32) int32: a bit for each entry, 1 above the threshold
    counts: tl.tensor,  # (blocks,) int32: number of entries above the threshold
    poison: tl.tensor,  # (blocks,) becomes 0, or NaN if an entry of the block is not finite
    tensors: tl.tensor,
    MOMENTUM: tl.constexpr,
    ALIGNED: tl.constexpr,
    KIND: tl.constexpr,
    TYPE: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Compute M = scale g + e + momentum u, and mark the entries of M above the threshold."""
    block, row = tl.program_id(0).to(tl.int64), tensors + 1
    tensor = last_upto(table + 2 * row, block, tensors, DEPTH)
    if tl.load(table + 3 * row + tensor) == KIND:
        begin = (block - tl.load(table + 2 * row + tensor)) * BLOCK
        start = tl.load(table + row + tensor) + begin
        left = tl.load(table + row + tensor + 1) - start
        word, bit = tl.arange(0, BLOCK // 32), tl.arange(0, 32)
        lane = word[:, None] * 32 + bit[None, :]
        inside, whole = lane < left, left >= BLOCK
        g = tl.load(table + tensor).to(tl.pointer_type(TYPE)) + begin
        x = read(g, lane, inside, whole, ALIGNED) * scale + read(e + start, lane, inside, whole, ALIGNED)
        if MOMENTUM:
            x += read(u + start, lane, inside, whole, ALIGNED) * momentum
        write(M + start, lane, inside, whole, x, ALIGNED)
        hit = ((tl.abs(x) > tl.load(threshold)) & inside).to(tl.int32)
        tl.store(bits + block * (BLOCK // 32) + word, tl.sum(hit << bit[None, :], 1))
        tl.store(counts + block, tl.sum(tl.sum(hit, 1), 0))
        tl.store(poison + block, tl.sum(tl.sum(x * 0.0, 1), 0))


@triton.jit
def collect(
    table: tl.tensor,
    M: tl.tensor,  # (n,)
    bits: tl.tensor,  # (blocks, WORDS) int32, from `split`
    ends: tl.tensor,  # (blocks,) int64: number of marks up to the end of each block
    indices: tl.tensor,  # (marks,) int64
    values: tl.tensor,  # (marks,)
    blocks: tl.tensor,
    tensors: tl.tensor,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
) -> None:
    """Collect the marked entries and their ascending indices; each iteration takes the lowest remaining mark of every
    32-bit word."""
    b, row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tensors + 1
    there, word = b < blocks, tl.arange(0, WORDS)
    tensor = last_upto(table + 2 * row, b, tensors, DEPTH)
    start = tl.load(table + row + tensor) + (b - tl.load(table + 2 * row + tensor)) * (WORDS * 32)
    marks = tl.load(bits + b[:, None] * WORDS + word[None, :], mask=there[:, None], other=0).to(tl.uint32, bitcast=True)
    count = ones(marks).to(tl.int32)
    before = tl.load(ends + b, mask=there, other=0) - tl.sum(count, 1)
    place = before[:, None] + tl.cumsum(count, 1) - count
    first = start[:, None] + word[None, :] * 32
    while tl.sum(tl.sum((marks != 0).to(tl.int32), 1), 0) > 0:
        some = marks != 0
        index = first + ones((marks ^ (marks - 1)) >> 1).to(tl.int32)  # `ones` counts the zeros below the lowest mark
        tl.store(indices + place, index, mask=some)
        tl.store(values + place, tl.load(M + index, mask=some, other=0.0), mask=some)
        place += 1
        marks = marks & (marks - 1)


@triton.jit
def sample(
    table: tl.tensor,
    e: tl.tensor,  # (n,)
    u: tl.tensor,  # (n,), read only if MOMENTUM
    out: tl.tensor,  # (count,)
    count: tl.tensor,
    stride: tl.tensor,
    scale: tl.tensor,
    momentum: tl.tensor,
    tensors: tl.tensor,
    MOMENTUM: tl.constexpr,
    KIND: tl.constexpr,
    TYPE: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Compute every stride-th entry of M = scale g + e + momentum u."""
    at, row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK), tensors + 1
    index = at * stride
    tensor = last_upto(table + row, index, tensors, DEPTH)
    handled = (at < count) & (tl.load(table + 3 * row + tensor) == KIND)
    g = tl.load(table + tensor).to(tl.pointer_type(TYPE)) + (index - tl.load(table + row + tensor))
    x = tl.load(g, mask=handled, other=0.0).to(tl.float32) * scale + tl.load(e + index, mask=handled, other=0.0)
    if MOMENTUM:
        x += tl.load(u + index, mask=handled, other=0.0) * momentum
    tl.store(out + at, x, mask=handled)


@triton.jit
def accelerate(
    table: tl.tensor,
    u: tl.tensor,  # (n,)
    momentum: tl.tensor,
    tensors: tl.tensor,
    NESTEROV: tl.constexpr,
    ALIGNED: tl.constexpr,
    KIND: tl.constexpr,
    TYPE: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Set u to momentum u + g, or to momentum (u + g) if NESTEROV."""
    block, row = tl.program_id(0).to(tl.int64), tensors + 1
    tensor = last_upto(table + 2 * row, block, tensors, DEPTH)
    if tl.load(table + 3 * row + tensor) == KIND:
        begin = (block - tl.load(table + 2 * row + tensor)) * BLOCK
        start = tl.load(table + row + tensor) + begin
        left = tl.load(table + row + tensor + 1) - start
        lane = tl.arange(0, BLOCK // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
        inside, whole = lane < left, left >= BLOCK
        g = read(tl.load(table + tensor).to(tl.pointer_type(TYPE)) + begin, lane, inside, whole, ALIGNED)
        x = read(u + start, lane, inside, whole, ALIGNED)
        if NESTEROV:
            x = (x + g) * momentum
        else:
            x = x * momentum + g
        write(u + start, lane, inside, whole, x, ALIGNED)


@triton.jit
def scatter(
    table: tl.tensor,
    flat: tl.tensor,  # (n,)
    indices: tl.tensor,  # (count,) int64, in any order
    count: tl.tensor,
    tensors: tl.tensor,
    KIND: tl.constexpr,
    TYPE: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Copy the entries of `flat` at `indices` into the gradients; leave all other entries unchanged."""
    at, row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK), tensors + 1
    there = at < count
    index = tl.load(indices + at, mask=there, other=0)
    tensor = last_upto(table + row, index, tensors, DEPTH)
    handled = there & (tl.load(table + 3 * row + tensor) == KIND)
    g = tl.load(table + tensor).to(tl.pointer_type(TYPE)) + (index - tl.load(table + row + tensor))
    tl.store(g, tl.load(flat + index, mask=handled, other=0.0).to(TYPE), mask=handled)
