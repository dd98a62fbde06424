"""Broadcasts the first rank's weights, so that all ranks have the same initial weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor

from shoestring.collectives import broadcast_tensors
from shoestring.comm.exchange.wire import naming_failures
from shoestring.sharded import local_part


def broadcast_weights(tensors: Iterable[Tensor], group: dist.ProcessGroup | None) -> None:
    """Broadcast the first rank's weights, because averaging differently initialised replicas makes no sense."""
    for tensor in tensors:
        with naming_failures(f"broadcast of a weight of {tuple(tensor.shape)} when the exchange was attached"):
            broadcast_tensors([local_part(tensor)], group)
