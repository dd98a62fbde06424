"""Ranks that wait for each other, although the communication could be hidden or spared.

The other rank is a fork that only answers, each time as late as a link between two hosts would make it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.profile.blind3.communication import first_of_two
from benchmarks.profile.planted.program import Planted, seeded, weights

LATENCY = 0.004  # seconds


class SharedStatistics:
    """Statistics of normalization that all ranks take from the last of them."""

    def __init__(self, model: nn.Module) -> None:
        self.buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]

    def take(self) -> None:
        joined = torch.cat(self.buffers)
        dist.broadcast(joined, 1)  # fault: statistics-each-step
        for buffer, taken in zip(self.buffers, joined.split([len(it) for it in self.buffers]), strict=True):
            buffer.copy_(taken)


def normalizing(steps: int, each_step: bool) -> list[Tensor]:
    """Pictures; the statistics matter at evaluation alone, that comes at the end."""
    random = seeded()
    model = nn.Sequential(
        nn.Conv2d(3, 24, 3),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.Conv2d(24, 24, 3),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(24 * 400, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)

    def work() -> list[Tensor]:
        statistics = SharedStatistics(model)
        for _ in range(steps):
            images, labels = torch.randn(16, 3, 24, 24, generator=random), torch.arange(16) % 10
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if each_step:
                statistics.take()
        statistics.take()
        return weights(model)

    def answers() -> None:
        for _ in range(steps * each_step + 1):
            time.sleep(LATENCY)
            dist.broadcast(torch.ones(4 * 24), 1)

    return first_of_two(work, answers)


class MixtureLayer(nn.Module):
    """Half of the rows go to an expert of the other rank; all of them go through a common expert too."""

    def __init__(self, width: int, overlaps: bool) -> None:
        super().__init__()
        self.overlaps = overlaps
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def common(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.expand(x))
        return self.contract(hidden)

    def forward(self, x: Tensor) -> Tensor:
        rows = x[: len(x) // 2].contiguous()
        back = torch.empty_like(rows)
        sent, coming = dist.isend(rows, 1), dist.irecv(back, 1)
        assert sent is not None and coming is not None
        if self.overlaps:
            common = self.common(x)
            sent.wait()
            coming.wait()
        else:
            sent.wait()  # fault: experts-before-common
            coming.wait()  # fault: experts-before-common
            common = self.common(x)
        return F.layer_norm(x + common + F.pad(back, (0, 0, 0, len(x) - len(back))), x.shape[1:])


def experts(steps: int, overlaps: bool) -> list[Tensor]:
    """Scores of texts by a mixture of experts."""
    random = seeded()
    layers = nn.Sequential(MixtureLayer(160, overlaps), MixtureLayer(160, overlaps))
    texts = torch.randn(steps, 256, 160, generator=random)

    def work() -> list[Tensor]:
        with torch.inference_mode():
            return [layers(batch).mean(0) for batch in texts]

    def answers() -> None:
        rows = torch.empty(128, 160)
        for _ in range(2 * steps):
            dist.recv(rows, 0)
            time.sleep(LATENCY)
            dist.send(rows.relu(), 0)

    return first_of_two(work, answers)


def simulate_then_ask(steps: int, step: Callable[[Tensor, Tensor], Tensor], states: Tensor) -> Tensor:
    """Each batch of actions is asked for when the batch before is done."""
    for _ in range(steps):
        actions = torch.empty(1024, 96)
        dist.send(torch.ones(1), 1)
        dist.recv(actions, 1)  # fault: actions-asked-late
        states = step(states, actions)
    return states


def ask_ahead(steps: int, step: Callable[[Tensor, Tensor], Tensor], states: Tensor) -> Tensor:
    actions, following = torch.empty(2, 1024, 96)
    dist.send(torch.ones(1), 1)
    coming = dist.irecv(actions, 1)
    for number in range(steps):
        assert coming is not None
        coming.wait()
        if number + 1 < steps:
            dist.send(torch.ones(1), 1)
            coming = dist.irecv(following, 1)
        states = step(states, actions)
        actions, following = following, actions
    return states


Play = Callable[[int, Callable[[Tensor, Tensor], Tensor], Tensor], Tensor]


def replayed(steps: int, play: Play) -> list[Tensor]:
    """A world model that is fed with recorded actions, which the other rank has."""
    random = seeded()
    move, turn = torch.randn(2, 96, 96, generator=random) / 96**0.5
    states = torch.randn(1024, 96, generator=random)

    def step(states: Tensor, actions: Tensor) -> Tensor:
        for _ in range(3):
            moved = states @ move
            turned = torch.tanh(moved + actions)
            states = F.layer_norm(turned @ turn, (96,))
        return states

    def answers() -> None:
        recorded = torch.randn(1024, 96, generator=torch.Generator().manual_seed(1))
        for _ in range(steps):
            dist.recv(torch.empty(1), 0)
            time.sleep(LATENCY)
            dist.send(recorded, 0)

    return first_of_two(lambda: [play(steps, step, states)], answers)


PROGRAMS = [
    Planted(name, "communication", run, fixed, steps, __name__, clock=time.perf_counter)
    for name, run, fixed, steps in (
        (
            "statistics-each-step",
            lambda n: normalizing(n, True),
            lambda n: normalizing(n, False),
            60,
        ),
        ("experts-before-common", lambda n: experts(n, False), lambda n: experts(n, True), 50),
        (
            "actions-asked-late",
            lambda n: replayed(n, simulate_then_ask),
            lambda n: replayed(n, ask_ahead),
            80,
        ),
    )
]
