"""Triton kernels of `lowrank`. Import this module only if Triton is installed.

A launch computes one product for each of several matrices of one shape; the grid's last axis indexes the matrices.
`table` (matrices, 2), int64, holds the addresses of g and e of each matrix, both (n, m). P (matrices, n, r) and Qᵀ
(matrices, r, m) are stacks of matrices. All tensors are contiguous; g has the data type TYPE, the others fp32. ALIGNED
means that all addresses are multiples of 16 bytes. R is r rounded up to a power of 2, and for tl.dot to at least 16.
Products are computed in fp32, not in tf32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find(table: tl.tensor, column: tl.constexpr, TYPE: tl.constexpr, ALIGNED: tl.constexpr) -> tl.tensor:
    """Address of g (column 0) or e (column 1) of this program's matrix."""
    begin = tl.load(table + 2 * tl.program_id(2) + column).to(tl.pointer_type(TYPE))
    if ALIGNED:
        begin = tl.multiple_of(begin, 16)  # without this hint, every entry is loaded separately
    return begin


@triton.jit
def block(x: tl.tensor, rows: tl.tensor, cols: tl.tensor, n: tl.tensor, m: tl.tensor) -> tl.tensor:
    """Load a block of rows and columns of a matrix (n, m), as fp32, with zeros beyond the edges."""
    at, inside = rows[:, None].to(tl.int64) * m + cols[None, :], (rows[:, None] < n) & (cols[None, :] < m)
    return tl.load(x + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def right(
    table: tl.tensor,
    Qt: tl.tensor,
    out: tl.tensor,  # (matrices, splits, n, r), fp32: M Q is the sum over the splits
    n: tl.tensor,
    m: tl.tensor,
    r: tl.tensor,
    STEPS: tl.constexpr,  # steps per split, of BM columns each
    R: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    """Compute M Q for M = g + e; each program computes a block of rows from a chunk of columns."""
    matrix = tl.program_id(2).to(tl.int64)
    g, e = find(table, 0, TYPE, ALIGNED), find(table, 1, tl.float32, ALIGNED)
    Qt += matrix * r * m
    rows, ranks, split = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, R), tl.program_id(1)
    THIN: tl.constexpr = R < 16  # if true, products are elementwise, and summed in separate registers until the end
    acc = tl.zeros([BN, R, BM] if THIN else [BN, R], tl.float32)
    for step in range(STEPS):
        cols = (split * STEPS + step) * BM + tl.arange(0, BM)
        M = block(g, rows, cols, n, m) + block(e, rows, cols, n, m)
        q = block(Qt, ranks, cols, r, m)
        if THIN:
            acc += M[:, None, :] * q[None, :, :]
        else:
            acc += tl.dot(M, tl.trans(q), input_precision="ieee")
    if THIN:
        total = tl.sum(acc, 2)
    else:
        total = acc
    place = ((matrix * tl.num_programs(1) + split) * n + rows[:, None]) * r + ranks[None, :]
    tl.store(out + place, total, mask=(rows[:, None] < n) & (ranks[None, :] < r))


@triton.jit
def left(
    table: tl.tensor,
    P: tl.tensor,
    out: tl.tensor,  # (matrices, splits, r, m), fp32: Pᵀ M is the sum over the splits
    n: tl.tensor,
    m: tl.tensor,
    r: tl.tensor,
    STEPS: tl.constexpr,  # steps per split; a step has BN rows
    R: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    """Compute Pᵀ M for M = g + e; each program computes a block of columns from a chunk of rows."""
    matrix = tl.program_id(2).to(tl.int64)
    g, e = find(table, 0, TYPE, ALIGNED), find(table, 1, tl.float32, ALIGNED)
    P += matrix * n * r
    cols, ranks, split = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, R), tl.program_id(1)
    acc = tl.zeros([R, BM], tl.float32)
    for step in range(STEPS):
        rows = (split * STEPS + step) * BN + tl.arange(0, BN)
        M = block(g, rows, cols, n, m) + block(e, rows, cols, n, m)
        acc += tl.dot(tl.trans(block(P, rows, ranks, n, r)), M, input_precision="ieee")
    place = ((matrix * tl.num_programs(1) + split) * r + ranks[:, None]) * m + cols[None, :]
    tl.store(out + place, acc, mask=(ranks[:, None] < r) & (cols[None, :] < m))


@triton.jit
def outer(
    table: tl.tensor,
    P: tl.tensor,
    Qt: tl.tensor,
    n: tl.tensor,
    m: tl.tensor,
    r: tl.tensor,
    LEAVE: tl.constexpr,
    R: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    """Set e to g + e - P Qᵀ if LEAVE, else g to P Qᵀ; each program computes a block of rows and columns."""
    matrix = tl.program_id(2).to(tl.int64)
    g, e = find(table, 0, TYPE, ALIGNED), find(table, 1, tl.float32, ALIGNED)
    P += matrix * n * r
    Qt += matrix * r * m
    across = (m + BM - 1) // BM
    place = tl.program_id(0)
    rows, cols = (place // across) * BN + tl.arange(0, BN), (place % across) * BM + tl.arange(0, BM)
    ranks = tl.arange(0, R)
    product = tl.dot(block(P, rows, ranks, n, r), block(Qt, ranks, cols, r, m), input_precision="ieee")
    at, inside = rows[:, None].to(tl.int64) * m + cols[None, :], (rows[:, None] < n) & (cols[None, :] < m)
    if LEAVE:
        M = block(g, rows, cols, n, m) + block(e, rows, cols, n, m)
        tl.store(e + at, M - product, mask=inside)
    else:
        tl.store(g + at, product.to(TYPE), mask=inside)
