"""What the ranks do in the tests of `checkpoint.attach`: programs that know nothing of shoestring's jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from saving_ranks import digest, whole
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW

from shoestring import checkpoint
from shoestring.checkpoint import Tiered
from shoestring.checkpoint.attached import Attached


def saving(folder: str, state: dict[str, Any]) -> Attached:
    place = Path(folder)
    settings = Tiered(folder=str(place / "saves"), memory=str(place / "memory"), memory_every=0, disk_every=0)
    return checkpoint.attach(state, settings=settings)


def digests(model: nn.Module, optimizer: AdamW) -> dict[str, str]:
    """Of every tensor of the model and its optimizer, whole."""
    found = dict(model.state_dict())
    for index, state in optimizer.state_dict()["state"].items():
        found |= {f"{index}.{key}": value for key, value in state.items()}
    return {name: digest(whole(value)) for name, value in found.items()}


def sharded(*, folder: str, first: int, stop: int) -> dict[str, Any]:
    """Train a sharded model from a save, if there is one; what was restored, and what there is at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    if ranks > 1:
        fully_shard(model[0])
        fully_shard(model)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    with saving(folder, {"model": model, "optimizer": optimizer}) as saves:
        assert saves.restore() == first
        begun = digests(model, optimizer)
        for step in range(first, stop):
            inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
            model(inputs.tensor_split(ranks)[rank]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            saves.step(last=step + 1 == stop)
        return {"begun": begun, "ended": digests(model, optimizer)}
