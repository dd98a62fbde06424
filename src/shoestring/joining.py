"""Joining the world that torchrun started this process in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from shoestring.core.errors import PeerError, WorldError
from shoestring.core.world import World, own_device
from shoestring.peers import Roll, meet


@contextmanager
def join(*, timeout: float = 600.0) -> Iterator[World]:
    """Join the world that torchrun started this process in (or be alone), and leave it at the end.

    Args:
        timeout: seconds a collective may wait for another rank before it fails instead of hanging.

    Raises:
        WorldError: there are more ranks than GPUs on this host, or not equally many on each.
        PeerError: the ranks do not find each other; inside the block, one of them or the way to it was lost.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield World(device=own_device(0))
        return
    size, local_rank = int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", 0))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    device = own_device(local_rank)
    if device.type == "cuda" and local_size > torch.cuda.device_count():
        raise WorldError(
            f"{local_size} workers on a host with {torch.cuda.device_count()} GPUs", hint="start one worker a GPU"
        )
    if size % local_size:
        raise WorldError(f"{size} ranks do not divide into hosts of {local_size}", hint="start as many on each host")
    if local_size == size:
        # Gloo would listen on the address the host name resolves to; ranks of one host need no more than loopback.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo"
    roll = _meet(timeout)
    with roll.explained():
        limit = timedelta(seconds=timeout)
        dist.init_process_group(backend, store=roll.store, rank=roll.rank, world_size=size, timeout=limit)
        try:
            yield World(roll.rank, size, local_rank, local_size, device)
        finally:
            dist.destroy_process_group()


def _meet(timeout: float) -> Roll:
    address = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", 0))
    try:
        store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
        return meet(store, address, rank, size, timeout)
    except (RuntimeError, ValueError) as error:
        raise PeerError(
            f"the ranks did not find each other at {address[0]}:{address[1]}: {str(error).splitlines()[0]}",
            hint="is that address right, and reached from this host?",
        ) from error
