"""Steps in which Python computes, or calls small operators one at a time."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.profile.planted.program import Planted, seeded
from benchmarks.profile.planted_by_author.model import Blocks, Training


def _per_row(steps: int, fixed: bool) -> list[Tensor]:
    generator = seeded()
    x, scale = torch.randn(64, 48, generator=generator), torch.rand(48, generator=generator)
    training, found = Training(Blocks(48, 96)), []
    for _ in range(steps):
        training.step(x)
        if fixed:
            found.append(F.softmax(x * scale, -1).amax(-1).sum())
        else:
            best = []
            for row in x.unbind():
                scores = F.softmax(row * scale, -1)  # fault: row-by-row
                best.append(scores.amax())  # fault: row-by-row
            found.append(torch.stack(best).sum())
    return found


def _smoothed(steps: int, fixed: bool) -> list[float]:
    values = torch.rand(4000, generator=seeded())
    training, found = Training(Blocks(32, 128)), []
    batch, numbers = values[:3200].view(-1, 32), values.tolist()
    for _ in range(steps):
        training.step(batch)
        if fixed:
            total = float((values[1:] - values[:-1]).abs().sum())
        else:
            total = 0.0
            for before, after in pairwise(numbers):
                total += abs(after - before)  # fault: differences-in-python
        found.append(total)
    return found


def _heads(steps: int, fixed: bool) -> list[Tensor]:
    generator = seeded()
    queries, keys = (torch.randn(32, 24, 16, generator=generator) for _ in range(2))
    training, found = Training(Blocks(16, 64)), []
    for _ in range(steps):
        training.step(queries[0])
        if fixed:
            scores = (queries @ keys.transpose(1, 2)).softmax(-1)
        else:
            heads = []
            for query, key in zip(queries, keys, strict=True):
                heads.append((query @ key.t()).softmax(-1))  # fault: head-by-head
            scores = torch.stack(heads)
        found.append(scores.amax(-1).sum())
    return found


PROGRAMS = [
    Planted(name, "python", partial(run, fixed=False), partial(run, fixed=True), steps, __name__)
    for name, run, steps in (
        ("row-by-row", _per_row, 300),
        ("differences-in-python", _smoothed, 800),
        ("head-by-head", _heads, 500),
    )
]
