"""What each rank of a pool runs, and one process alone: training with sharded weights, and what travels for masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from stand_ins import sparse_units
from torch import nn

from shoestring.core.compose import compose
from shoestring.core.job import Job
from shoestring.core.kept import Progress
from shoestring.parallel import FSDP
from shoestring.precision import Autocast
from shoestring.sharded import local_part
from shoestring.sparse import shards
from shoestring.testing import jobs
from shoestring.testing.scenarios import decode, here


class Uneven(nn.Module):
    """On two ranks, `even` has shards of 8 rows, `odd` of 6, and `short` of 2."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(jobs.VOCABULARY, 16)
        self.even, self.odd, self.short = nn.Linear(16, 16), nn.Linear(16, 12), nn.Linear(12, 4)
        self.head = nn.Linear(4, jobs.VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.short(torch.relu(self.odd(torch.relu(self.even(self.embedding(tokens)))))))


def uneven(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return Uneven()


def train(*, model: str, feature: dict[str, Any], steps: int) -> dict[str, Any]:
    """Losses, masks or scales, and the layers that stay dense; in double precision, sharded where there are ranks."""
    world = here()
    built = (jobs.tiny() if model == "tiny" else uneven()).double()
    features = [FSDP(), decode(feature)] if world.size > 1 else [decode(feature)]
    travelled: list[int] = []
    gathered = shards.gathered

    def counted(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        travelled.append(rows.nbytes)
        return gathered(rows, weight)

    with patch("shoestring.sparse.masked.gathered", counted):
        job = compose(Job(built, optimizer=jobs.sgd(), progress=Progress(total=steps), world=world), features)
        with job:
            losses = [float(job.step(jobs.batch(number, world.rank, world.size))) for number in range(steps)]
            attached = job.kept[features[-1].name].state
            method: Any = attached.method
            masks = {name: mask.tolist() for name, mask in getattr(method, "masks", {}).items()}
            scales = {name: float(scale) for name, scale in getattr(method, "scales", {}).items()}
            numbers = {name: float(job.numbers[name]) for name in ("decay", "flip_rate") if name in job.numbers}
            kept = {name: value for name, value in job.trace.facts.items() if "kept energy" in name}
            return {
                "losses": losses,
                "masks": masks,
                "scales": scales,
                "numbers": numbers,
                "kept": kept,
                "dense": attached.choice.dense,
                "most": max(travelled, default=0),
            }


def train_on_units(*, feature: dict[str, Any], steps: int) -> dict[str, Any]:
    """Losses in bf16, how many products were sparse, and whether packed weights are remembered."""
    world = here()
    features = [decode(feature), Autocast(dtype="bf16"), *([FSDP()] if world.size > 1 else [])]
    with sparse_units() as units:
        job = compose(Job(jobs.tiny(), optimizer=jobs.sgd(), progress=Progress(total=steps), world=world), features)
        with job:
            losses = [float(job.step(jobs.batch(number, world.rank, world.size))) for number in range(steps)]
            attached: Any = job.kept[features[0].name].state
            remembered = sorted({operand.remembered for operand in attached.operands.values()})
    return {"losses": losses, "products": units.products, "remembered": remembered}


def gather_what_is_uneven() -> Sequence[list[list[int]]]:
    """Rows of matrices whose last shard is short, gathered and taken apart again."""
    from torch.distributed.tensor import Shard, distribute_tensor

    world = here()
    assert world.mesh is not None
    mesh = world.mesh_over(("hosts", "local"))
    assert mesh is not None
    found = []
    for rows in (8, 12, 4):
        whole = torch.arange(rows * 2, dtype=torch.uint8).view(rows, 2)
        weight = distribute_tensor(torch.zeros(rows, 4), mesh, [Shard(0)])
        own = shards.own_rows(whole, weight)
        assert len(own) == len(local_part(weight))
        assert torch.equal(shards.gathered(own, weight), whole)
        number = shards.summed(torch.tensor([float(world.rank + 1)]), weight)
        assert float(number) == 3 and dist.get_world_size() == 2
        found.append(own.tolist())
    return found
