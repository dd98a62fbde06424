"""Models of the conformance suite's task for distillation: a trained target, and an earlier draft of it."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

import shoestring as ss
from shoestring.core.world import World
from shoestring.testing import jobs


def teacher() -> nn.Module:
    return _trained(120)


def reference() -> nn.Module:
    return _trained(20)


def stranger() -> nn.Module:
    """A model whose divergence from the teacher has nothing to do with an untrained one's."""
    model = jobs.tiny()
    nn.init.normal_(model.embedding.weight, std=0.5, generator=torch.Generator().manual_seed(3))
    return model


def _trained(steps: int) -> nn.Module:
    """The same weights at every call and on every rank: it trains alone, and on other batches than tests do."""
    model = jobs.tiny()
    model.load_state_dict(_weights(steps))
    return model


@cache
def _weights(steps: int) -> dict[str, Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = jobs.tiny()
    with ss.compose(ss.Job(model, optimizer=jobs.sgd(), world=World())) as job:
        for number in range(steps):
            job.step(jobs.batch(500_000 + number))
    torch.set_num_threads(threads)
    return model.state_dict()
