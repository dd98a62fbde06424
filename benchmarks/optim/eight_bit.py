"""What a step of AdamW with averages of 8 bits costs beside torch's fused AdamW."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from benchmarks.harness import Bar, Deadline, Measured, paired
from shoestring.models.gpt import tiny
from shoestring.optim.eight_bit import EightBitAdamW

ROUNDS = 15


def step_time(_: Deadline) -> Measured:
    """Of the quickstart's model."""

    def stepper(build: Callable[[Any], Optimizer]) -> Callable[[], Any]:
        parameters = list(tiny().parameters())
        for each in parameters:
            each.grad = torch.randn_like(each)
        return build(parameters).step

    theirs = stepper(lambda parameters: torch.optim.AdamW(parameters, 1e-9, fused=True))
    found = paired(stepper(lambda parameters: EightBitAdamW(parameters, 1e-9)), theirs, rounds=ROUNDS, warmup=3)
    elements = sum(each.numel() for each in tiny().parameters())
    return found.measured(f"{elements / 1e6:.1f} M elements, {torch.get_num_threads()} threads; {found}")


def rows() -> list[Bar]:
    return [
        Bar(
            "optim.eight-bit-step",
            "time of a step of AdamW with averages of 8 bits over that of torch's fused AdamW, on the quickstart's GPT",
            "<=",
            2.0,
            measure=step_time,
            baseline="torch's fused AdamW",
            peers=("torch",),
        )
    ]
