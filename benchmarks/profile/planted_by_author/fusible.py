"""Chains of small operators that one operator computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.profile.planted.program import Planted, seeded, weights
from benchmarks.profile.planted_by_author.model import Blocks, Training


def tanh_gelu(x: Tensor) -> Tensor:
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)  # fault: gelu-by-hand
    return 0.5 * x * (1.0 + torch.tanh(inner))  # fault: gelu-by-hand


def normalized(x: Tensor, weight: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)  # fault: layer-norm-by-hand
    centered = x - mean  # fault: layer-norm-by-hand
    variance = centered.pow(2).mean(-1, keepdim=True)  # fault: layer-norm-by-hand
    return weight * centered / torch.sqrt(variance + 1e-5)  # fault: layer-norm-by-hand


def logistic_loss(scores: Tensor, wanted: Tensor) -> Tensor:
    likely = torch.sigmoid(scores)  # fault: logistic-loss
    loss = -(wanted * torch.log(likely + 1e-7) + (1 - wanted) * torch.log(1 - likely + 1e-7))  # fault: logistic-loss
    return loss.mean()  # fault: logistic-loss


def _train(steps: int, activation: Callable[[Tensor], Tensor]) -> list[Tensor]:
    x = torch.randn(512, 48, generator=seeded())
    training = Training(Blocks(48, 128, activation=activation))
    for _ in range(steps):
        training.step(x)
    return weights(training.model)


def _gelu(steps: int, fixed: bool) -> list[Tensor]:
    return _train(steps, partial(F.gelu, approximate="tanh") if fixed else tanh_gelu)


def _norm(steps: int, fixed: bool) -> list[Tensor]:
    scale = torch.ones(128)
    operator = partial(F.layer_norm, normalized_shape=(128,), weight=scale)
    return _train(steps, operator if fixed else partial(normalized, weight=scale))


def _logistic(steps: int, fixed: bool) -> list[Tensor]:
    generator = seeded()
    model = Blocks(64, 128)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)
    x, wanted = torch.randn(512, 64, generator=generator), torch.rand(512, 64, generator=generator).round()
    loss = F.binary_cross_entropy_with_logits if fixed else logistic_loss
    for _ in range(steps):
        optimizer.zero_grad()
        scores = model(x)
        loss(scores, wanted).backward()
        optimizer.step()
    return weights(model)


PROGRAMS = [
    Planted(name, "fusible", partial(run, fixed=False), partial(run, fixed=True), steps, __name__)
    for name, run, steps in (
        ("gelu-by-hand", _gelu, 250),
        ("layer-norm-by-hand", _norm, 300),
        ("logistic-loss", _logistic, 300),
    )
]
