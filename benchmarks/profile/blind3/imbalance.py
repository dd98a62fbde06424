"""Lines whose gradient takes far longer than usual for what they do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.profile.planted.program import Planted, seeded, weights


def frames_by_number(encoded: Tensor) -> list[Tensor]:
    return [encoded[:, frame] for frame in range(encoded.shape[1])]  # fault: frame-by-frame


def frames_at_once(encoded: Tensor) -> Sequence[Tensor]:
    return encoded.unbind(1)


class Recognizer(nn.Module):
    """A convolution over the frames of speech, then a recurrent cell over what it gives."""

    def __init__(self, frames_of: Callable[[Tensor], Sequence[Tensor]]) -> None:
        super().__init__()
        self.frames_of = frames_of
        self.convolve, self.head = nn.Conv1d(40, 96, 5, padding=2), nn.Linear(96, 30)
        self.read, self.recur = nn.Linear(96, 96), nn.Linear(96, 96)

    def forward(self, speech: Tensor) -> Tensor:
        encoded = F.relu(self.convolve(speech)).mT.contiguous()
        state = encoded.new_zeros(len(speech), 96)
        for frame in self.frames_of(encoded):
            heard = self.read(frame)
            expected = self.recur(state)
            state = torch.tanh(heard + expected)
        return self.head(state)


def recognition(steps: int, frames_of: Callable[[Tensor], Sequence[Tensor]]) -> list[Tensor]:
    random = seeded()
    model = Recognizer(frames_of)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for _ in range(steps):
        speech, words = torch.randn(16, 40, 200, generator=random), torch.randint(0, 30, (16,), generator=random)
        loss = F.cross_entropy(model(speech), words)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


def pick_by_index(rows: Tensor, which: Tensor) -> Tensor:
    return rows[which]  # fault: picked-by-index


def pick_by_selection(rows: Tensor, which: Tensor) -> Tensor:
    return rows.index_select(0, which)


class Molecules(nn.Module):
    """Messages along bonds, from the states of the atoms at both ends."""

    def __init__(self, pick: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.pick = pick
        self.read = nn.Linear(16, 64)
        self.sent, self.received, self.update = (nn.Linear(64, 64) for _ in range(3))
        self.energy = nn.Linear(64, 1)

    def forward(self, atoms: Tensor, source: Tensor, target: Tensor) -> Tensor:
        state = F.relu(self.read(atoms))
        for _ in range(2):
            ends = self.pick(self.sent(state), source) + self.pick(self.received(state), target)
            gathered = torch.zeros_like(state).index_add(0, target, F.relu(ends))
            state = state + torch.tanh(self.update(gathered))
        return self.energy(state).mean()


def energies(steps: int, pick: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
    random = seeded()
    model = Molecules(pick)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    atoms = torch.randn(900, 16, generator=random)
    source, target = torch.randint(0, 900, (2, 9000), generator=random)
    for number in range(steps):
        loss = (model(atoms, source, target) - number % 3).square()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


def neighbours_from_pairs(points: Tensor, nearest: Tensor) -> Tensor:
    """What each point's neighbours are, taken from all pairs of points: (batch, points, neighbours, width)."""
    batch, count, width = points.shape
    pairs = points.unsqueeze(1).expand(batch, count, count, width)
    return pairs.gather(2, nearest.unsqueeze(3).expand(-1, -1, -1, width))  # fault: neighbours-from-pairs


def neighbours_from_points(points: Tensor, nearest: Tensor) -> Tensor:
    batch, count, width = points.shape
    rows = (nearest + count * torch.arange(batch).view(-1, 1, 1)).flatten()
    return points.flatten(0, 1).index_select(0, rows).view(batch, count, -1, width)


class EdgeConvolution(nn.Module):
    def __init__(self, inputs: int, outputs: int, pick: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.pick = pick
        self.own, self.other, self.join = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs), nn.Linear(outputs, 96)

    def forward(self, points: Tensor, nearest: Tensor) -> Tensor:
        near = self.pick(self.other(points), nearest)
        edges = F.relu(near + self.own(points).unsqueeze(2))
        joined = self.join(edges)
        return joined.amax(2)


class PointCloud(nn.Module):
    def __init__(self, pick: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = EdgeConvolution(3, 32, pick), EdgeConvolution(96, 32, pick)
        self.head = nn.Linear(96, 8)

    def forward(self, points: Tensor) -> Tensor:
        nearest = torch.cdist(points, points).topk(12, largest=False).indices
        x = self.first(points, nearest)
        x = self.second(x, nearest)
        return self.head(x.amax(1))


def shapes(steps: int, pick: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
    """Tells shapes by their points, with convolutions along edges to the nearest ones."""
    random = seeded()
    model = PointCloud(pick)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for _ in range(steps):
        points, labels = torch.randn(8, 128, 3, generator=random), torch.randint(0, 8, (8,), generator=random)
        loss = F.cross_entropy(model(points), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


PROGRAMS = [
    Planted(name, "imbalance", run, fixed, steps, __name__)
    for name, run, fixed, steps in (
        (
            "frame-by-frame",
            lambda n: recognition(n, frames_by_number),
            lambda n: recognition(n, frames_at_once),
            8,
        ),
        ("picked-by-index", lambda n: energies(n, pick_by_index), lambda n: energies(n, pick_by_selection), 30),
        (
            "neighbours-from-pairs",
            lambda n: shapes(n, neighbours_from_pairs),
            lambda n: shapes(n, neighbours_from_points),
            12,
        ),
    )
]
