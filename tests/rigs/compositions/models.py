"""The models of drawn compositions."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn

from shoestring.testing import jobs

UNUSUAL = (torch.bool, torch.int16, torch.uint16, torch.float8_e4m3fn, torch.complex64, torch.bfloat16, torch.int64)


class Odd(nn.Module):
    """Sizes that no number of ranks divides, a parameter of no dimension, one of one entry, and one without use."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(jobs.VOCABULARY, 9)
        self.blocks = nn.ModuleList(jobs.ResidualBlock(0.0) for _ in range(1))
        self.widen = nn.Linear(9, jobs.WIDTH)
        self.gain = nn.Parameter(torch.ones(()))
        self.shift = nn.Parameter(torch.zeros(1))
        self.unused = nn.Parameter(torch.ones(3))
        self.lm_head = nn.Linear(jobs.WIDTH, jobs.VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.widen(self.embed(tokens)) * self.gain + self.shift
        for block in self.blocks:
            hidden = block(hidden)
        return self.lm_head(hidden)


class Buffered(jobs.Tiny):
    """Buffers of types that few collectives know; one counts the forward passes."""

    def __init__(self) -> None:
        super().__init__(0.0)
        for number, dtype in enumerate(UNUSUAL):
            self.register_buffer(f"mask{number}", torch.ones(3, 2).to(dtype), persistent=number % 2 == 0)
        self.register_buffer("empty", torch.zeros(0))

    def double(self) -> Self:
        """Parameters alone: the buffers keep their types."""
        for parameter in self.parameters():
            parameter.data = parameter.data.double()
        return self


def build(name: str) -> nn.Module:
    """A model of this name in double precision, with the same weights at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if name == "odd":
            return Odd().double()
        if name == "buffers":
            model = Buffered()
            nn.init.normal_(model.embedding.weight, std=0.3)
            return model.double()
        return jobs.tiny().double()
