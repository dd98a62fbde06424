"""What the tests of batch norms run on ranks of a pool."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoestring.core.compose import compose
from shoestring.core.job import Job
from shoestring.optim import SGD
from shoestring.parallel import DDP
from shoestring.testing.scenarios import here

MICRO, STEPS = 4, 3
"""Micro-batches of a step, on all ranks together."""


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()


def batches(step: int) -> list[tuple[Tensor, Tensor]]:
    """All micro-batches of a step; each has another mean, so that it matters which ones a norm sees together."""
    chance = torch.Generator().manual_seed(step)
    inputs = torch.randn(MICRO, 8, 5, generator=chance, dtype=torch.float64) + torch.arange(MICRO).view(-1, 1, 1)
    return list(zip(inputs, torch.randint(3, (MICRO, 8), generator=chance), strict=True))


def trained() -> dict[str, Any]:
    """Weights, running statistics before and after an evaluation, and its loss, with the micro-batches shared out."""
    world = here()
    model = network()
    share = MICRO // world.size
    features = [SGD(lr=0.1, momentum=0.0, nesterov=False), *([DDP()] if world.size > 1 else [])]
    with compose(Job(model, world=world), features) as job:
        for step in range(STEPS):
            job.step(*batches(step)[world.rank * share : (world.rank + 1) * share])
        before = [each.tolist() for each in model.buffers()]
        total, count = job.evaluate(batches(STEPS)[world.rank * share : (world.rank + 1) * share])
        return {
            "weights": [each.tolist() for each in model.parameters()],
            "before": before,
            "running": [each.tolist() for each in model.buffers()],
            "held_out": total / count,
        }


def by_hand(ranks: int) -> tuple[list[Tensor], list[Tensor], float]:
    """Weights, the first rank's running statistics and the held-out loss, by torch alone."""
    model = network()
    first = {name: each.clone() for name, each in model.named_buffers()}
    for step in range(STEPS):
        model.zero_grad()
        for number, (inputs, targets) in enumerate(batches(step)):
            model.load_state_dict(first, strict=False)
            (F.cross_entropy(model(inputs), targets) / MICRO).backward()
            if number < MICRO // ranks:
                first = {name: each.clone() for name, each in model.named_buffers()}
        with torch.no_grad():
            for each in model.parameters():
                each -= 0.1 * each.grad  # pyright: ignore[reportOperatorIssue]
    model.load_state_dict(first, strict=False)
    model.eval()
    with torch.no_grad():
        losses = [float(F.cross_entropy(model(inputs), targets)) for inputs, targets in batches(STEPS)]
    return list(model.parameters()), list(first.values()), sum(losses) / MICRO
