"""Counts what operations do: bytes that they read and write, and how often the host waits for a device."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from shoestring._torch import TorchDispatchMode
from shoestring.comm.codecs.dense import DenseCodec
from shoestring.comm.exchange.wire import Wire
from shoestring.core.compose import attach

WAITS = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2")


class Counting(TorchDispatchMode):
    """`nbytes` are those of all operations on tensors within, but for views and collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes, self.waits = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        schema = func._schema
        name = schema.name.partition("::")[2]
        self.waits += name.rstrip("_") in WAITS or name in WAITS
        returned = [each.alias_info for each in schema.returns]
        views = any(alias is not None and not alias.is_write for alias in returned)
        if schema.name.startswith("c10d::") or views or name.startswith(("empty", "new_empty")):
            return result
        written = [result] if not any(returned) else []
        for argument, value in zip(schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written.append(value)
                if "copy" in name or name.startswith(("zero", "fill")):
                    continue
            self.nbytes += size_of(value)
        self.nbytes += sum(map(size_of, written))
        return result


def size_of(value: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def count_dense(*, order: list[int], dtype: str, infinite: bool) -> dict[str, Any]:
    """Average gradients that lie in this order in one piece of memory: bytes moved, in sizes of the gradients."""
    rank = dist.get_rank()
    sizes = [300_000, 7, 200_000]
    memory = torch.full((sum(sizes),), rank + 1.0)
    pieces = dict(zip(order, memory.split([sizes[number] for number in order]), strict=True))
    grads = {f"{number}": pieces[number] for number in range(3)}
    if infinite and rank:
        grads["1"][3] = torch.inf
    with Wire(dist.group.WORLD, torch.device("cpu")) as wire:
        codec = DenseCodec(None if dtype == "fp32" else torch.bfloat16)
        kept: list[Tensor] = []
        with Counting() as count:
            fine = wire.run(codec, grads, 0)
        moved = count.nbytes / memory.nbytes
        averages = memory.unique().tolist()
        if fine:
            wire.run(codec, grads, 1, keep=kept.extend)
            memory.zero_()
            averages += [float(kept[0].float().mean())]
    return {"moved": moved, "fine": fine, "averages": averages, "nan": bool(memory.isnan().all())}


def joined_under_ddp(*, parts: int) -> list[list[bool]]:
    """Whether each exchange of three steps averaged gradients where DDP has them."""
    from shoestring import comm
    from shoestring.comm.codecs import dense

    torch.manual_seed(0)
    layers = [torch.nn.Linear(600, 600, bias=False) for _ in range(4)]  # 5.8 MB: DDP makes several buckets of less
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    found: list[list[bool]] = []
    join = dense.join

    def join_and_note(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
        flat = join(tensors, dtype)
        found[-1].append(flat.data_ptr() == tensors[0].data_ptr())
        return flat

    dense.join = join_and_note
    try:
        with attach(
            model, torch.optim.SGD(model.parameters(), lr=0.0), comm.Dense(transport=comm.Transport(parts=parts))
        ):
            for _ in range(3):
                found.append([])
                model(torch.randn(2, 600)).sum().backward()
    finally:
        dense.join = join
    return found
