"""Weights in huge pages, for decoding on a CPU: a core then reads them faster, by a quarter where it was measured.

Each token reads all weights, and a processor looks up the address of each page that it reads. Pages of 2 MiB instead
of 4 KiB make this rare. Tensors of a model lie one behind another in one piece of memory, because only whole huge pages
count, and a tensor of its own would begin and end in small ones.

Where free memory lies in small pieces, the system first moves others together, which took 2 ms a MiB where it was
measured: worth it for a server and for a conversation, not for one short text.
"""

from __future__ import annotations

import mmap
from collections import Counter
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn

HUGE = 2 << 20
"""Size of a huge page in bytes."""
_ALIGNED = 64
"""Bytes that the address of each tensor is a multiple of."""
_POLICY = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@torch.no_grad()
def settle(model: nn.Module) -> int:
    """Move the weights of a model that are in this process's memory to huge pages.

    Parameters and buffers stay the same objects, with other storage, so no program may hold views of them. Those that
    share their storage stay where they are. Peak memory is that of the model and of its largest tensor.

    Returns:
        Bytes moved; 0 if the weights are fewer than a huge page, or the system has no huge pages.
    """
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if _is_movable(tensor)]
    users = Counter(tensor.data_ptr() for tensor in tensors)
    tensors = [tensor for tensor in tensors if users[tensor.data_ptr()] == 1]
    total = sum(_padded(tensor) for tensor in tensors)
    if total < HUGE or not _are_offered():
        return 0
    try:
        memory = mmap.mmap(-1, total + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # own file: memory
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a limit of memory
        return 0
    arena = torch.frombuffer(memory, dtype=torch.uint8)  # holds the memory as long as a tensor is in it
    at = -arena.data_ptr() % HUGE
    for tensor in tensors:
        moved = arena[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        tensor.data = moved.copy_(tensor)
        at += _padded(tensor)
    return total


def _is_movable(tensor: Tensor) -> bool:
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu" and tensor.layout is torch.strided
    return plain and tensor.is_contiguous() and tensor.nbytes > 0 and tensor.untyped_storage().nbytes() == tensor.nbytes


def _padded(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNED) * _ALIGNED


def _are_offered() -> bool:
    """Whether the system gives huge pages to memory that asks for them."""
    with suppress(OSError):
        return hasattr(mmap, "MADV_HUGEPAGE") and "[never]" not in _POLICY.read_text()  # own file: the system's
    return False
