"""Local shards of parameters, and the broadcast by which all ranks start from the same weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shoestring.comm.exchange.wire import naming_failures


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def broadcast_weights(tensors: Iterable[Tensor], group: dist.ProcessGroup | None) -> None:
    """Broadcast the first rank's weights, because the mean of differently initialised replicas is useless."""
    if group is None:
        return
    for tensor in tensors:
        shard = local_shard(tensor)
        dense = shard.contiguous()
        with naming_failures(f"broadcast of a weight of {tuple(tensor.shape)} when the exchange was attached"):
            dist.broadcast(dense, group=group, group_src=0)
        if dense is not shard:
            shard.copy_(dense)
