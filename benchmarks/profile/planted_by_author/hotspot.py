"""One line takes most of the time, and one way of writing it takes less."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks.profile.planted.program import Planted, seeded
from benchmarks.profile.planted_by_author.model import Blocks, Training


def _nearest(steps: int, fixed: bool) -> list[Tensor]:
    generator = seeded()
    points, codes = torch.randn(256, 32, generator=generator), torch.randn(128, 32, generator=generator)
    training, found = Training(Blocks(32, 96)), []
    for _ in range(steps):
        training.step(points)
        if fixed:
            scores = torch.addmm(codes.square().sum(-1)[None], points, codes.t(), alpha=-2)
        else:
            scores = (points[:, None] - codes[None]).square().sum(-1)  # fault: codebook-distances
        found.append(scores.argmin(-1))
    return found


def _moving_average(steps: int, fixed: bool) -> list[Tensor]:
    signal = torch.randn(64, 4096, generator=seeded())
    training, sums = Training(Blocks(32, 128)), []
    for _ in range(steps):
        training.step(signal[:, :128].reshape(-1, 32))
        if fixed:
            total = torch.nn.functional.pad(signal, (1, 0)).cumsum(-1)
            smooth = (total[:, 64:] - total[:, :-64]) / 64
        else:
            smooth = signal.unfold(-1, 64, 1).mean(-1)  # fault: window-mean
        sums.append(smooth.square().sum())
    return sums


def _whole_sort(steps: int, fixed: bool) -> list[Tensor]:
    scores = torch.randn(32, 20_000, generator=seeded())
    training, best = Training(Blocks(64, 256)), []
    for _ in range(steps):
        training.step(scores[:, :2048].reshape(-1, 64))
        if fixed:
            best.append(scores.topk(5).values)
        else:
            best.append(scores.sort(descending=True).values[:, :5])  # fault: whole-sort
    return best


PROGRAMS = [
    Planted(name, "hotspot", partial(run, fixed=False), partial(run, fixed=True), steps, __name__)
    for name, run, steps in (
        ("codebook-distances", _nearest, 300),
        ("window-mean", _moving_average, 120),
        ("whole-sort", _whole_sort, 20),
    )
]
