"""What autocast is worth in a training step of a recipe."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.harness import Deadline, Measured, paired
from shoestring.core.task import Batch


def faster(
    model: nn.Module, batch: Batch, forward: Callable[..., Any], loss: Callable[..., Any], deadline: Deadline
) -> Measured:
    """Processor time of a step's forward and backward pass in float32 over that in bf16."""

    def step(low: bool) -> None:
        deadline.check()
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            output = forward(model, batch)
        loss(output, batch)[0].backward()

    return paired(partial(step, False), partial(step, True), clock=time.process_time).measured()
