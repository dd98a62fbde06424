"""Operations on weights whose rows are sharded over ranks: local rows, sums over all rows, and all-gather of rows."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from shoestring.sharded import is_sharded, part_like, placed_like, shard_dims


def why_apart(weight: Tensor, *, rows_too: bool) -> str:
    """Why masks cannot be computed shard by shard; empty if they can.

    Args:
        rows_too: whether masks cover tiles of four rows, not single rows.
    """
    if not is_sharded(weight):
        return ""
    for axis, dim in shard_dims(weight).items():
        rows = -(-weight.shape[0] // weight.device_mesh.size(axis))
        if dim != 0:
            return "its columns are spread over ranks"
        if rows_too and rows % 4:
            return f"its shards have {rows} rows, which do not divide into groups of four"
    return ""


def summed(numbers: Tensor, weight: Tensor) -> Tensor:
    """All-reduce a few numbers over the ranks that hold shards of `weight`, in place."""
    if is_sharded(weight):
        for axis in shard_dims(weight):
            dist.all_reduce(numbers, group=weight.device_mesh.get_group(axis))
    return numbers


def gathered(rows: Tensor, weight: Tensor) -> Tensor:
    """All-gather a tensor with one row for each row of `weight`: (local rows, n) -> (all rows, n)."""
    if not is_sharded(weight):
        return rows
    shape = torch.Size((weight.shape[0], rows.shape[1]))
    return placed_like(rows.contiguous(), weight, shape, (shape[1], 1)).full_tensor()


def own_rows(whole: Tensor, weight: Tensor) -> Tensor:
    """Slice this rank's rows, as in `weight`, out of a tensor that every rank holds whole; no communication."""
    if not is_sharded(weight):
        return whole
    return part_like(whole, weight).to_local()
