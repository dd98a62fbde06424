"""Forward passes that keep what gradients would need, though no backward pass follows."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.profile.planted.program import Planted, seeded
from benchmarks.profile.planted_by_author.model import Blocks, Training


def _accuracy(model: nn.Module, batches: list[Tensor], fixed: bool) -> float:
    right = torch.zeros(())
    for x in batches:
        with torch.no_grad() if fixed else nullcontext():
            y = model(x)  # fault: validation-with-gradients
        right += (y.detach().argmax(-1) == x.argmax(-1)).sum()
    return float(right)


def _validated(steps: int, fixed: bool) -> list[float]:
    generator = seeded()
    training = Training(Blocks(32, 32, 12))
    batches = [torch.randn(8, 32, generator=generator) for _ in range(10)]
    found = []
    for _ in range(steps):
        training.step(batches[0])
        found.append(_accuracy(training.model, batches, fixed))
    return found


def _distilled(steps: int, fixed: bool) -> list[Tensor]:
    x = torch.randn(16, 48, generator=seeded())
    teacher, student = Blocks(48, 48, 16), Blocks(48, 48, 2)
    optimizer = torch.optim.SGD(student.parameters(), 0.01, fused=True)
    for _ in range(steps):
        with torch.no_grad() if fixed else nullcontext():
            wanted = teacher(x)  # fault: teacher-with-gradients
        optimizer.zero_grad()
        loss = F.mse_loss(student(x), wanted.detach())
        loss.backward()
        optimizer.step()
    return [parameter.detach() for parameter in student.parameters()]


def _served(steps: int, fixed: bool) -> list[Tensor]:
    generator = seeded()
    model, found = Blocks(64, 64, 10), []
    for _ in range(steps):
        x = torch.randn(64, 64, generator=generator)
        with torch.no_grad() if fixed else nullcontext():
            y = model(x)  # fault: serving-with-gradients
        found.append(y.detach().mean())
    return found


PROGRAMS = [
    Planted(name, "evaluation", partial(run, fixed=False), partial(run, fixed=True), steps, __name__)
    for name, run, steps in (
        ("validation-with-gradients", _validated, 60),
        ("teacher-with-gradients", _distilled, 300),
        ("serving-with-gradients", _served, 800),
    )
]
