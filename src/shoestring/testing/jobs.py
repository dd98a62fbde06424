"""The training task of the conformance suite: a tiny model, and synthetic text that it can learn.

The model has parts that features often handle wrongly: tied weights, biases, norms, a frozen parameter, dropout and a
list of blocks. In the text, a token is followed by a fixed successor with probability 0.9, else by a random token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

VOCABULARY, WIDTH, BLOCKS, SEQUENCE, BATCH = 32, 16, 2, 8, 8
HELD_OUT = 1_000_000  # number of the first held-out batch; training batches count from 0


class ResidualBlock(nn.Module):
    """A residual block that reads the hidden states of a token and of the token before it."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(2 * WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm(hidden)
        previous = torch.cat([torch.zeros_like(normed[:, :1]), normed[:, :-1]], dim=1)
        return hidden + self.dropout(self.down(torch.relu(self.up(torch.cat([normed, previous], dim=-1)))))


class Tiny(nn.Module):
    """Tiny language model that maps tokens (batch, sequence) to logits (batch, sequence, VOCABULARY)."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 2.0), requires_grad=False)
        self.blocks = nn.ModuleList(ResidualBlock(dropout) for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) * self.scale
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def tiny(dropout: float = 0.0) -> nn.Module:
    """Build the tiny model; every call gives the same initial weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Tiny(dropout)
        nn.init.normal_(model.embedding.weight, std=0.3)
    return model


def sgd(lr: float = 0.2) -> Callable[[list[nn.Parameter]], Optimizer]:
    """Return a function that builds SGD with momentum, the optimizer for features that build none.

    An adaptive optimizer such as Adam would hide changes of the gradients' scale.
    """
    return lambda parameters: SGD(parameters, lr=lr, momentum=0.9)


def batch(number: int, rank: int = 0, size: int = 1, *, ragged: bool = False) -> dict[str, Tensor]:
    """Return this rank's part of batch `number`; the whole batch is the same for any number of ranks.

    Args:
        number: number of the batch, which seeds its random numbers.
        ragged: whether to leave out targets, more in later rows, so that ranks have different numbers of targets.
    """
    generator = torch.Generator().manual_seed(7919 + number)
    draws = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
    surprising = torch.rand((BATCH, SEQUENCE + 1), generator=generator) < 0.1
    tokens = draws.clone()
    for position in range(1, SEQUENCE + 1):
        successor = (5 * tokens[:, position - 1] + 3) % VOCABULARY
        tokens[:, position] = torch.where(surprising[:, position], draws[:, position], successor)
    targets = tokens[:, 1:].clone()
    if ragged:
        left_out = torch.arange(SEQUENCE).flip(0) < torch.arange(BATCH)[:, None]
        targets[left_out] = -100
    share = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
    return {"inputs": tokens[share, :-1].contiguous(), "targets": targets[share].contiguous()}
