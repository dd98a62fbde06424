"""What the test of averaged statistics runs on ranks of a pool."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shoestring.core.compose import compose
from shoestring.core.errors import ConfigError
from shoestring.core.job import Job, attachments_of
from shoestring.optim import EMA, SGD
from shoestring.parallel import DDP, FSDP
from shoestring.testing.scenarios import Encoded, features_of, here


def evaluated(shard: str) -> dict[str, Any]:
    """The averaged weights and statistics of an evaluation, and its loss, of a batch norm on batches shared out."""
    world = here()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    sharding = {"ddp": [DDP()], "fsdp": [FSDP()]}[shard] if world.size > 1 else []
    with compose(
        Job(model, world=world), [SGD(lr=0.1, momentum=0.0, nesterov=False), EMA(decay=0.8), *sharding]
    ) as job:
        for step in range(6):
            draw = torch.Generator().manual_seed(step)
            inputs = torch.randn(2, 8, 5, generator=draw, dtype=torch.float64) + torch.arange(2).view(-1, 1, 1)
            batches = list(zip(inputs, torch.randint(3, (2, 8), generator=draw), strict=True))
            job.step(*(batches if world.size == 1 else [batches[world.rank]]))
        total, count = job.evaluate([batches[world.rank]])
        with attachments_of(job).evaluating():
            return {
                "statistics": [each.tolist() for name, each in model.named_buffers() if "running" in name],
                "loss": total / count,
            }


def gains(features: list[Encoded], alike: bool) -> list[float] | str:
    """AdaScale's gain at each step where all ranks read the same batch, or each its own; why it is refused."""
    world = here()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    found = []
    try:
        with compose(Job(model, world=world), features_of(features)) as job:
            for step in range(5):
                draw = torch.Generator().manual_seed(100 * step + (0 if alike else world.rank))
                inputs = torch.randn(8, 5, generator=draw, dtype=torch.float64)
                job.step((inputs, torch.randint(3, (8,), generator=draw)))
                found.append(float(job.numbers["gain"]))
    except ConfigError as error:
        return str(error)
    return found
