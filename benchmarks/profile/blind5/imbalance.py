"""Lines of the forward pass whose gradient takes far longer than it needs to."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.profile.planted.program import Planted, seeded, weights


def support_of(scores: Tensor) -> Tensor:
    """Probabilities of which most are zero: the point of the simplex that is nearest to the scores."""
    descending = scores.sort(1, descending=True).values
    sums = descending.cumsum(1) - 1
    ranks = torch.arange(1, scores.size(1) + 1)
    size = (descending * ranks > sums).sum(1, keepdim=True)
    return (scores - sums.gather(1, size - 1) / size).clamp(min=0)


class SparseMax(torch.autograd.Function):
    """Sparsemax with a gradient that was written down for one row, and is gone through row by row."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        chances = support_of(scores)
        ctx.save_for_backward(chances)
        return chances

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (chances,), (gradient,) = ctx.saved_tensors, gradients
        result = torch.zeros_like(gradient)
        for row in range(len(chances)):
            used = chances[row] > 0
            part = gradient[row][used]
            result[row][used] = part - part.mean()
        return result


class SparseMaxOfAll(torch.autograd.Function):
    """The same with a gradient for all rows at once."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        chances = support_of(scores)
        ctx.save_for_backward(chances)
        return chances

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (chances,), (gradient,) = ctx.saved_tensors, gradients
        used = (chances > 0).to(gradient.dtype)
        mean = (gradient * used).sum(1, keepdim=True) / used.sum(1, keepdim=True)
        return (gradient - mean) * used


class Reader(nn.Module):
    """Looks up what it needs in a few of many notes."""

    def __init__(self, row_by_row: bool) -> None:
        super().__init__()
        self.row_by_row = row_by_row
        self.ask, self.question = nn.Linear(64, 512), nn.Linear(512, 64)
        self.notes, self.values = nn.Parameter(torch.randn(128, 64)), nn.Parameter(torch.randn(128, 64))
        self.wide, self.answer = nn.Linear(64, 512), nn.Linear(512, 16)

    def forward(self, x: Tensor) -> Tensor:
        question = self.question(torch.relu(self.ask(x)))
        scores = question @ self.notes.T / 8
        if self.row_by_row:
            chances = SparseMax.apply(scores)  # fault: gradient-by-rows
        else:
            chances = SparseMaxOfAll.apply(scores)
        read = chances @ self.values
        return self.answer(torch.relu(self.wide(read)))


def looking_up(steps: int, row_by_row: bool) -> list[Tensor]:
    random = seeded()
    model = Reader(row_by_row)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9, fused=True)
    for _ in range(steps):
        x = torch.randn(160, 64, generator=random)
        loss = F.mse_loss(model(x), x[:, :16].cos())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


SHAPES = [(64, 20), (64,), *[(64, 64), (64,)] * 10, (4, 64), (4,)]


class FromOneVector(nn.Module):
    """All weights of a perceptron in one vector, as those want it who sample weights or compute Hessians."""

    def __init__(self, by_slices: bool) -> None:
        super().__init__()
        self.by_slices = by_slices
        self.sizes = [torch.Size(shape).numel() for shape in SHAPES]
        self.theta = nn.Parameter(torch.randn(sum(self.sizes)) * 0.12)

    def parts(self) -> list[Tensor]:
        if not self.by_slices:
            pieces = torch.split(self.theta, self.sizes)
            return [piece.view(shape) for piece, shape in zip(pieces, SHAPES, strict=True)]
        result, start = [], 0
        for shape, size in zip(SHAPES, self.sizes, strict=True):
            result.append(self.theta[start : start + size].view(shape))  # fault: weights-sliced-from-a-vector
            start += size
        return result

    def forward(self, x: Tensor) -> Tensor:
        parts = self.parts()
        for index in range(0, len(parts) - 2, 2):
            x = torch.tanh(F.linear(x, parts[index], parts[index + 1]))
        return F.linear(x, parts[-2], parts[-1])


def one_vector(steps: int, by_slices: bool) -> list[Tensor]:
    """The most probable weights, under a normal prior."""
    random = seeded()
    model = FromOneVector(by_slices)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, fused=True)
    for _ in range(steps):
        x = torch.randn(96, 20, generator=random)
        y = x.view(96, 4, 5).sum(2)
        loss = F.mse_loss(model(x), y) + 1e-4 * model.theta.square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


class Rhythm(nn.Module):
    """How regular a series is, from how alike moments are that lie so and so far apart."""

    def __init__(self, in_turn: bool) -> None:
        super().__init__()
        self.in_turn = in_turn
        self.read, self.describe = nn.Conv1d(4, 96, 5, padding=2), nn.Conv1d(96, 64, 5, padding=2)
        self.judge = nn.Linear(40, 3)

    def alike(self, x: Tensor) -> Tensor:
        """Means of the first forty diagonals of the matrix that compares all moments."""
        pairs = torch.bmm(x.mT, x) / 8
        length = pairs.size(1)
        if self.in_turn:
            means = []
            for apart in range(40):
                means.append(pairs.diagonal(apart, 1, 2).mean(1))  # fault: diagonal-after-diagonal
            return torch.stack(means, 1)
        sheared = F.pad(pairs.flip(2), (0, length)).flatten(1)[:, : length * (2 * length - 1)]
        sums = sheared.view(-1, length, 2 * length - 1).sum(1)
        return sums[:, :length].flip(1)[:, :40] / torch.arange(length, length - 40, -1)

    def forward(self, series: Tensor) -> Tensor:
        x = torch.tanh(self.read(series))
        x = torch.tanh(self.describe(x))
        return self.judge(self.alike(x))


def rhythm(steps: int, in_turn: bool) -> list[Tensor]:
    random = seeded()
    model = Rhythm(in_turn)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    for _ in range(steps):
        series, kinds = torch.randn(24, 4, 96, generator=random), torch.randint(0, 3, (24,), generator=random)
        loss = F.cross_entropy(model(series), kinds)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


class Vitals(nn.Module):
    """Is a patient well? A recurrent network that is stepped by hand, for each minute of what was measured."""

    def __init__(self, by_number: bool) -> None:
        super().__init__()
        self.by_number = by_number
        self.read, self.cell, self.well = nn.Linear(9, 48), nn.RNNCell(48, 64), nn.Linear(64, 1)

    def forward(self, measured: Tensor) -> Tensor:
        x = torch.relu(self.read(measured))
        state = x.new_zeros(len(x), 64)
        if self.by_number:
            for minute in range(x.size(1)):
                state = self.cell(x[:, minute], state)  # fault: minutes-by-number
        else:
            for now in x.unbind(1):
                state = self.cell(now, state)
        return self.well(state).squeeze(1)


def vitals(steps: int, by_number: bool) -> list[Tensor]:
    random = seeded()
    model = Vitals(by_number)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, fused=True)
    for _ in range(steps):
        measured = torch.randn(48, 60, 9, generator=random)
        well = (measured[:, -1, 0] > 0).float()
        loss = F.binary_cross_entropy_with_logits(model(measured), well)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
    return weights(model)


PROGRAMS = [
    Planted(name, "imbalance", run, fixed, steps, __name__)
    for name, run, fixed, steps in (
        ("gradient-by-rows", lambda n: looking_up(n, True), lambda n: looking_up(n, False), 120),
        ("weights-sliced-from-a-vector", lambda n: one_vector(n, True), lambda n: one_vector(n, False), 500),
        ("diagonal-after-diagonal", lambda n: rhythm(n, True), lambda n: rhythm(n, False), 70),
        ("minutes-by-number", lambda n: vitals(n, True), lambda n: vitals(n, False), 90),
    )
]
