"""Gradients that take far longer than those of their operators usually do."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.profile.planted.program import Planted, seeded
from benchmarks.profile.planted_by_author.model import Blocks, Training


def _neighbours(steps: int, fixed: bool) -> Tensor:
    generator = seeded()
    nodes = torch.randn(2000, 32, generator=generator).requires_grad_()
    sources = torch.randint(0, 200, (20_000,), generator=generator)
    layer = torch.nn.Linear(32, 8)
    gradient = torch.zeros(())
    for _ in range(steps):
        if fixed:
            messages = nodes.index_select(0, sources)
        else:
            messages = nodes[sources]  # fault: index-duplicates
        out = layer(messages)
        loss = F.relu(out).mean()
        (gradient,) = torch.autograd.grad(loss, nodes)
    return gradient


def _each_time(steps: int, fixed: bool) -> Tensor:
    x = torch.randn(64, 200, 32, generator=seeded()).requires_grad_()
    training = Training(Blocks(32, 128))
    gradient = torch.zeros(())
    for _ in range(steps):
        training.step(x.detach()[:, :100].reshape(-1, 32))
        state, times = torch.zeros(64, 32), x.unbind(1) if fixed else None
        for t in range(200):
            now = times[t] if times else x[:, t]  # fault: select-each-time
            state = torch.lerp(state, now, 0.1)
        (gradient,) = torch.autograd.grad(state.square().mean(), x)
    return gradient


def _large_table(steps: int, fixed: bool) -> Tensor:
    generator = seeded()
    table = torch.randn(100_000, 32, generator=generator).requires_grad_()
    rows = torch.randint(0, 100_000, (512,), generator=generator)
    model = Blocks(32, 128)
    gradient = torch.zeros(())
    for _ in range(steps):
        found = F.embedding(rows, table, sparse=fixed)  # fault: dense-table
        (gradient,) = torch.autograd.grad(F.mse_loss(model(found), found.detach()), table)
    return gradient.to_dense() if fixed else gradient


PROGRAMS = [
    Planted(name, "imbalance", partial(run, fixed=False), partial(run, fixed=True), steps, __name__)
    for name, run, steps in (
        ("index-duplicates", _neighbours, 100),
        ("select-each-time", _each_time, 8),
        ("dense-table", _large_table, 120),
    )
]
