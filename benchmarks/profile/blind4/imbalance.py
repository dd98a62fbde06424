"""Lines whose gradient takes far longer than usual for what they do."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.profile.planted.program import Planted, seeded, weights


def windows_of(states: Tensor, size: int) -> Tensor:
    """All windows of a time series: (batch, windows, width, size)."""
    batch, width, length = states.shape
    row, column, step = states.stride()
    shape, strides = (batch, length - size + 1, width, size), (row, step, column, step)
    return states.as_strided(shape, strides)  # fault: windows-by-strides


class LoadForecast(nn.Module):
    """Compares all windows of a day with days of a kind."""

    def __init__(self, by_strides: bool) -> None:
        super().__init__()
        self.by_strides = by_strides
        self.read, self.kinds = nn.Conv1d(4, 16, 1), nn.Linear(16 * 24, 16)
        self.head = nn.Linear(16, 1)

    def compare(self, states: Tensor) -> Tensor:
        if self.by_strides:
            return self.kinds(windows_of(states, 24).flatten(2))
        return F.conv1d(states, self.kinds.weight.view(-1, 16, 24), self.kinds.bias).mT

    def forward(self, series: Tensor) -> Tensor:
        states = torch.tanh(self.read(series))
        alike = F.relu(self.compare(states))
        return self.head(alike.mean(1))


def load(steps: int, by_strides: bool) -> list[Tensor]:
    random = seeded()
    model = LoadForecast(by_strides)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for _ in range(steps):
        series, following = torch.randn(16, 4, 240, generator=random), torch.randn(16, 1, generator=random)
        loss = F.mse_loss(model(series), following)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


def cut_one_by_one(features: Tensor, boxes: list[list[int]], size: int) -> Tensor:
    """What is in each box: (boxes, channels, size, size)."""
    cuts = []
    for image, top, left in boxes:
        cuts.append(features[image, :, top : top + size, left : left + size])  # fault: boxes-cut-out
    return torch.stack(cuts)


def cut_at_once(features: Tensor, boxes: list[list[int]], size: int) -> Tensor:
    _, channels, height, width = features.shape
    image, top, left = torch.tensor(boxes).unbind(1)
    inside = torch.arange(size)
    rows = (image * height + top)[:, None, None] + inside[:, None]
    places = (rows * width + left[:, None, None] + inside).flatten()
    pixels = features.permute(0, 2, 3, 1).flatten(0, 2)
    return pixels.index_select(0, places).view(len(boxes), size, size, channels).permute(0, 3, 1, 2)


class BoxClassifier(nn.Module):
    def __init__(self, cut: Callable[[Tensor, list[list[int]], int], Tensor]) -> None:
        super().__init__()
        self.cut = cut
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.hide, self.classify = nn.Linear(16 * 36, 128), nn.Linear(128, 10)

    def forward(self, images: Tensor, boxes: list[list[int]]) -> Tensor:
        x = F.relu(self.first(images))
        x = F.relu(self.second(x))
        inside = self.cut(x, boxes, 6).flatten(1)
        return self.classify(F.relu(self.hide(inside)))


def things(steps: int, cut: Callable[[Tensor, list[list[int]], int], Tensor]) -> list[Tensor]:
    """Classes of what is in the boxes of street scenes."""
    random = seeded()
    model = BoxClassifier(cut)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    for _ in range(steps):
        images, labels = torch.randn(2, 3, 64, 64, generator=random), torch.randint(0, 10, (48,), generator=random)
        corners = torch.randint(0, 58, (48, 2), generator=random)
        boxes = [[number % 2, *corner] for number, corner in enumerate(corners.tolist())]
        loss = F.cross_entropy(model(images, boxes), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


class SharedByExpansion(nn.Module):
    """The same matrix for every team."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x, self.weight.expand(len(x), -1, -1))  # fault: matrix-for-each-team


class Shared(SharedByExpansion):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Teams(nn.Module):
    """The value of what the agents of a team see, who tell each other."""

    def __init__(self, kind: type[SharedByExpansion]) -> None:
        super().__init__()
        self.read, self.talk, self.value = nn.Linear(24, 96), kind(96), nn.Linear(96, 1)

    def forward(self, seen: Tensor) -> Tensor:
        x = torch.tanh(self.read(seen))
        told = self.talk(x).mean(1, keepdim=True)
        x = torch.tanh(x + told)
        return self.value(x).mean(1)


def cooperation(steps: int, kind: type[SharedByExpansion]) -> list[Tensor]:
    random = seeded()
    model = Teams(kind)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for _ in range(steps):
        seen, returns = torch.randn(256, 5, 24, generator=random), torch.randn(256, 1, generator=random)
        loss = F.mse_loss(model(seen), returns)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


PROGRAMS = [
    Planted(name, "imbalance", run, fixed, steps, __name__)
    for name, run, fixed, steps in (
        ("windows-by-strides", lambda n: load(n, True), lambda n: load(n, False), 50),
        ("boxes-cut-out", lambda n: things(n, cut_one_by_one), lambda n: things(n, cut_at_once), 60),
        (
            "matrix-for-each-team",
            lambda n: cooperation(n, SharedByExpansion),
            lambda n: cooperation(n, Shared),
            60,
        ),
    )
]
