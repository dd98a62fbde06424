"""Computes norms of many tensors at once, and divides tensors among ranks.

The norms of tensors sharded over one mesh axis take one small all-reduce. If ranks hold the same tensors, each rank can
compute some of the norms and send them to the other ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoestring._torch import foreach_norm
from shoestring.sharded import is_sharded, local_part, placed_like

if TYPE_CHECKING:
    from shoestring.core.attachments import Attachments


def local_gradient(tensor: Tensor) -> Tensor:
    """This rank's shard of the tensor's gradient, which must not be None."""
    assert tensor.grad is not None
    return local_part(tensor.grad)


def part_of(whole: Tensor, part: Tensor) -> Tensor:
    """Wrap this rank's shard `part` as a DTensor that is sharded like `whole`; if `whole` is a plain tensor, return
    `part` unchanged."""
    if not is_sharded(whole):
        return part
    return placed_like(part, whole)


def norms(tensors: Sequence[Tensor], sharers: dist.ProcessGroup | None = None) -> Tensor:
    """Compute the 2-norms of n tensors. The call is a collective if any tensor is a DTensor or `sharers` is not None.

    Args:
        tensors: tensors on one device. The norm of a DTensor is the norm of the whole tensor, not of the shard.
        sharers: process group whose ranks hold the same plain tensors (from the function `sharers`). Each rank computes
            the norms of its share of the plain tensors, and an all-reduce exchanges the norms.

    Returns:
        The norms, with shape (n,), on the tensors' device; in float64 if the first tensor is float64, else in float32.
    """
    parts = [local_part(tensor) for tensor in tensors]
    wide = torch.float64 if parts[0].dtype is torch.float64 else torch.float32
    squares = torch.zeros(len(parts), dtype=wide, device=parts[0].device)
    own = list(range(len(parts)))
    plain = [index for index, tensor in enumerate(tensors) if not is_sharded(tensor)]
    if sharers is not None and plain:
        sizes = [parts[index].numel() for index in plain]
        share = {plain[index] for index in shares(sizes, sharers.size())[dist.get_rank(sharers)]}
        own = [index for index in own if index in share or is_sharded(tensors[index])]
    if own:
        squares[_at(own, squares)] = torch.stack(foreach_norm([parts[index] for index in own], 2, dtype=wide)).square()
    if sharers is not None and plain:  # on this rank, the squares that other ranks compute are still zero
        shared = squares[_at(plain, squares)]
        dist.all_reduce(shared, group=sharers)
        squares[_at(plain, squares)] = shared
    for (mesh, dim), indices in _sharded(tensors).items():
        partial = squares[_at(indices, squares)]
        dist.all_reduce(partial, group=mesh.get_group(dim))
        squares[_at(indices, squares)] = partial
    return squares.sqrt()


def global_norm(attachments: Attachments, tensors: Mapping[str, Tensor]) -> Tensor:
    """Compute the global 2-norm, a 0-d tensor, of one tensor per trained parameter, such as the gradients. A
    collective.

    Args:
        tensors: maps names of trained parameters to tensors that are sharded like the parameters.
    """
    if tensors:
        squares = norms(list(tensors.values())).square()
    else:
        squares = torch.zeros(0, device=attachments.world.device)
    return attachments.total(squares, list(tensors)).sqrt()


def sharers(attachments: Attachments) -> dist.ProcessGroup | None:
    """Return the process group over which gradients are averaged and whose ranks hold the same plain tensors; None if
    the group has only one rank or all tensors are DTensors.

    The group is not used for DTensors: the mesh of a DTensor says which rank holds which shard.
    """
    plain = any(not is_sharded(tensor) for tensor in attachments.trained.values())
    return attachments.world.group(attachments.alike) if plain else None


def _at(indices: list[int], like: Tensor) -> Tensor:
    return torch.tensor(indices, device=like.device)


def _sharded(tensors: Sequence[Tensor]) -> dict[tuple[Any, int], list[int]]:
    """Map each (mesh, mesh dimension) to the indices of the tensors that are sharded along this dimension."""
    axes: dict[tuple[Any, int], list[int]] = {}
    for index, tensor in enumerate(tensors):
        if is_sharded(tensor):
            for dim, placement in enumerate(tensor.placements):
                if not placement.is_replicate():
                    axes.setdefault((tensor.device_mesh, dim), []).append(index)
    return axes


def shares(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Divide tensors among ranks: in order of decreasing size, each tensor goes to the rank with the smallest load so
    far.

    Returns:
        The indices of each rank's tensors, in ascending order.
    """
    indices: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        rank = loads.index(min(loads))
        indices[rank].append(index)
        loads[rank] += sizes[index]
    return [sorted(share) for share in indices]
