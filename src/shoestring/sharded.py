"""Recognises and makes sharded tensors (DTensor); imports DTensor only to make one, as the import takes long."""

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
    """Whether a value is a DTensor; False before `torch.distributed.tensor` has been imported completely (another
    thread may be importing it now), because no DTensor exists before. Importing the module here would take half as long
    as importing torch."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor; a plain tensor is returned unchanged."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def placed_like(
    part: Tensor, whole: DTensor, shape: Sequence[int] | None = None, stride: Sequence[int] | None = None
) -> DTensor:
    """Wrap this rank's shard as a DTensor with the mesh and placements of `whole`; no communication.

    Args:
        shape: shape of the whole tensor; defaults to the shape of `whole`.
        stride: stride of the whole tensor; must be passed together with `shape`.
    """
    from torch.distributed.tensor import DTensor

    size = whole.shape if shape is None else torch.Size(shape)
    layout: dict[str, Any] = {"shape": size, "stride": whole.stride() if stride is None else tuple(stride)}
    return DTensor.from_local(part, whole.device_mesh, whole.placements, run_check=False, **layout)


def part_like(whole: Tensor, placed: DTensor) -> DTensor:
    """Wrap a tensor that every rank holds whole as a DTensor placed like `placed`; no communication."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, placed.device_mesh, placed.placements, src_data_rank=None)


def shard_dims(tensor: DTensor) -> dict[int, int]:
    """Map each mesh axis over which a tensor is sharded to the tensor dimension that the axis divides."""
    from torch.distributed.tensor import Shard

    return {axis: placement.dim for axis, placement in enumerate(tensor.placements) if isinstance(placement, Shard)}
