"""The kernels of `fused` and `grad_table`, for devices that Triton compiles for. Import it only where it is installed.

`table` (4, tensors + 1) in int64 holds, of each tensor: its address, the number of its first entry in the flat vector,
its first block of BLOCK entries (behind the last tensor: the numbers of all entries and blocks), and the number of its
type, of which a launch processes one. A block has entries of one tensor only.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def last_upto(column: tl.tensor, at: tl.tensor, tensors: tl.tensor, DEPTH: tl.constexpr) -> tl.tensor:
    """The last tensor whose number in an ascending column of the table is not above `at`."""
    low, high = at * 0, at * 0 + tensors
    for _ in range(DEPTH):
        middle = (low + high) // 2
        below = tl.load(column + middle) <= at
        low, high = tl.where(below, middle, low), tl.where(below, high, middle)
    return low


@triton.jit
def read(start: tl.tensor, lane: tl.tensor, inside: tl.tensor, whole: tl.tensor, ALIGNED: tl.constexpr) -> tl.tensor:
    """Entries in fp32, zero outside. Where all are inside and addresses are aligned, 16 bytes are loaded at once."""
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
    """The inverse of `read`, of fp32."""
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
    M: tl.tensor,  # (n,) out; may be where the gradients lie
    e: tl.tensor,  # (n,) residual
    u: tl.tensor,  # (n,) velocity, read where MOMENTUM is true
    threshold: tl.tensor,  # (1,)
    scale: tl.tensor,
    momentum: tl.tensor,
    bits: tl.tensor,  # (blocks, BLOCK / 32) int32: of each entry, whether it is above the threshold
    counts: tl.tensor,  # (blocks,) int32: the numbers of those that are
    poison: tl.tensor,  # (blocks,) becomes 0, or NaN where an entry of the block is not finite
    tensors: tl.tensor,
    MOMENTUM: tl.constexpr,
    ALIGNED: tl.constexpr,
    KIND: tl.constexpr,
    TYPE: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """M = scale g + e + momentum u; mark its entries above the threshold."""
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
    bits: tl.tensor,  # (blocks, WORDS) int32, as `split` marks entries
    ends: tl.tensor,  # (blocks,) int64: the numbers of marks up to the end of each block
    indices: tl.tensor,  # (marks,) int64
    values: tl.tensor,  # (marks,)
    blocks: tl.tensor,
    tensors: tl.tensor,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
) -> None:
    """Ascending indices of the marked entries, and these; each step takes the lowest mark of every word."""
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
        index = first + ones((marks ^ (marks - 1)) >> 1).to(tl.int32)  # the zeros below the lowest one
        tl.store(indices + place, index, mask=some)
        tl.store(values + place, tl.load(M + index, mask=some, other=0.0), mask=some)
        place += 1
        marks = marks & (marks - 1)


@triton.jit
def sample(
    table: tl.tensor,
    e: tl.tensor,  # (n,)
    u: tl.tensor,  # (n,), read where MOMENTUM is true
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
    """Every stride-th entry of M = scale g + e + momentum u."""
    at, row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK), tensors + 1
    index = at * stride
    tensor = last_upto(table + row, index, tensors, DEPTH)
    mine = (at < count) & (tl.load(table + 3 * row + tensor) == KIND)
    g = tl.load(table + tensor).to(tl.pointer_type(TYPE)) + (index - tl.load(table + row + tensor))
    x = tl.load(g, mask=mine, other=0.0).to(tl.float32) * scale + tl.load(e + index, mask=mine, other=0.0)
    if MOMENTUM:
        x += tl.load(u + index, mask=mine, other=0.0) * momentum
    tl.store(out + at, x, mask=mine)


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
    """u = momentum u + g, or momentum (u + g)."""
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
    """g = the entries of `flat`, at `indices` alone."""
    at, row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK), tensors + 1
    there = at < count
    index = tl.load(indices + at, mask=there, other=0)
    tensor = last_upto(table + row, index, tensors, DEPTH)
    mine = there & (tl.load(table + 3 * row + tensor) == KIND)
    g = tl.load(table + tensor).to(tl.pointer_type(TYPE)) + (index - tl.load(table + row + tensor))
    tl.store(g, tl.load(flat + index, mask=mine, other=0.0).to(TYPE), mask=mine)
