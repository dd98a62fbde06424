"""The kernels of `lowrank`, for devices that Triton compiles for. Import it only where Triton is installed.

Matrices are contiguous: g and e (n, m), P (n, r), Qᵀ (r, m). All but g are fp32. R is r rounded up to a size that
tl.dot accepts, where it is used. Products are in fp32, not in tf32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def block(x: tl.tensor, rows: tl.tensor, cols: tl.tensor, n: tl.tensor, m: tl.tensor) -> tl.tensor:
    """Load some rows and columns of a matrix (n, m), in fp32; zero beyond its edges."""
    at, inside = rows[:, None].to(tl.int64) * m + cols[None, :], (rows[:, None] < n) & (cols[None, :] < m)
    return tl.load(x + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def right(
    g: tl.tensor,
    e: tl.tensor,
    Qt: tl.tensor,
    out: tl.tensor,  # (splits, n, r), fp32: M Q is their sum
    n: tl.tensor,
    m: tl.tensor,
    r: tl.tensor,
    STEPS: tl.constexpr,  # of BM columns each, in a split
    R: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
) -> None:
    """M Q for M = g + e; each program computes a block of rows from a chunk of columns."""
    rows, ranks, split = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, R), tl.program_id(1)
    THIN: tl.constexpr = R < 16  # elementwise products, each summed in its own register until the end
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
    place = (split.to(tl.int64) * n + rows[:, None]) * r + ranks[None, :]
    tl.store(out + place, total, mask=(rows[:, None] < n) & (ranks[None, :] < r))


@triton.jit
def left(
    g: tl.tensor,
    e: tl.tensor,
    P: tl.tensor,
    out: tl.tensor,  # (splits, r, m), fp32: Pᵀ M is their sum
    n: tl.tensor,
    m: tl.tensor,
    r: tl.tensor,
    STEPS: tl.constexpr,  # of BN rows each, in a split
    R: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
) -> None:
    """Pᵀ M for M = g + e; each program computes a block of columns from a chunk of rows."""
    cols, ranks, split = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, R), tl.program_id(1)
    acc = tl.zeros([R, BM], tl.float32)
    for step in range(STEPS):
        rows = (split * STEPS + step) * BN + tl.arange(0, BN)
        M = block(g, rows, cols, n, m) + block(e, rows, cols, n, m)
        acc += tl.dot(tl.trans(block(P, rows, ranks, n, r)), M, input_precision="ieee")
    place = (split.to(tl.int64) * r + ranks[:, None]) * m + cols[None, :]
    tl.store(out + place, acc, mask=(ranks[:, None] < r) & (cols[None, :] < m))


@triton.jit
def outer(
    g: tl.tensor,
    e: tl.tensor,
    P: tl.tensor,
    Qt: tl.tensor,
    n: tl.tensor,
    m: tl.tensor,
    r: tl.tensor,
    LEAVE: tl.constexpr,
    R: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
) -> None:
    """e = g + e - P Qᵀ where LEAVE is true, else g = P Qᵀ; each program computes a block of rows and columns."""
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
        tl.store(g + at, product.to(g.dtype.element_ty), mask=inside)
