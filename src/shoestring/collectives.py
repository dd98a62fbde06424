"""Collectives for bytes and for tensors of any data type, which are sent as bytes because Gloo supports few types."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

HEAD = 1 << 10  # bytes of each rank's data that the first round of `gather_bytes` sends along with the length
GLOO = frozenset({
    torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.complex64, torch.complex128,
})  # fmt: skip
"""Data types that Gloo supports; it refuses int16, unsigned types of 16 bits and more, and 8-bit floats."""


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor as uint8 (n,): a view if the tensor is contiguous, otherwise a copy."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[Tensor], group: dist.ProcessGroup | None) -> None:
    """Broadcast tensors in place from the group's first rank (a collective); does nothing if `group` is None."""
    if group is None:
        return
    for tensor in tensors:
        if tensor.numel():
            content = bytes_of(tensor)
            dist.broadcast(content, group=group, group_src=0)
            if not tensor.is_contiguous():
                tensor.copy_(content.view(tensor.dtype).view(tensor.shape))


def gather_bytes(data: bytes, size: int, device: torch.device, group: Any = None) -> list[bytes]:
    """All-gather bytes of any length over `size` ranks; takes a second round if a rank has more than `HEAD` bytes."""
    heads = _gathered(len(data).to_bytes(8, "little") + data[:HEAD], 8 + HEAD, size, device, group)
    lengths = [int.from_bytes(head[:8], "little") for head in heads]
    longest = max(lengths)
    whole = [head[8:] for head in heads] if longest <= HEAD else _gathered(data, longest, size, device, group)
    return [content[:length] for content, length in zip(whole, lengths, strict=True)]


def broadcast_bytes(data: bytes, source: int, device: torch.device) -> bytes:
    """Broadcast bytes of any length from rank `source`; the `data` of other ranks is ignored."""
    is_source = dist.get_rank() == source
    length = torch.tensor([len(data) if is_source else 0], device=device)
    dist.broadcast(length, source)
    content = _tensor(data, device) if is_source else torch.empty(int(length), dtype=torch.uint8, device=device)
    if len(content):
        dist.broadcast(content, source)
    return content.cpu().numpy().tobytes()


def _gathered(data: bytes, width: int, size: int, device: torch.device, group: Any) -> list[bytes]:
    own = _tensor(data.ljust(width, b"\0"), device)
    gathered = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(gathered, own, group=group)
    return [tensor.cpu().numpy().tobytes() for tensor in gathered]


def _tensor(data: bytes, device: torch.device) -> Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8, device=device)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
