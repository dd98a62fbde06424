"""Torch's own optimizers, with weight decay on matrices only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shoestring import optim
from shoestring.core.task import Params


def groups(parameters: Params, weight_decay: float) -> list[dict[str, Any]]:
    """Two parameter groups: what decays (two dimensions and more), and what does not (biases, norms)."""
    decaying = [parameter for parameter in parameters if parameter.ndim >= 2]
    others = [parameter for parameter in parameters if parameter.ndim < 2]
    both = [{"params": decaying, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in both if group["params"]]


def adamw(settings: optim.AdamW) -> Callable[[Params], Optimizer]:
    def build(parameters: Params) -> Optimizer:
        return torch.optim.AdamW(
            groups(parameters, settings.weight_decay),
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            fused=_fusible(parameters),
        )

    return build


def sgd(settings: optim.SGD) -> Callable[[Params], Optimizer]:
    def build(parameters: Params) -> Optimizer:
        return torch.optim.SGD(
            groups(parameters, settings.weight_decay),
            lr=settings.lr,
            momentum=settings.momentum,
            nesterov=settings.nesterov and settings.momentum > 0,
            fused=_fusible(parameters),
        )

    return build


def _fusible(parameters: list[nn.Parameter]) -> bool:
    return all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in parameters)
