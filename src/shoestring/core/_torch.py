"""Every private import from torch, in one place, so that a new version of torch is checked in one place.

Checked with torch 2.11 to 2.13.
"""

from __future__ import annotations

import torch
from torch._C._distributed_c10d import Store, TCPStore

foreach_mul_ = torch._foreach_mul_  # pyright: ignore[reportPrivateImportUsage]
"""(tensors, scalar or 0-d tensor): multiply each in place, in one kernel where the device has one."""


def has_bf16_units() -> bool:
    """Whether this CPU multiplies bf16 in hardware (AMX or AVX512-BF16)."""
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


__all__ = ["Store", "TCPStore", "foreach_mul_", "has_bf16_units"]
