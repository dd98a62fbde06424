"""A checkpoint that is copied beside training has the weights of its step, though an evaluation has others."""

from __future__ import annotations

from contextlib import closing
from functools import partial

import pytest
import torch
from torch import nn

from shoestring import optim
from shoestring.checkpoint import Tiered
from shoestring.core.compose import compose
from shoestring.core.job import Job, attachments_of
from shoestring.core.world import World

WIDTH, LAYERS = 1024, 16  # 64 MB, which cannot be copied before the evaluation begins


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(2, WIDTH, generator=draw), torch.randint(WIDTH, (2,), generator=draw)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "feature", [optim.EMA(decay=0.5), optim.ScheduleFree(lr=0.1)], ids=lambda feature: feature.name
)
def test_an_evaluation_waits_for_the_copy(tmp_path, feature):
    own = [optim.SGD(lr=0.5), feature] if isinstance(feature, optim.EMA) else [feature]
    tiered = Tiered(
        folder=str(tmp_path / "saves"), memory_folder=str(tmp_path / "memory"), memory_every=2, disk_every=0
    )
    start = partial(compose, features=[*own, tiered])
    with closing(start(Job(model(), world=World()))) as job:
        job.restore("auto")
        job.step(batch(0))
        job.step(batch(1))
        weights = [parameter.detach().clone() for parameter in attachments_of(job).parameters]
        job.evaluate([batch(9)])
        job.step(batch(2))  # waits for the copy
    with closing(start(Job(model(), world=World()))) as job:
        assert job.restore("auto") == 2
        assert all(map(torch.equal, attachments_of(job).parameters, weights))
