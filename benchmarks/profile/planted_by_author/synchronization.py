"""Values that a loop takes out of tensors one at a time."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.profile.planted.program import Planted, seeded
from benchmarks.profile.planted_by_author.model import Blocks, Training


def _accuracy(steps: int, fixed: bool) -> list[int]:
    generator = seeded()
    model, training = nn.Linear(64, 10), Training(Blocks(64, 256))
    x, labels = torch.randn(512, 64, generator=generator), torch.randint(0, 10, (512,), generator=generator)
    counts = []
    for _ in range(steps):
        training.step(x)
        with torch.no_grad():
            guesses = model(x).argmax(-1)
        if fixed:
            right = int((guesses == labels).sum())
        else:
            right = 0
            for row in range(512):
                right += int(guesses[row].item() == labels[row].item())  # fault: item-each-row
        counts.append(right)
    return counts


def _clipped(steps: int, fixed: bool) -> list[float]:
    seeded()
    model = Blocks(24, 24, 20)
    x, norms = torch.randn(16, 24), []
    for _ in range(steps):
        y = model(x)
        gradients = torch.autograd.grad(F.mse_loss(y, x), list(model.parameters()))
        if fixed:
            each = torch._foreach_norm(gradients)
            norms.append(float(torch.stack(each).square().sum().sqrt()))
        else:
            total = 0.0
            for gradient in gradients:
                total += gradient.norm().item() ** 2  # fault: norm-each
            norms.append(total**0.5)
    return norms


def _until_small(steps: int, fixed: bool) -> list[Tensor]:
    matrix, batch = torch.eye(16) * 0.5 + 0.01, torch.randn(256, 32, generator=seeded())
    training, found = Training(Blocks(32, 64)), []
    for _ in range(steps):
        training.step(batch)
        x = torch.ones(16)
        for _ in range(30):
            x = matrix @ x
            if not fixed and bool((x.abs() > 1e9).any()):  # fault: check-each-time
                break
        found.append(x)
    return found


PROGRAMS = [
    Planted(name, "synchronization", partial(run, fixed=False), partial(run, fixed=True), steps, __name__)
    for name, run, steps in (
        ("item-each-row", _accuracy, 200),
        ("norm-each", _clipped, 150),
        ("check-each-time", _until_small, 500),
    )
]
