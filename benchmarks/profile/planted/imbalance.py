"""Forward passes whose gradients take far longer than they have to."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.profile.planted.program import Planted, seeded, weights


class Recurrence(nn.Module):
    """A gated linear recurrence over time."""

    def __init__(self, unbound: bool) -> None:
        super().__init__()
        self.gate, self.value, self.out = nn.Linear(16, 64), nn.Linear(16, 64), nn.Linear(64, 16)
        self.unbound = unbound

    def forward(self, x: Tensor) -> Tensor:
        gates, values = torch.sigmoid(self.gate(x)), self.value(x)
        state = values.new_zeros(x.shape[0], 64)
        if self.unbound:
            for gate, value in zip(gates.unbind(1), values.unbind(1), strict=True):
                state = torch.lerp(value, state, gate)
        else:
            for t in range(x.shape[1]):
                state = torch.lerp(values[:, t], state, gates[:, t])  # fault: slices-of-time
        return self.out(state)


def recurrence(steps: int, unbound: bool) -> list[Tensor]:
    random = seeded()
    model = Recurrence(unbound)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    x, y = torch.randn(16, 96, 16, generator=random), torch.randn(16, 16, generator=random)
    for _ in range(steps):
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


def rollout(start: Tensor, move: nn.Linear, length: int) -> Tensor:
    path = torch.zeros(length, *start.shape)
    state = start
    for index in range(length):
        state = torch.tanh(move(state))
        path[index] = state  # fault: written-in-place
    return path


def stacked_rollout(start: Tensor, move: nn.Linear, length: int) -> Tensor:
    path, state = [], start
    for _ in range(length):
        state = torch.tanh(move(state))
        path.append(state)
    return torch.stack(path)


def dynamics(steps: int, in_place: bool) -> list[Tensor]:
    """Fits a map whose whole trajectory is known."""
    random = seeded()
    unroll = rollout if in_place else stacked_rollout
    move = nn.Linear(32, 32)
    optimizer = torch.optim.SGD(move.parameters(), lr=0.1, fused=True)
    start, path = torch.randn(128, 32, generator=random), torch.randn(60, 128, 32, generator=random)
    for _ in range(steps):
        loss = (unroll(start, move, 60) - path).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(move)


class SkipGram(nn.Module):
    """Word vectors from pairs of words that are near each other."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.words, self.contexts = (nn.Embedding(20_000, 32, sparse=sparse) for _ in range(2))

    def forward(self, word: Tensor, context: Tensor, other: Tensor) -> Tensor:
        vector = self.words(word)  # fault: dense-table-gradient
        near, far = self.contexts(torch.stack([context, other]))  # fault: dense-table-gradient
        return F.softplus(-(vector * near).sum(1)).mean() + F.softplus((vector * far).sum(1)).mean()


def word_vectors(steps: int, sparse: bool) -> list[Tensor]:
    random = seeded()
    model = SkipGram(sparse)
    for table in (model.words, model.contexts):
        nn.init.uniform_(table.weight, -0.1, 0.1, generator=random)
    pairs = torch.randint(0, 20_000, (steps, 3, 512), generator=random)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for word, context, other in pairs:
        loss = model(word, context, other)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


def survival(hazard: Tensor) -> Tensor:
    return torch.cumprod(1 - hazard, dim=1)  # fault: cumprod-with-zeros


def survival_of_logs(hazard: Tensor) -> Tensor:
    alive = (1 - hazard).clamp(min=1e-30)
    return torch.exp(torch.cumsum(torch.log(alive), dim=1))


def survival_model(steps: int, by_product: bool) -> list[Tensor]:
    """Discrete-time survival; some subjects have certainly died, so that the product is zero."""
    random = seeded()
    curve = survival if by_product else survival_of_logs
    model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 48))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    x, observed = torch.randn(64, 12, generator=random), torch.rand(64, 48, generator=random)
    died = torch.rand(64, 48, generator=random) < 0.05
    for _ in range(steps):
        hazard = torch.sigmoid(model(x)).masked_fill(died, 1.0)
        loss = F.mse_loss(curve(hazard), observed)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


PROGRAMS = [
    Planted("slices-of-time", "imbalance", lambda n: recurrence(n, False), lambda n: recurrence(n, True), 60, __name__),
    Planted("written-in-place", "imbalance", lambda n: dynamics(n, True), lambda n: dynamics(n, False), 40, __name__),
    Planted(
        "dense-table-gradient",
        "imbalance",
        lambda n: word_vectors(n, False),
        lambda n: word_vectors(n, True),
        250,
        __name__,
    ),
    Planted(
        "cumprod-with-zeros",
        "imbalance",
        lambda n: survival_model(n, True),
        lambda n: survival_model(n, False),
        400,
        __name__,
    ),
]
