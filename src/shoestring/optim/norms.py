"""Norms of many whole tensors at once: sharded ones by one small exchange, replicated ones shared out if wanted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from shoestring._torch import foreach_norm


def local(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradient(tensor: Tensor) -> Tensor:
    """This rank's part of the tensor's gradient, which must not be None."""
    assert tensor.grad is not None
    return local(tensor.grad)


def part_of(whole: Tensor, part: Tensor) -> Tensor:
    """The tensor that has `part` where this rank has its part of `whole`."""
    if not isinstance(whole, DTensor):
        return part
    mesh, placements = whole.device_mesh, whole.placements
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def norms(tensors: Sequence[Tensor], sharers: dist.ProcessGroup | None = None) -> Tensor:
    """Norms of whole tensors.

    Args:
        tensors: n of them, on one device; a DTensor stands for the whole tensor of which this rank has a part.
        sharers: ranks that hold the same plain tensors: each computes the norms of its share, and all add up what
            they have. A collective then.

    Returns:
        (n,) of float32 on the tensors' device; float64 for those of float64.
    """
    parts = [local(each) for each in tensors]
    wide = torch.float64 if parts[0].dtype is torch.float64 else torch.float32
    found = torch.zeros(len(parts), dtype=wide, device=parts[0].device)
    mine = list(range(len(parts)))
    if sharers is not None:
        mine = shares([each.numel() for each in parts], dist.get_world_size(sharers))[dist.get_rank(sharers)]
    if mine:
        squares = torch.stack(foreach_norm([parts[index] for index in mine], 2, dtype=wide)).square()
        found[_at(mine, found)] = squares
    if sharers is not None:
        dist.all_reduce(found, group=sharers)
    for (mesh, dim), indices in _sharded(tensors).items():
        partial = found[_at(indices, found)]
        dist.all_reduce(partial, group=mesh.get_group(dim))
        found[_at(indices, found)] = partial
    return found.sqrt()


def _at(indices: list[int], like: Tensor) -> Tensor:
    return torch.tensor(indices, device=like.device)


def _sharded(tensors: Sequence[Tensor]) -> dict[tuple[Any, int], list[int]]:
    """(mesh, its dimension) -> the tensors that are split along it."""
    found: dict[tuple[Any, int], list[int]] = {}
    for index, each in enumerate(tensors):
        if isinstance(each, DTensor):
            for dim, placement in enumerate(each.placements):
                if isinstance(placement, Shard):
                    found.setdefault((each.device_mesh, dim), []).append(index)
    return found


def shares(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """The tensors of each rank: the largest first, each to the rank with the fewest elements so far."""
    found: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        rank = loads.index(min(loads))
        found[rank].append(index)
        loads[rank] += sizes[index]
    return [sorted(share) for share in found]
