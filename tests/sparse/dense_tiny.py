"""The conformance suite's model, trained: what a dense model is before it is fine-tuned to 2:4."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

import shoestring as ss
from shoestring.core.world import World
from shoestring.testing import jobs

STEPS = 60


def trained(dropout: float = 0.0) -> nn.Module:
    """The same weights at every call and on every rank: it trains alone, and on other batches than tests do."""
    model = jobs.tiny(dropout)
    model.load_state_dict(_weights())
    return model


@cache
def _weights() -> dict[str, Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = jobs.tiny()
    with ss.compose(ss.Job(model, optimizer=jobs.sgd(), world=World())) as job:
        for number in range(STEPS):
            job.step(jobs.batch(500_000 + number))
    torch.set_num_threads(threads)
    return model.state_dict()
