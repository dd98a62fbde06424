"""Host memory of exact size that a GPU copies from and to without waiting.

Torch's allocator of pinned memory rounds each block up to a power of two, up to 1.8 times of what is needed.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor

from shoestring.core.errors import WorldError

ALIGNMENT = 64  # bytes: of a cache line


class HostRegion:
    """One anonymous mapping, out of which tensors are cut; pinned where the device is a GPU. Close it after use."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes, self.used = max(nbytes, 1), 0
        self.mapping = mmap.mmap(-1, self.nbytes)
        self.bytes = torch.frombuffer(self.mapping, dtype=torch.uint8)
        self.pinned = device.type == "cuda"
        if self.pinned and int(_cudart().cudaHostRegister(self.bytes.data_ptr(), self.nbytes, 0)):
            raise WorldError(
                f"{self.nbytes / 2**30:.2f} GiB of host memory could not be pinned",
                hint="raise the limit of locked memory (ulimit -l), or offload on a host with more memory",
            )

    def take(self, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
        """The next tensor, with undefined content."""
        shape = tuple(shape)
        first, length = self.used, prod(shape) * dtype.itemsize
        self.used += aligned(length)
        return self.bytes[first : first + length].view(dtype).view(shape)

    def close(self) -> None:
        """Unpin the memory; it is freed with the last tensor in it."""
        if self.pinned:
            _cudart().cudaHostUnregister(self.bytes.data_ptr())
            self.pinned = False


def aligned(nbytes: int) -> int:
    """A number of bytes rounded up to whole cache lines."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _cudart() -> Any:
    """CUDA's runtime."""
    return torch.cuda.cudart()
