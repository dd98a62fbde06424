"""The Triton kernel of `ExchangeVerdict.spoil`. Import this module only if Triton is installed."""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 2**14  # entries per program


@triton.jit
def spoil(
    flat: tl.tensor,  # (n,), any floating-point type
    fine: tl.tensor,  # (1,) uint8
    n: tl.tensor,
) -> None:
    """Fill `flat` with NaN if `fine` is 0."""
    if tl.load(fine) == 0:
        at = tl.program_id(0).to(tl.int64) * 16384 + tl.arange(0, 16384)
        tl.store(flat + at, tl.full([16384], float("nan"), tl.float32).to(flat.dtype.element_ty), mask=at < n)
