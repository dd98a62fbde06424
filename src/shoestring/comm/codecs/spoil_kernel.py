"""The kernel of `ExchangeVerdict.spoil`; import it only where Triton is installed."""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 2**14  # entries that one program writes, if it does


@triton.jit
def spoil(
    flat: tl.tensor,  # (n,), of any data type of floats
    fine: tl.tensor,  # (1,) uint8
    n: tl.tensor,
) -> None:
    """Write NaN everywhere unless all is fine."""
    if tl.load(fine) == 0:
        at = tl.program_id(0).to(tl.int64) * 16384 + tl.arange(0, 16384)
        tl.store(flat + at, tl.full([16384], float("nan"), tl.float32).to(flat.dtype.element_ty), mask=at < n)
