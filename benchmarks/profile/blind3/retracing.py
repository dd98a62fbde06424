"""Code that is traced or compiled again and again, or whose graph breaks."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.profile.planted.program import Planted, seeded, weights

Field = Callable[[Tensor], Tensor]


def make_field(weight: Tensor, strength: float) -> Field:
    def field(points: Tensor) -> Tensor:
        return strength * torch.tanh(points @ weight) - 0.1 * points

    return field


def midpoint(field: Field, points: Tensor) -> Tensor:
    half = points + 0.05 * field(points)
    return points + 0.1 * field(half)


def flow(steps: int, each_time: bool) -> Tensor:
    """Points that flow along a field, whose strength changes every thirty steps."""
    random = seeded()
    torch._dynamo.reset()
    points, weight = torch.randn(400, 96, generator=random), torch.randn(96, 96, generator=random) / 10
    advance = torch.compile(lambda points, strength: midpoint(make_field(weight, strength), points), backend="eager")
    for number in range(steps):
        strength = torch.tensor(1.0 + number // 30 % 4)
        if each_time:
            field = make_field(weight, float(strength))
            advance_by_field = torch.compile(lambda points, field=field: midpoint(field, points), backend="eager")
            points = advance_by_field(points)  # fault: compiled-in-the-loop
        else:
            points = advance(points, strength)
    return points


class Ranker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items, self.first, self.second = nn.Embedding(500, 64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, items: Tensor, user: Tensor) -> Tensor:
        vectors = self.items(items)
        hidden = F.relu(self.first(vectors * user))
        return self.second(hidden).sum(1)


class Service:
    """Answers requests by a script of the model."""

    def __init__(self, model: nn.Module, keeps: bool) -> None:
        self.model, self.keeps = model, keeps
        self.script: torch.jit.ScriptModule | None = None
        self.read, self.sum_up = nn.Linear(96, 256), nn.Linear(256, 64)

    def scripted(self, items: Tensor, user: Tensor) -> torch.jit.ScriptModule:
        if self.script is None or not self.keeps:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                script = torch.jit.trace(self.model, (items, user), check_trace=False)  # fault: traced-for-each-request
                self.script = torch.jit.freeze(script)  # fault: traced-for-each-request
        return self.script

    def answer(self, items: Tensor, history: Tensor) -> Tensor:
        with torch.no_grad():
            taste = torch.tanh(self.read(history))
            user = self.sum_up(taste).mean(0)
            script = self.scripted(items, user)
            return script(items, user).topk(5).indices


def requests(steps: int, keeps: bool) -> list[Tensor]:
    random = seeded()
    service = Service(Ranker().eval(), keeps)
    with torch.jit.optimized_execution(False):
        return [
            service.answer(torch.randint(0, 500, (400,), generator=random), torch.randn(600, 96, generator=random))
            for _ in range(steps)
        ]


class Attention(nn.Module):
    """Attends to neighbours, of whom each batch has another number."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor, neighbours: Tensor, valid: Tensor) -> Tensor:
        scores = (self.key(neighbours) @ self.query(x).unsqueeze(2)).squeeze(2)
        shares = scores.masked_fill(~valid, -1e9).softmax(1)
        return x + (shares.unsqueeze(1) @ self.value(neighbours)).squeeze(1)


def attend(steps: int, padded: bool) -> list[Tensor]:
    random = seeded()
    torch._dynamo.reset()
    model = Attention(64)
    layer = torch.compile(model, backend="aot_eager", dynamic=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    for number in range(steps):
        count = 4 + number * 5 % 24 // 4
        x, neighbours = torch.randn(64, 64, generator=random), torch.randn(64, count, 64, generator=random)
        valid = torch.ones(64, count, dtype=torch.bool)
        if padded:
            neighbours, valid = F.pad(neighbours, (0, 0, 0, 10 - count)), F.pad(valid, (0, 10 - count))
        loss = F.mse_loss(layer(x, neighbours, valid), x)  # fault: neighbours-by-count
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


PROGRAMS = [
    Planted(name, "retracing", run, fixed, steps, __name__)
    for name, run, fixed, steps in (
        ("compiled-in-the-loop", lambda n: flow(n, True), lambda n: flow(n, False), 100),
        ("traced-for-each-request", lambda n: requests(n, False), lambda n: requests(n, True), 90),
        ("neighbours-by-count", lambda n: attend(n, False), lambda n: attend(n, True), 40),
    )
]
