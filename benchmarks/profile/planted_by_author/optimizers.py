"""Parameters that are updated one by one."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.profile.planted.program import Planted, seeded, weights
from benchmarks.profile.planted_by_author.model import Blocks


def _deep(layers: int, width: int) -> Blocks:
    seeded()
    return Blocks(width, width, layers // 2)


def _adam(steps: int, fixed: bool) -> list[Tensor]:
    model, x = _deep(24, 32), torch.randn(64, 32)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=fixed)
    for _ in range(steps):
        optimizer.zero_grad()
        y = model(x)
        F.mse_loss(y, x).backward()
        optimizer.step()  # fault: adam-each
    return weights(model)


def _momentum(steps: int, fixed: bool) -> list[Tensor]:
    model, x = _deep(20, 48), torch.randn(32, 48)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9, weight_decay=1e-4, fused=fixed)
    for _ in range(steps):
        optimizer.zero_grad()
        y = model(x)
        F.mse_loss(y, x).backward()
        optimizer.step()  # fault: momentum-each
    return weights(model)


def _average(steps: int, fixed: bool) -> list[Tensor]:
    model, slow, x = _deep(32, 24), _deep(32, 24), torch.randn(32, 24)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, fused=True)
    fast, kept = (list[Tensor](part.parameters()) for part in (model, slow))
    for _ in range(steps):
        optimizer.zero_grad()
        y = model(x)
        F.mse_loss(y, x).backward()
        optimizer.step()
        with torch.no_grad():
            if fixed:
                torch._foreach_lerp_(kept, fast, 0.01)
            else:
                for mine, other in zip(kept, fast, strict=True):
                    mine.mul_(0.99).add_(other, alpha=0.01)  # fault: average-each
    return weights(slow)


PROGRAMS = [
    Planted(name, "optimizer", partial(run, fixed=False), partial(run, fixed=True), steps, __name__)
    for name, run, steps in (
        ("adam-each", _adam, 150),
        ("momentum-each", _momentum, 250),
        ("average-each", _average, 200),
    )
]
