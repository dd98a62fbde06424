"""Sharded tensors, told apart without importing torch's DTensor, which takes half as long as importing torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_sharded(value: object) -> TypeIs[DTensor]:
    """Whether a value is a DTensor: there is none before torch's module of them has been imported, which another thread
    may be doing now."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor; a plain tensor is returned unchanged."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def placed_like(
    part: Tensor, whole: DTensor, shape: Sequence[int] | None = None, stride: Sequence[int] | None = None
) -> DTensor:
    """Wrap this rank's shard of a tensor that is placed as `whole` is; no communication.

    Args:
        shape: shape of the tensor, if not that of `whole`; `stride` belongs to it.
    """
    from torch.distributed.tensor import DTensor

    size = whole.shape if shape is None else torch.Size(shape)
    layout: dict[str, Any] = {"shape": size, "stride": whole.stride() if stride is None else tuple(stride)}
    return DTensor.from_local(part, whole.device_mesh, whole.placements, run_check=False, **layout)


def part_like(whole: Tensor, placed: DTensor) -> DTensor:
    """Place a tensor that every rank holds whole as `placed` is; no communication."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, placed.device_mesh, placed.placements, src_data_rank=None)


def shard_dims(tensor: DTensor) -> dict[int, int]:
    """Map each mesh axis over which a tensor is sharded to the dimension that it divides."""
    from torch.distributed.tensor import Shard

    return {axis: placement.dim for axis, placement in enumerate(tensor.placements) if isinstance(placement, Shard)}
