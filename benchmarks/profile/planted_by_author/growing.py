"""Steps that keep what they made: memory grows, or what each step works on does."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.profile.planted.program import Planted, seeded
from benchmarks.profile.planted_by_author.model import Blocks, Training


def _losses(steps: int, fixed: bool) -> list[Tensor]:
    x = torch.randn(512, 64, generator=seeded())
    model, losses = Blocks(64, 256), []
    optimizer = torch.optim.SGD(model.parameters(), 0.01, fused=True)
    for _ in range(steps):
        optimizer.zero_grad()
        y = model(x)
        F.mse_loss(y, x).backward()
        optimizer.step()
        with torch.no_grad() if fixed else nullcontext():
            monitored = model(x).square().mean()
        losses.append(monitored)  # fault: graphs-kept
    return [loss.detach() for loss in losses]


def _outputs(steps: int, fixed: bool) -> list[Tensor]:
    generator = seeded()
    training, seen = Training(Blocks(128, 256)), {}
    for step in range(steps):
        x = torch.randn(1024, 128, generator=generator)
        training.step(x)
        features = x.square()
        seen[step % 4 if fixed else step] = features  # fault: cache-without-bound
    return [seen[key].mean() for key in list(seen)[-4:]]


def _total(steps: int, fixed: bool) -> Tensor:
    x = torch.randn(1024, 64, generator=seeded())
    model, total = Blocks(64, 192), torch.zeros(())
    optimizer = torch.optim.SGD(model.parameters(), 0.001, fused=True)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        with torch.no_grad() if fixed else nullcontext():
            penalty = F.l1_loss(model(x), x)
        total = total + penalty  # fault: total-with-graph
    return total.detach()


def _history(steps: int, fixed: bool) -> list[Tensor]:
    generator = seeded()
    training, found = Training(Blocks(32, 64)), []
    history = torch.zeros(256, 64) if fixed else torch.zeros(0, 64)
    for _ in range(steps):
        x = torch.randn(256, 64, generator=generator)
        training.step(x[:, :32])
        if fixed:
            history = x
        else:
            history = torch.cat([history, x])  # fault: history-joined
        found.append(x.mean())
    return found


def _all_stacked(steps: int, fixed: bool) -> list[Tensor]:
    generator = seeded()
    training, kept, found = Training(Blocks(32, 64)), [], []
    for _ in range(steps):
        x = torch.randn(128, 32, generator=generator)
        training.step(x)
        kept.append(x)
        if fixed:
            kept = kept[-8:]
        joined = torch.stack(kept)  # fault: all-stacked
        found.append(joined[-1].mean())
    return found


def _carried(steps: int, fixed: bool) -> list[Tensor]:
    generator = seeded()
    weight = torch.full((24, 24), 0.02).requires_grad_()
    training, state, found = Training(Blocks(24, 48)), torch.zeros(64, 24), []
    for _ in range(steps):
        x = torch.randn(64, 24, generator=generator)
        training.step(x)
        state = torch.tanh(x + state @ weight)  # fault: state-with-history
        (gradient,) = torch.autograd.grad(state.mean(), weight, retain_graph=not fixed)
        found.append(state.detach().mean() + 0 * gradient.mean())
        if fixed:
            state = state.detach()
    return found


PROGRAMS = [
    Planted(name, "growth", partial(run, fixed=False), partial(run, fixed=True), steps, __name__)
    for name, run, steps in (
        ("graphs-kept", _losses, 120),
        ("cache-without-bound", _outputs, 250),
        ("total-with-graph", _total, 120),
    )
] + [
    Planted(name, "drift", partial(run, fixed=False), partial(run, fixed=True), steps, __name__)
    for name, run, steps in (
        ("history-joined", _history, 200),
        ("all-stacked", _all_stacked, 250),
        ("state-with-history", _carried, 150),
    )
]
