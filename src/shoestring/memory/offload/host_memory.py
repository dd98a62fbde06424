"""Pinned host memory of exact size, for a GPU's asynchronous copies.

Torch's own allocator of pinned memory rounds each block up to a power of two, which took up to 1.8 times the memory.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor

from shoestring import figures
from shoestring.core.errors import WorldError

ALIGNMENT = 64  # bytes: a cache line


class HostRegion:
    """An anonymous memory mapping that holds tensors, pinned if the device is a GPU. Must be closed after use."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes, self.used = max(nbytes, 1), 0
        self.mapping = mmap.mmap(-1, self.nbytes)
        self.bytes = torch.frombuffer(self.mapping, dtype=torch.uint8)
        self.pinned = device.type == "cuda"
        if self.pinned and int(_cudart().cudaHostRegister(self.bytes.data_ptr(), self.nbytes, 0)):
            raise WorldError(
                f"{figures.memory(self.nbytes)} of host memory could not be pinned",
                hint="raise the limit of locked memory (ulimit -l), or offload on a host with more memory",
            )

    def take(self, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
        """Take the next tensor from the region; its content is undefined."""
        shape = tuple(shape)
        first, length = self.used, prod(shape) * dtype.itemsize
        self.used += aligned(length)
        return self.bytes[first : first + length].view(dtype).view(shape)

    def close(self) -> None:
        """Unpin the memory, which is freed together with the last tensor in it."""
        if self.pinned:
            _cudart().cudaHostUnregister(self.bytes.data_ptr())
            self.pinned = False


def aligned(nbytes: int) -> int:
    """Round a number of bytes up to whole cache lines."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _cudart() -> Any:
    """The functions of the CUDA runtime."""
    return torch.cuda.cudart()
