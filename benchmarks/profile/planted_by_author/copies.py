"""Tensors that go through Python's lists and become tensors again."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks.profile.planted.program import Planted, seeded
from benchmarks.profile.planted_by_author.model import Blocks, Training


def _thresholds(steps: int, fixed: bool) -> list[Tensor]:
    scores = torch.rand(20_000, generator=seeded())
    training, found = Training(Blocks(64, 256)), []
    for _ in range(steps):
        training.step(scores[:16_384].view(-1, 64))
        if fixed:
            kept = scores.clone()
        else:
            numbers = scores.tolist()
            kept = torch.tensor(numbers)  # fault: list-and-back
        found.append(torch.where(kept > 0.5, kept, 0.0).sum())
    return found


def _ranked(steps: int, fixed: bool) -> list[Tensor]:
    values = torch.rand(6000, generator=seeded())
    training, found = Training(Blocks(48, 192)), []
    for _ in range(steps):
        training.step(values[:4800].view(-1, 48))
        if fixed:
            ordered = values.sort().values
        else:
            numbers = sorted(values.tolist())
            ordered = torch.tensor(numbers)  # fault: sorted-as-list
        found.append(ordered[:100].mean())
    return found


def _labels(steps: int, fixed: bool) -> list[Tensor]:
    generator = seeded()
    model, labels = Blocks(32, 64), torch.randint(0, 50, (12_000,), generator=generator)
    training, found = Training(model), []
    batch = torch.randn(256, 32, generator=generator)
    for _ in range(steps):
        training.step(batch)
        if fixed:
            wanted = labels + 0
        else:
            wanted = torch.tensor(labels.tolist())  # fault: labels-as-list
        found.append((wanted == 7).sum().float())
    return found


PROGRAMS = [
    Planted(name, "copies", partial(run, fixed=False), partial(run, fixed=True), steps, __name__)
    for name, run, steps in (
        ("list-and-back", _thresholds, 150),
        ("sorted-as-list", _ranked, 250),
        ("labels-as-list", _labels, 500),
    )
]
