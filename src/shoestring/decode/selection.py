"""Which tokens a drafter learns from: those in the upper part of the distribution of a score, over all ranks."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

MEMORY = 0.5
"""Share of the earlier counts in the running ones, at each step: about two steps count, as scores fall while drafters
learn."""
LEFT = 1e-6
"""Weight of a token that is not selected: nothing, except in a step of which none is, which then learns from all."""
UNIT, SPAN, BINS = 1e-5, 1e3, 4096
"""Bins are as wide as `UNIT` around 0 and grow with the score, up to ± `SPAN`: about 1% of it."""


class RunningThreshold:
    """The score that a fraction of the tokens of the newest steps exceed, for the tokens of the next step.

    A step's tokens cannot be compared with each other before the backward pass of its first micro-batch, and a quantile
    of a micro-batch would take equally many of a rank's easy tokens as of another's hard ones. So the threshold is that
    of the steps before: the same for all micro-batches and ranks, whatever the batch is divided into. It comes from a
    histogram, whose counts are integers: the order of ranks does not change a bit of it. The fraction that is selected
    then differs a little from the one that was asked for, wherever scores change from step to step.

    In the first step all tokens count.
    """

    def __init__(self, fraction: float, device: torch.device) -> None:
        self.fraction = fraction
        self.threshold = torch.tensor(-math.inf, device=device)
        self.running = torch.zeros(BINS, dtype=torch.float64, device=device)
        self.seen = torch.zeros(BINS, dtype=torch.int64, device=device)

    def select(self, scores: Tensor, counted: Tensor) -> Tensor:
        """Which tokens of a micro-batch are selected; bool, like `counted`. They are noted for the next threshold."""
        self.seen.index_add_(0, _bin(scores).flatten(), counted.flatten().to(torch.int64))
        return counted & (scores >= self.threshold)

    def settle(self, group: dist.ProcessGroup | None) -> None:
        """Take what all ranks of the group have seen in this step, and set the next step's threshold."""
        if group is not None:
            dist.all_reduce(self.seen, group=group)
        self.running.mul_(MEMORY).add_(self.seen)
        self.seen.zero_()
        if self.fraction < 1:
            above = self.running.flip(0).cumsum(0)  # what lies in a bin or above it, from the highest one down
            enough = (above >= self.fraction * above[-1]).to(torch.int64).argmax()
            self.threshold.copy_(_edge(BINS - 1 - enough))

    def state_dict(self) -> dict[str, Any]:
        return {"threshold": self.threshold, "running": self.running}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, tensor in self.state_dict().items():
            tensor.copy_(state_dict[name])


def _bin(scores: Tensor) -> Tensor:
    """The number of the bin that a score lies in; int64."""
    half, finite = BINS // 2, scores.double().nan_to_num()
    steps = (finite.abs() / UNIT).log1p() * (half / math.log1p(SPAN / UNIT))
    return (half + torch.where(finite < 0, -steps, steps).floor()).clamp(0, BINS - 1).to(torch.int64)


def _edge(number: Tensor) -> Tensor:
    """The lowest score of a bin; 0-d."""
    half = BINS // 2
    steps = (number - half).double()
    size = (steps.abs() * (math.log1p(SPAN / UNIT) / half)).expm1() * UNIT
    return torch.where(steps < 0, -size, size).float()
