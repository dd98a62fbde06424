"""Programs in which one line takes most of the time, and need not."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.profile.planted.program import Planted, seeded, weights


def two_hops_of_graph(adjacency: Tensor, features: Tensor) -> Tensor:
    return adjacency @ adjacency @ features  # fault: adjacency-squared


def two_hops_of_features(adjacency: Tensor, features: Tensor) -> Tensor:
    return adjacency @ (adjacency @ features)


class SimpleGraphNetwork(nn.Module):
    """Linear layers around features of nodes two steps away."""

    def __init__(self, two_hops: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.two_hops = two_hops
        self.read, self.hide, self.classify = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 6)

    def forward(self, adjacency: Tensor, features: Tensor) -> Tensor:
        near = F.relu(self.read(features))
        far = self.two_hops(adjacency, near)
        return self.classify(F.relu(self.hide(far)))


def proteins(steps: int, two_hops: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
    """One small dense graph a step, as contact maps of proteins are."""
    random = seeded()
    model = SimpleGraphNetwork(two_hops)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for _ in range(steps):
        places = torch.rand(900, 3, generator=random)
        adjacency = (torch.cdist(places, places) < 0.2).float()
        adjacency = adjacency / adjacency.sum(1, keepdim=True)
        features, labels = torch.randn(900, 64, generator=random), torch.randint(0, 6, (900,), generator=random)
        loss = F.cross_entropy(model(adjacency, features), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


class LowRankLinear(nn.Module):
    """A frozen layer, and a low-rank change of it that is learned."""

    def __init__(self, width: int, rank: int, merges: bool) -> None:
        super().__init__()
        self.merges = merges
        self.frozen = nn.Buffer(torch.randn(width, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(rank, width) / width**0.5)
        self.up = nn.Parameter(torch.zeros(width, rank))

    def forward(self, x: Tensor) -> Tensor:
        if self.merges:
            return F.linear(x, self.frozen + self.up @ self.down)  # fault: adapter-merged-each-time
        return F.linear(x, self.frozen) + F.linear(F.linear(x, self.down), self.up)


class Backbone(nn.Module):
    def __init__(self, merges: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([LowRankLinear(768, 4, merges) for _ in range(3)])
        self.norm, self.head = nn.LayerNorm(768), nn.Linear(768, 20)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.gelu(layer(self.norm(x)))
        return self.head(x)


def fine_tuning(steps: int, merges: bool) -> list[Tensor]:
    """Intents of short sentences, from a frozen network with adapters."""
    random = seeded()
    model = Backbone(merges)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for _ in range(steps):
        x, labels = torch.randn(16, 768, generator=random), torch.randint(0, 20, (16,), generator=random)
        loss = F.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


def trend_by_convolution(series: Tensor, window: int) -> Tensor:
    kernel = torch.full((1, 1, window), 1 / window, dtype=series.dtype)
    return F.conv1d(series.unsqueeze(1), kernel).squeeze(1)  # fault: trend-by-convolution


def trend_by_sums(series: Tensor, window: int) -> Tensor:
    sums = F.pad(series.cumsum(1), (1, 0))
    return (sums[:, window:] - sums[:, :-window]) / window


def anomalies(steps: int, trend: Callable[[Tensor, int], Tensor]) -> list[Tensor]:
    """The largest departures of sensors from their average over a week of hours."""
    random = seeded()
    window = 24 * 7
    found = []
    for _ in range(steps):
        series = torch.randn(32, 4000, generator=random, dtype=torch.float64).cumsum(1)
        rest = series[:, window - 1 :] - trend(series, window)
        spread = rest.std(1, keepdim=True)
        found.append((rest / spread).abs().topk(5, dim=1).values)
    return found


def discounts(length: int, gamma: float) -> Tensor:
    """How much each later reward counts at each time."""
    times = torch.arange(length, dtype=torch.float32)
    return torch.pow(gamma, (times - times[:, None]).clamp(min=0)).triu()  # fault: discounts-each-episode


class Actor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.act = nn.Linear(12, 64), nn.Linear(64, 64), nn.Linear(64, 4)

    def forward(self, states: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(states))
        hidden = torch.tanh(self.second(hidden))
        return self.act(hidden).log_softmax(1)


def reinforce(steps: int, each_episode: bool) -> list[Tensor]:
    """Policy gradients from episodes of a fixed length."""
    random = seeded()
    length = 1800
    model = Actor()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    matrix = torch.empty(0) if each_episode else discounts(length, 0.99)
    for _ in range(steps):
        states, rewards = torch.randn(length, 12, generator=random), torch.rand(length, generator=random)
        actions = torch.randint(0, 4, (length, 1), generator=random)
        returns = (discounts(length, 0.99) if each_episode else matrix) @ rewards
        advantages = (returns - returns.mean()) / returns.std()
        loss = -(model(states).gather(1, actions).squeeze(1) * advantages).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


PROGRAMS = [
    Planted(name, "hotspot", run, fixed, steps, __name__)
    for name, run, fixed, steps in (
        (
            "adjacency-squared",
            lambda n: proteins(n, two_hops_of_graph),
            lambda n: proteins(n, two_hops_of_features),
            20,
        ),
        ("adapter-merged-each-time", lambda n: fine_tuning(n, True), lambda n: fine_tuning(n, False), 40),
        (
            "trend-by-convolution",
            lambda n: anomalies(n, trend_by_convolution),
            lambda n: anomalies(n, trend_by_sums),
            12,
        ),
        ("discounts-each-episode", lambda n: reinforce(n, True), lambda n: reinforce(n, False), 25),
    )
]
