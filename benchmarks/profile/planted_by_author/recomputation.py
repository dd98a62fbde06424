"""Values that are computed again though nothing that they depend on has changed."""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.profile.planted.program import Planted, seeded, weights
from benchmarks.profile.planted_by_author.model import Blocks, Training


class Positioned(nn.Module):
    """Adds positions to what it is given, then blocks."""

    def __init__(self, length: int, width: int, kept: bool) -> None:
        super().__init__()
        self.width, self.blocks = width, Blocks(width, width)
        self.table = positions(length, width) if kept else None

    def forward(self, x: Tensor) -> Tensor:
        table = self.table
        if table is None:
            frequencies = torch.exp(torch.arange(0, self.width, 2) * (-math.log(10_000.0) / self.width))
            angles = torch.arange(x.shape[1])[:, None] * frequencies  # fault: positions-each-step
            table = torch.cat([torch.sin(angles), torch.cos(angles)], -1)  # fault: positions-each-step
        return self.blocks(x + table)


def positions(length: int, width: int) -> Tensor:
    """Sines and cosines."""
    frequencies = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
    angles = torch.arange(length)[:, None] * frequencies
    return torch.cat([torch.sin(angles), torch.cos(angles)], -1)


def _positions(steps: int, fixed: bool) -> list[Tensor]:
    x = torch.randn(1, 2048, 64, generator=seeded())
    training = Training(Positioned(2048, 64, fixed))
    for _ in range(steps):
        training.step(x)
    return weights(training.model)


def _mask(steps: int, fixed: bool) -> list[Tensor]:
    x = torch.randn(512, 32, generator=seeded())
    training, found, kept = Training(Blocks(32, 128)), [], torch.full((512, 512), -torch.inf).triu(1)
    for _ in range(steps):
        training.step(x)
        scores = x @ x.t()
        mask = kept if fixed else torch.full((512, 512), -torch.inf).triu(1)  # fault: mask-each-step
        found.append((scores + mask).softmax(-1).amax(-1).mean())
    return found


def _twice(steps: int, fixed: bool) -> list[Tensor]:
    x = torch.randn(512, 64, generator=seeded())
    model = Blocks(64, 256, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, fused=True)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        y = model(x)
        loss = F.mse_loss(y, x)
        again = y if fixed else model(x)  # fault: model-twice
        found.append(again.detach().abs().amax())
        loss.backward()
        optimizer.step()
    return found


PROGRAMS = [
    Planted(name, "recomputation", partial(run, fixed=False), partial(run, fixed=True), steps, __name__)
    for name, run, steps in (
        ("positions-each-step", _positions, 150),
        ("mask-each-step", _mask, 300),
        ("model-twice", _twice, 250),
    )
]
