"""Code that is traced or compiled again and again, or whose graph breaks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch._dynamo
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.profile.planted.program import Planted, seeded, weights


class Annealed(nn.Module):
    """Attention over prototypes, which sharpens in the course of the training."""

    def __init__(self) -> None:
        super().__init__()
        self.prototypes, self.read = nn.Parameter(torch.randn(64, 48)), nn.Linear(48, 48)
        self.write = nn.Linear(48, 10)

    def forward(self, x: Tensor, sharpness: float | Tensor) -> Tensor:
        scores = torch.tanh(self.read(x)) @ self.prototypes.T
        return self.write((scores * sharpness).softmax(1) @ self.prototypes)


def annealing(steps: int, as_tensor: bool) -> list[Tensor]:
    random = seeded()
    torch._dynamo.reset()
    model = Annealed()
    forward = torch.compile(model, backend="aot_eager", dynamic=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for number in range(steps):
        x, labels = torch.randn(512, 48, generator=random), torch.randint(0, 10, (512,), generator=random)
        sharpness = 1.0 + number // 20
        scores = forward(x, torch.tensor(sharpness) if as_tensor else sharpness)  # fault: sharpness-as-number
        loss = F.cross_entropy(scores, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


class Cell(nn.Module):
    """A step of a simulated vehicle and the controller that drives it."""

    def __init__(self, checks: bool) -> None:
        super().__init__()
        self.checks = checks
        self.see, self.act = nn.Linear(6, 48), nn.Linear(48, 6)

    def forward(self, state: Tensor) -> Tensor:
        seen = torch.tanh(self.see(state))
        pushed = 0.1 * self.act(seen)
        if self.checks and not torch.isfinite(pushed).all():  # fault: checked-in-compiled-code
            raise ValueError("the controller diverged")
        return (state + pushed - 0.01 * state.sin()).clamp(-5, 5)


def driving(steps: int, checks: bool) -> list[Tensor]:
    """Vehicles that are driven for a while; the twin checks where they end."""
    random = seeded()
    torch._dynamo.reset()
    cell = Cell(checks)
    advance = torch.compile(cell, backend="eager")
    states = torch.randn(64, 6, generator=random)
    with torch.no_grad():
        for _ in range(steps):
            for _ in range(20):
                states = advance(states)
            if not torch.isfinite(states).all():
                raise ValueError("the controller diverged")
            states = states + 0.1 * torch.randn(64, 6, generator=random)
    return [states]


class Embedder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, stride=2), nn.Conv2d(16, 32, 3, stride=2)
        self.third, self.classify = nn.Conv2d(32, 64, 3, stride=2), nn.Linear(64, 100)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        x = F.relu(self.second(x))
        x = F.relu(self.third(x))
        return self.classify(x.mean((2, 3)))


def without_head(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """The model up to the layer that classifies."""
    traced = torch.fx.symbolic_trace(model)  # fault: cut-for-each-batch
    for node in list(traced.graph.nodes):
        if node.target == "classify":
            node.replace_all_uses_with(node.args[0])
            traced.graph.erase_node(node)
    traced.recompile()
    return traced


def duplicates(steps: int, each_batch: bool) -> list[Tensor]:
    """Pictures that look alike, by the features of a classifier."""
    random = seeded()
    model = Embedder().eval()
    features = None if each_batch else without_head(model)
    found = []
    with torch.inference_mode():
        for _ in range(steps):
            images = torch.rand(8, 3, 48, 48, generator=random)
            embed = features if features is not None else without_head(model)  # fault: cut-for-each-batch
            vectors = F.normalize(embed(images), dim=1)
            found.append((vectors @ vectors.T).triu(1).amax(1))
    return found


PROGRAMS = [
    Planted(name, "retracing", run, fixed, steps, __name__)
    for name, run, fixed, steps in (
        ("sharpness-as-number", lambda n: annealing(n, False), lambda n: annealing(n, True), 120),
        ("checked-in-compiled-code", lambda n: driving(n, True), lambda n: driving(n, False), 120),
        ("cut-for-each-batch", lambda n: duplicates(n, True), lambda n: duplicates(n, False), 120),
    )
]
