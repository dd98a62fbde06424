"""Conversions of layout or data type that a later one takes back."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.profile.planted.program import Planted, seeded
from benchmarks.profile.planted_by_author.model import Blocks, Training


def _channels(steps: int, fixed: bool) -> Tensor:
    generator = seeded()
    x = torch.randn(16, 32, 48, 48, generator=generator)
    scale, training = torch.rand(32, generator=generator), Training(Blocks(64, 256))
    for _ in range(steps):
        if fixed:
            y = F.avg_pool2d(x * scale[:, None, None], 3, 1, 1)
        else:
            y = x.permute(0, 2, 3, 1).contiguous()  # fault: channels-back
            y = (y * scale).permute(0, 3, 1, 2).contiguous()  # fault: channels-back
            y = F.avg_pool2d(y, 3, 1, 1)
        training.step(y.view(-1, 64)[:8192])
        x = F.relu(y)
    return x


def _doubles(steps: int, fixed: bool) -> Tensor:
    x, weight = torch.randn(2048, 256, generator=seeded()), torch.full((256,), 0.9)
    training = Training(Blocks(256, 256))
    for _ in range(steps):
        y = x * weight
        if not fixed:
            y = y.double()  # fault: double-and-back
            y = y.float()  # fault: double-and-back
        x = F.layer_norm(y, (256,))
        training.step(x[:256])
    return x


def _half(steps: int, fixed: bool) -> Tensor:
    generator = seeded()
    x = torch.randn(256, 1024, generator=generator).requires_grad_()
    gate = torch.rand(1024, generator=generator)
    training = Training(Blocks(64, 512))
    gradient = torch.zeros(())
    for _ in range(steps):
        training.step(x.detach().view(-1, 64)[:2048])
        y = x
        for _ in range(4):
            if fixed:
                y = F.relu(y) * gate
            else:
                y = F.relu(y.bfloat16()) * gate.bfloat16()  # fault: half-each-layer
                y = y.float()  # fault: half-each-layer
        (gradient,) = torch.autograd.grad(y.square().mean(), x)
    return gradient


PROGRAMS = [
    Planted(name, "layout", partial(run, fixed=False), partial(run, fixed=True), steps, __name__)
    for name, run, steps in (
        ("channels-back", _channels, 40),
        ("double-and-back", _doubles, 250),
        ("half-each-layer", _half, 100),
    )
]
