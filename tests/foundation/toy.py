"""A tiny model, data and losses that share no code with shoestring, for runs that name them in their run file."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

VOCABULARY, LENGTH, SAMPLES = 32, 8, 48


class Mixer(nn.Module):
    """One causal block: a masked mean over positions, a hidden layer, dropout; both with biases."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(2 * width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        positions = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)
        mean = h.cumsum(1) / positions[:, None]
        return x + self.dropout(self.down(F.gelu(self.up(torch.cat([h, mean], -1)))))


class Toy(nn.Module):
    def __init__(self, width: int = 16, layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Mixer(width, dropout) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def model(width: int = 16, layers: int = 2, dropout: float = 0.0) -> Toy:
    return Toy(width, layers, dropout)


class Mortal(Toy):
    """Kills its process in the forward pass of the given rank and call, unless `marker` exists; then it lives on."""

    def __init__(self, marker: str, rank: int, call: int) -> None:
        super().__init__(dropout=0.2)
        self.marker, self.rank, self.call, self.calls = Path(marker), rank, call, 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        due = self.training and self.calls == self.call and os.environ.get("RANK", "0") == str(self.rank)
        if due and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(tokens)


def mortal(marker: str, rank: int = 1, call: int = 6) -> Mortal:
    return Mortal(marker, rank, call)


class Weightless(nn.Module):
    def forward(self, tokens: Tensor) -> Tensor:
        return F.one_hot(tokens, VOCABULARY).float()


def weightless() -> Weightless:
    return Weightless()


class Samples(Dataset):
    """Sequences x[t + 1] = 5 x[t] + sample (mod V), with a share of the targets left out that differs by sample."""

    fingerprint = "toy"

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = [index % VOCABULARY]
        for _ in range(LENGTH):
            tokens.append((5 * tokens[-1] + index) % VOCABULARY)
        targets = torch.tensor(tokens[1:])
        targets[: index % LENGTH] = -100
        return {"inputs": torch.tensor(tokens[:-1]), "targets": targets}


def samples() -> Samples:
    return Samples()


seen: list[list[int]] = []
"""The ids of every micro-batch that `recorded` was called with."""


def recorded(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The cross-entropy, written out; notes the samples' ids."""
    seen.append(batch["ids"].tolist())
    targets = batch["targets"]
    counts = targets != -100
    each = output.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return -(each * counts).sum(), counts.sum()


def poisoned(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The same, but NaN on the rank that gets sample 7."""
    total, count = recorded(output, batch)
    return (total * float("nan") if 7 in batch["ids"].tolist() else total), count


def batches(steps: int, size: int = 8, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """(inputs, targets) of `steps` global batches with very unequal numbers of targets in their rows.

    In the first, the first half of the rows has none; in every fifth, the second half has none.
    """
    generator = torch.Generator().manual_seed(seed)
    made = []
    for step in range(steps):
        inputs = torch.randint(VOCABULARY, (size, LENGTH), generator=generator)
        targets = (inputs * 3 + 1) % VOCABULARY
        kept = torch.rand(size, LENGTH, generator=generator) < torch.linspace(0.1, 1.0, size)[:, None]
        if step == 0:
            kept[: size // 2] = False
            kept[-1] = True
        if step % 5 == 4:
            kept[size // 2 :] = False
            kept[0] = True
        made.append((inputs, torch.where(kept, targets, -100)))
    return made


def plain_losses(model: nn.Module, data: list[tuple[Tensor, Tensor]], lr: float = 3e-3, warmup: int = 5) -> list[float]:
    """The hand-written loop: AdamW on matrices with decay, warm-up + cosine to a tenth, clipping to 0.5."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, fused=True)
    losses = []
    for step, (inputs, targets) in enumerate(data):
        scale = (step + 1) / warmup
        if step >= warmup:
            scale = 0.1 + 0.9 * (1 + math.cos(math.pi * (step - warmup) / (len(data) - warmup))) / 2
        for group in optimizer.param_groups:
            group["lr"] = lr * scale
        logits = model(inputs)
        loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
