"""The kernel of `fused`, for devices that Triton compiles for. Import it only where Triton is installed."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def split(
    g: tl.tensor,  # (n,) in: gradients; out: the remainder
    e: tl.tensor,  # (n,) residual
    u: tl.tensor,  # (n,) velocity, read where MOMENTUM is true
    threshold: tl.tensor,  # (1,)
    n: tl.tensor,
    scale: tl.tensor,
    momentum: tl.tensor,
    room: tl.tensor,
    indices: tl.tensor,  # (room,) int64
    values: tl.tensor,  # (room,)
    count: tl.tensor,  # (1,) int32, zero: becomes the number of entries over the threshold
    poison: tl.tensor,  # (blocks,) becomes 0, or NaN where an entry of the block is not finite
    MOMENTUM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """M = scale g + e + momentum u; move its entries above the threshold to `indices` and `values`.

    Blocks take places there in any order. Entries that find no place stay in `g`.
    """
    block = tl.program_id(0)
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    M = tl.load(g + at, mask=inside, other=0.0) * scale + tl.load(e + at, mask=inside, other=0.0)
    if MOMENTUM:
        M += tl.load(u + at, mask=inside, other=0.0) * momentum
    hit = (tl.abs(M) > tl.load(threshold)) & inside
    place = tl.atomic_add(count, tl.sum(hit.to(tl.int32), 0)) + tl.cumsum(hit.to(tl.int32), 0) - 1
    moved = hit & (place < room)
    tl.store(indices + place, at, mask=moved)
    tl.store(values + place, M, mask=moved)
    tl.store(g + at, tl.where(moved, 0.0, M), mask=inside)
    tl.store(poison + block, tl.sum(M * 0.0, 0))
