"""Ranks that begin with the same weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shoestring.comm.exchange.wire import naming


def local(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def begin_equal(tensors: Iterable[Tensor], group: dist.ProcessGroup | None) -> None:
    """Give all ranks of the group the first one's: weights of different draws have no mean worth having."""
    if group is None:
        return
    for tensor in tensors:
        mine = local(tensor)
        dense = mine.contiguous()
        with naming(f"broadcast of a weight of {tuple(tensor.shape)} when the exchange was attached"):
            dist.broadcast(dense, group=group, group_src=0)
        if dense is not mine:
            mine.copy_(dense)
