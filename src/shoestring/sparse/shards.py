"""Operations on weights whose rows are sharded over ranks: local rows, sums over all rows, and all-gather of rows."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's rows of a weight; a plain tensor is returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def why_apart(weight: Tensor, *, rows_too: bool) -> str:
    """Why masks cannot be computed shard by shard; empty if they can.

    Args:
        rows_too: whether masks cover tiles of four rows, not single rows.
    """
    if not isinstance(weight, DTensor):
        return ""
    for axis, placement in enumerate(weight.placements):
        if isinstance(placement, Shard):
            ranks = weight.device_mesh.size(axis)
            rows = -(-weight.shape[0] // ranks)
            if placement.dim != 0:
                return "its columns are spread over ranks"
            if rows_too and rows % 4:
                return f"its shards have {rows} rows, which do not divide into groups of four"
    return ""


def summed(numbers: Tensor, weight: Tensor) -> Tensor:
    """All-reduce a few numbers over the ranks that hold shards of `weight`, in place."""
    if isinstance(weight, DTensor):
        for axis, placement in enumerate(weight.placements):
            if isinstance(placement, Shard):
                dist.all_reduce(numbers, group=weight.device_mesh.get_group(axis))
    return numbers


def gathered(rows: Tensor, weight: Tensor) -> Tensor:
    """All-gather a tensor with one row for each row of `weight`: (local rows, n) -> (all rows, n)."""
    if not isinstance(weight, DTensor):
        return rows
    shape = torch.Size((weight.shape[0], rows.shape[1]))
    whole = DTensor.from_local(
        rows.contiguous(), weight.device_mesh, weight.placements, run_check=False, shape=shape, stride=(shape[1], 1)
    )
    return whole.full_tensor()


def own_rows(whole: Tensor, weight: Tensor) -> Tensor:
    """Slice this rank's rows, as in `weight`, out of a tensor that every rank holds whole; no communication."""
    if not isinstance(weight, DTensor):
        return whole
    return distribute_tensor(whole, weight.device_mesh, weight.placements, src_data_rank=None).to_local()
