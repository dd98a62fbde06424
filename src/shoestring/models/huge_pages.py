"""Moves weights to huge pages, from which a CPU core reads them faster when decoding (measured: by a quarter).

Each token reads all weights, and the processor has to look up the address of every page. With pages of 2 MiB instead of
4 KiB, look-ups are rare. All tensors of a model are placed in one contiguous block of memory, because huge pages cannot
be split: a tensor in its own block would begin and end in small pages.

If free memory is fragmented, the system first has to compact it, which took 2 ms per MiB in a measurement. This is
worthwhile for a server or a conversation, but not for one short text.
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
"""Alignment of each tensor in bytes."""
_POLICY = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@torch.no_grad()
def settle(model: nn.Module) -> int:
    """Move the weights of a model that are in this process's memory to huge pages.

    Parameters and buffers stay the same objects, with other storage, so no program may hold views of them. Tensors that
    share their storage are not moved. Peak memory is the size of the model plus its largest tensor.

    Returns:
        Number of bytes moved; 0 if the weights are smaller than a huge page, or if the system offers no huge pages or
        not enough memory.
    """
    tensors = [
        tensor
        for tensor in (*model.parameters(), *model.buffers())
        if type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu" and tensor.layout is torch.strided
        if tensor.is_contiguous() and tensor.nbytes > 0 and tensor.untyped_storage().nbytes() == tensor.nbytes
    ]
    users = Counter(tensor.data_ptr() for tensor in tensors)
    tensors = [tensor for tensor in tensors if users[tensor.data_ptr()] == 1]
    total = sum(_padded(tensor) for tensor in tensors)
    offered = False  # whether the system provides huge pages to a process that requests them by `madvise`
    with suppress(OSError):
        offered = hasattr(mmap, "MADV_HUGEPAGE") and "[never]" not in _POLICY.read_text()  # own file: the system's
    if total < HUGE or not offered:
        return 0
    try:
        memory = mmap.mmap(-1, total + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # own file: memory
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a memory limit is exceeded
        return 0
    arena = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the memory as long as a tensor uses it
    at = -arena.data_ptr() % HUGE
    for tensor in tensors:
        moved = arena[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        tensor.data = moved.copy_(tensor)
        at += _padded(tensor)
    return total


def _padded(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNED) * _ALIGNED
