"""Selects the tokens with the highest scores over all ranks; the drafter learns from these tokens only."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

MEMORY = 0.5
"""Factor by which the running histogram decays at each step. Only about the last two steps count, because scores fall
as the drafter learns."""
LEFT = 1e-6
"""Weight in the loss of a token that is not selected. The weight is negligible, except in a step that selects no
tokens, where all tokens then count equally."""
UNIT, SPAN, BINS = 1e-5, 1e3, 4096
"""The histogram covers scores up to ± `SPAN` with `BINS` bins; the width of a bin is about 1% of |score| + `UNIT`."""


class RunningThreshold:
    """Estimates the score that a fraction of the tokens exceeds, as a quantile of the scores of the newest steps.

    The quantile of a step's own tokens would be known too late, after the step's first backward pass. Quantiles of
    single micro-batches would select as many easy tokens on one rank as hard tokens on another rank. The threshold of a
    step is therefore computed from the steps before it, and is the same for all micro-batches and ranks, however the
    batch is divided. The histogram holds integer counts, so the result does not depend on the order in which ranks are
    summed. A disadvantage is that the selected fraction differs a little from `fraction` while scores change.

    In the first step all tokens are selected.
    """

    def __init__(self, fraction: float, device: torch.device) -> None:
        self.fraction = fraction
        self.threshold = torch.tensor(-math.inf, device=device)
        self.running = torch.zeros(BINS, dtype=torch.float64, device=device)
        self.seen = torch.zeros(BINS, dtype=torch.int64, device=device)

    def select(self, scores: Tensor, counted: Tensor) -> Tensor:
        """Return which tokens of a micro-batch are selected (bool, of the shape of `counted`), and add their scores to
        the histogram."""
        self.seen.index_add_(0, _bin(scores).flatten(), counted.flatten().to(torch.int64))
        return counted & (scores >= self.threshold)

    def settle(self, group: dist.ProcessGroup | None) -> None:
        """Sum up the histograms of all ranks of the group, and set the threshold of the next step."""
        if group is not None:
            dist.all_reduce(self.seen, group=group)
        self.running.mul_(MEMORY).add_(self.seen)
        self.seen.zero_()
        if self.fraction < 1:
            above = self.running.flip(0).cumsum(0)  # counts in each bin and all higher bins, highest bin first
            enough = (above >= self.fraction * above[-1]).to(torch.int64).argmax()
            self.threshold.copy_(_edge(BINS - 1 - enough))

    def state_dict(self) -> dict[str, Any]:
        return {"threshold": self.threshold, "running": self.running}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, tensor in self.state_dict().items():
            tensor.copy_(state_dict[name])


def _bin(scores: Tensor) -> Tensor:
    """The index of the histogram bin that each score falls into, int64."""
    half, finite = BINS // 2, scores.double().nan_to_num()
    steps = (finite.abs() / UNIT).log1p() * (half / math.log1p(SPAN / UNIT))
    return (half + torch.where(finite < 0, -steps, steps).floor()).clamp(0, BINS - 1).to(torch.int64)


def _edge(number: Tensor) -> Tensor:
    """The lowest score of the bin of index `number`, as a 0-d tensor."""
    half = BINS // 2
    steps = (number - half).double()
    size = (steps.abs() * (math.log1p(SPAN / UNIT) / half)).expm1() * UNIT
    return torch.where(steps < 0, -size, size).float()
