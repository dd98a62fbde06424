"""LARS and LAMB one tensor at a time in float64, as the papers write them down; and a problem to step on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Gradients = Callable[[Sequence[Tensor], int], list[Tensor]]
STEPS = 100


def problem(dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[list[nn.Parameter], Gradients]:
    """Parameters of several sizes, some of them zero, and a gradient that depends on them and on the step."""
    chance = torch.Generator().manual_seed(seed)
    shapes = [(5, 7), (3, 4, 2, 2), (100, 90), (7,), ()]
    weights = [torch.randn(shape, generator=chance, dtype=torch.float64) for shape in shapes]
    weights.append(torch.zeros(4, 3, dtype=torch.float64))
    targets = [torch.randn(each.shape, generator=chance, dtype=torch.float64) for each in weights]

    def gradients(now: Sequence[Tensor], step: int) -> list[Tensor]:
        found = [
            (each.double() - target) * (1 + 0.3 * math.sin(step)) for each, target in zip(now, targets, strict=True)
        ]
        found[1] = found[1] * (step % 7 != 3)  # no gradient now and then
        return found

    return [nn.Parameter(each.to(dtype)) for each in weights], gradients


def rate(step: int) -> float:
    """A warm-up and a decay, as a factor of the learning rate."""
    return min((step + 1) / 20, 1.0) * (1 - step / 200)


def train(
    optimizer: Optimizer, weights: list[nn.Parameter], gradients: Gradients, lrs: Sequence[float], steps: int = STEPS
) -> list[Tensor]:
    """The weights after some steps, in float64; a learning rate for each group."""
    for step in range(steps):
        for group, lr in zip(optimizer.param_groups, lrs, strict=True):
            group["lr"] = lr * rate(step)
        for each, grad in zip(weights, gradients(weights, step), strict=True):
            each.grad = grad.to(each.dtype)
        optimizer.step()
    return [each.detach().double() for each in weights]


def grouped(weights: Sequence[nn.Parameter], **vectors: Any) -> list[dict[str, Any]]:
    """Matrices, and vectors that do not adapt."""
    matrices = [each for each in weights if each.ndim >= 2]
    rest = [each for each in weights if each.ndim < 2]
    return [{"params": matrices}, {"params": rest, "adapts": False, "weight_decay": 0.0, **vectors}]


def larsed(
    parameters: Sequence[Tensor],
    gradients: Gradients,
    lrs: Sequence[float],
    *,
    momentum: float,
    decay: float,
    trust: float,
    inside: bool,
    nesterov: bool = False,
    larc: bool = False,
    steps: int = STEPS,
) -> list[Tensor]:
    """LARS; `inside`: with the learning rate in the velocity."""
    weights = [each.detach().clone() for each in parameters]
    velocity = [torch.zeros_like(each) for each in weights]
    for step in range(steps):
        grads = gradients(weights, step)
        for each, v, grad in zip(weights, velocity, grads, strict=True):
            adapts = each.ndim >= 2
            lr = lrs[0 if adapts else 1] * rate(step)
            beta = decay if adapts else 0.0
            size, slope = float(each.norm()), float(grad.norm())
            ratio = trust * size / (slope + beta * size + 1e-8) if adapts and size and slope else 1.0
            if larc and adapts:
                ratio = min(ratio / lr, 1.0)
            change = ratio * (grad + beta * each)
            v.mul_(momentum).add_(lr * change if inside else change)
            ahead = momentum * v + (lr * change if inside else change) if nesterov else v
            each.sub_(ahead if inside else lr * ahead)
    return weights


def lambed(
    parameters: Sequence[Tensor],
    gradients: Gradients,
    lr: float,
    *,
    decay: float,
    most: float,
    eps: float = 1e-6,
    steps: int = STEPS,
) -> list[Tensor]:
    """LAMB with ratios of at most `most`."""
    weights = [each.detach().clone() for each in parameters]
    first, second = ([torch.zeros_like(each) for each in weights] for _ in range(2))
    for step in range(steps):
        grads = gradients(weights, step)
        for each, m, v, grad in zip(weights, first, second, grads, strict=True):
            m.mul_(0.9).add_(0.1 * grad)
            v.mul_(0.999).add_(0.001 * grad * grad)
            change = (m / (1 - 0.9 ** (step + 1))) / ((v / (1 - 0.999 ** (step + 1))).sqrt() + eps)
            adapts = each.ndim >= 2
            change = change + (decay if adapts else 0.0) * each
            size, length = float(each.norm()), float(change.norm())
            ratio = min(size / length, most) if adapts and size and length else 1.0
            each.sub_(lr * rate(step) * ratio * change)
    return weights


def furthest(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """The largest difference of two tensors, over the norm of the second."""
    return max(float((a - b).norm() / b.norm().clamp(min=1e-3)) for a, b in zip(ours, theirs, strict=True))
