"""Formulas written out, where one operator computes the same."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.profile.planted.program import Planted, seeded, weights

Normalization = Callable[[Tensor, Tensor, Tensor], Tensor]
GROUPS = 8


def normalize_groups(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    batch, channels, height, width = x.shape
    grouped = x.view(batch, GROUPS, -1)
    mean = grouped.mean(2, keepdim=True)  # fault: group-norm-by-hand
    spread = ((grouped - mean) ** 2).mean(2, keepdim=True)  # fault: group-norm-by-hand
    grouped = (grouped - mean) / torch.sqrt(spread + 1e-5)  # fault: group-norm-by-hand
    x = grouped.view(batch, channels, height, width)
    return x * scale.view(1, -1, 1, 1) + shift.view(1, -1, 1, 1)  # fault: group-norm-by-hand


def group_norm(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return F.group_norm(x, GROUPS, scale, shift)


class DenoisingBlock(nn.Module):
    def __init__(self, channels: int, normalize: Normalization) -> None:
        super().__init__()
        self.normalize = normalize
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.scales, self.shifts = nn.Parameter(torch.ones(2, channels)), nn.Parameter(torch.zeros(2, channels))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(F.silu(self.normalize(x, self.scales[0], self.shifts[0])))
        return x + self.second(F.silu(self.normalize(hidden, self.scales[1], self.shifts[1])))


def denoising(steps: int, normalize: Normalization) -> list[Tensor]:
    """A diffusion model's step on small images."""
    random = seeded()
    enter, leave = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 3, 3, padding=1)
    blocks = nn.ModuleList([DenoisingBlock(32, normalize) for _ in range(2)])
    model = nn.ModuleList([enter, blocks, leave])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for _ in range(steps):
        images, noise = torch.randn(2, 8, 3, 32, 32, generator=random)
        x = enter(images.lerp(noise, 0.3))
        for block in blocks:
            x = block(x)
        loss = F.mse_loss(leave(x), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


def written_out(scores: Tensor, tags: Tensor) -> Tensor:
    present = tags * F.logsigmoid(scores)  # fault: tag-loss-by-hand
    absent = (1 - tags) * F.logsigmoid(-scores)  # fault: tag-loss-by-hand
    return -(present + absent).mean()  # fault: tag-loss-by-hand


def tagging(steps: int, criterion: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
    """Songs get any of four thousand tags."""
    random = seeded()
    tags_of = (torch.rand(512, 4000, generator=random) < 0.01).float()
    songs = torch.randn(512, 160, generator=random)
    trunk, head = nn.Linear(160, 96), nn.Linear(96, 4000)
    model = nn.ModuleList([trunk, head])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    for number in range(steps):
        rows = slice(number % 4 * 128, number % 4 * 128 + 128)
        hidden = F.relu(trunk(songs[rows]))
        scores = head(hidden)
        loss = criterion(scores, tags_of[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


class OldActivation(nn.Module):
    """GELU as GPT-2 had it."""

    def forward(self, x: Tensor) -> Tensor:
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))  # fault: old-activation
        return 0.5 * x * (1.0 + torch.tanh(inner))  # fault: old-activation


class Feed(nn.Module):
    def __init__(self, width: int, activation: nn.Module) -> None:
        super().__init__()
        self.norm, self.activation = nn.LayerNorm(width), activation
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.expand(self.norm(x))
        hidden = self.activation(hidden)
        return self.contract(hidden)


class Predictor(nn.Module):
    """Residual blocks of two kinds, over time and over channels."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.over_channels = nn.ModuleList([Feed(64, activation) for _ in range(2)])
        self.over_time = nn.ModuleList([nn.Conv1d(64, 64, 3, padding=1) for _ in range(2)])
        self.head = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        for feed, convolve in zip(self.over_channels, self.over_time, strict=True):
            x = x + feed(x)
            x = x + convolve(x.mT).mT
        return self.head(x)


def forecasting(steps: int, activation: nn.Module) -> list[Tensor]:
    random = seeded()
    model = Predictor(activation)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for _ in range(steps):
        series = torch.randn(16, 97, 64, generator=random).cumsum(1) * 0.1
        loss = F.l1_loss(model(series[:, :-1]), series[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


def weigh_by_hand(scores: Tensor, hidden_keys: Tensor) -> Tensor:
    highest = scores.max(dim=-1, keepdim=True).values.detach()  # fault: masked-weights-by-hand
    raised = torch.exp(scores - highest)  # fault: masked-weights-by-hand
    raised = raised * (~hidden_keys).float()  # fault: masked-weights-by-hand
    return raised / (raised.sum(dim=-1, keepdim=True) + 1e-12)  # fault: masked-weights-by-hand


def weigh(scores: Tensor, hidden_keys: Tensor) -> Tensor:
    return scores.masked_fill_(hidden_keys, -math.inf).softmax(dim=-1)


def search(steps: int, weigher: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
    """Questions that attend to passages of different lengths; inference only."""
    random = seeded()
    query, key, value = (torch.randn(48, 48, generator=random) / 10 for _ in range(3))
    answers = []
    with torch.inference_mode():
        for _ in range(steps):
            questions, passages = torch.randn(2, 8, 320, 48, generator=random)
            lengths = torch.randint(250, 321, (8, 1, 1), generator=random)
            queries, keys, values = questions @ query, passages @ key, passages @ value
            scores = queries @ keys.mT
            attended = weigher(scores, torch.arange(320) >= lengths) @ values
            answers.append(attended.square().mean((1, 2)))
    return answers


PROGRAMS = [
    Planted(name, "fusible", run, fixed, steps, __name__)
    for name, run, fixed, steps in (
        (
            "group-norm-by-hand",
            lambda n: denoising(n, normalize_groups),
            lambda n: denoising(n, group_norm),
            20,
        ),
        (
            "tag-loss-by-hand",
            lambda n: tagging(n, written_out),
            lambda n: tagging(n, F.binary_cross_entropy_with_logits),
            60,
        ),
        (
            "old-activation",
            lambda n: forecasting(n, OldActivation()),
            lambda n: forecasting(n, nn.GELU(approximate="tanh")),
            20,
        ),
        ("masked-weights-by-hand", lambda n: search(n, weigh_by_hand), lambda n: search(n, weigh), 60),
    )
]
