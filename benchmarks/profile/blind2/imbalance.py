"""Lines whose gradient takes far longer than the line itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.profile.planted.program import Planted, seeded, weights


def frames_by_index(clips: Tensor) -> list[Tensor]:
    return [clips[:, :, frame] for frame in range(clips.shape[2])]  # fault: frame-by-frame


def frames_at_once(clips: Tensor) -> list[Tensor]:
    return list(clips.unbind(2))


class GatedRecurrence(nn.Module):
    """A recurrent layer of one's own: an exponential average whose rate is learned and depends on the input."""

    def __init__(self, width: int, frames: Callable[[Tensor], list[Tensor]]) -> None:
        super().__init__()
        self.rate, self.frames = nn.Linear(width, width), frames

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, :, 0])
        for frame in self.frames(x):
            state = torch.lerp(state, frame, torch.sigmoid(self.rate(state)))
        return state


def keywords(steps: int, frames: Callable[[Tensor], list[Tensor]]) -> list[Tensor]:
    """Spoken keywords from a spectrogram of which each frame is taken in turn."""
    random = seeded()
    front, layer, head = nn.Conv1d(40, 64, 3, padding=1), GatedRecurrence(64, frames), nn.Linear(64, 12)
    parameters = [*front.parameters(), *layer.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    for _ in range(steps):
        spectrogram = torch.randn(32, 40, 160, generator=random)
        labels = torch.randint(0, 12, (32,), generator=random)
        loss = F.cross_entropy(head(layer(F.relu(front(spectrogram)))), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in parameters]


class Forecaster(nn.Module):
    """Predicts a series step by step; what is predicted is the next step's input."""

    def __init__(self, series: int, width: int, preallocated: bool) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(series, width), nn.Linear(width, series)
        self.preallocated = preallocated

    def forward(self, history: Tensor, horizon: int) -> Tensor:
        value, state = history, self.cell.weight_hh.new_zeros(len(history), self.cell.hidden_size)
        if self.preallocated:
            predictions = history.new_zeros(len(history), horizon, history.shape[1])
            for step in range(horizon):
                state = self.cell(value, state)
                value = self.head(state)
                predictions[:, step] = value  # fault: written-into-a-tensor
            return predictions
        values = []
        for _ in range(horizon):
            state = self.cell(value, state)
            value = self.head(state)
            values.append(value)
        return torch.stack(values, dim=1)


def forecasting(steps: int, preallocated: bool) -> list[Tensor]:
    random = seeded()
    model = Forecaster(series=128, width=32, preallocated=preallocated)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, fused=True)
    load = torch.randn(64, 97, 128, generator=random).cumsum(dim=1)
    for _ in range(steps):
        loss = F.l1_loss(model(load[:, 0], 96), load[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
    return weights(model)


class TwoTowers(nn.Module):
    """Recommends items to users by the dot product of what is learned of each."""

    def __init__(self, items: int, width: int, sparse: bool) -> None:
        super().__init__()
        self.users = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, width))
        self.items = nn.Embedding(items, width, sparse=sparse)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        candidates = self.items(items)  # fault: dense-item-gradients
        return torch.einsum("bd,bnd->bn", self.users(users), candidates)


def recommending(steps: int, sparse: bool) -> list[Tensor]:
    random = seeded()
    model = TwoTowers(60_000, 48, sparse)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(steps):
        users = torch.randn(128, 32, generator=random)
        items = torch.randint(0, 60_000, (128, 9), generator=random)  # one that was bought, eight that were not
        loss = F.cross_entropy(model(users, items), torch.zeros(128, dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


PROGRAMS = [
    Planted(
        "frame-by-frame",
        "imbalance",
        lambda steps: keywords(steps, frames_by_index),
        lambda steps: keywords(steps, frames_at_once),
        steps=10,
        module=__name__,
    ),
    Planted(
        "written-into-a-tensor",
        "imbalance",
        lambda steps: forecasting(steps, True),
        lambda steps: forecasting(steps, False),
        steps=8,
        module=__name__,
    ),
    Planted(
        "dense-item-gradients",
        "imbalance",
        lambda steps: recommending(steps, False),
        lambda steps: recommending(steps, True),
        steps=60,
        module=__name__,
    ),
]
