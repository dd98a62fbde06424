"""Ranks that wait for each other, although the communication could be hidden or spared.

The other rank is a fork that only answers, each time as late as a link between two hosts would make it.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.profile.planted.program import Planted, seeded, weights

LATENCY = 0.004  # seconds


@contextmanager
def joined(rank: int, store: Path) -> Iterator[None]:
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def second_rank(store: Path, answers: Callable[[], None]) -> None:
    with joined(1, store):
        answers()
    os._exit(0)


def first_of_two(work: Callable[[], list[Tensor]], answers: Callable[[], None]) -> list[Tensor]:
    """The work as rank 0, while rank 1 answers."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "store")
        other = multiprocessing.get_context("fork").Process(target=second_rank, args=(store, answers), daemon=True)
        other.start()
        try:
            with joined(0, store):
                return work()
        finally:
            other.join(20)
            other.kill()


def add_up(values: Tensor) -> Tensor:
    """Sums over the ranks, which the last of them makes."""
    dist.reduce(values, 1)  # fault: averages-each-loss
    dist.broadcast(values, 1)  # fault: averages-each-loss
    return values


class AverageLoss:
    """The loss over all ranks, step by step."""

    def __init__(self, each_step: bool) -> None:
        self.each_step = each_step
        self.losses: list[Tensor] = []

    def add(self, loss: Tensor) -> None:
        loss = loss.detach().clone()
        self.losses.append(add_up(loss) if self.each_step else loss)  # fault: averages-each-loss

    def history(self) -> Tensor:
        losses = torch.stack(self.losses)
        return (losses if self.each_step else add_up(losses)) / 2


class Regressor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(96, 288), nn.Linear(288, 288), nn.Linear(288, 288)
        self.head = nn.Linear(288, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        x = F.relu(self.second(x))
        x = F.relu(self.third(x))
        return self.head(x)


def logged(steps: int, each_step: bool) -> list[Tensor]:
    """Each rank trains a member of an ensemble; only the curve of the loss is common."""
    random = seeded()
    model = Regressor()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)

    def work() -> list[Tensor]:
        average = AverageLoss(each_step)
        for _ in range(steps):
            x = torch.randn(256, 96, generator=random)
            loss = F.mse_loss(model(x), x.sin().sum(1, keepdim=True))
            average.add(loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return [*weights(model), average.history()]

    def answers() -> None:
        for _ in range(steps if each_step else 1):
            total = torch.zeros(()) if each_step else torch.zeros(steps)
            dist.reduce(total, 1)
            time.sleep(LATENCY)
            dist.broadcast(total, 1)

    return first_of_two(work, answers)


def exchange(edges: Tensor) -> tuple[Tensor, list[dist.Work]]:
    """Sends the edges of this half of the plane, and receives those of the other half."""
    received = torch.empty_like(edges)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, edges, 1), dist.P2POp(dist.irecv, received, 1)])
    return received, works


def spread_heat(plane: Tensor, kernel: Tensor) -> Tensor:
    half = F.conv2d(plane[None, None], kernel)
    return F.conv2d(half, kernel)[0, 0]


def advance_after_edges(plane: Tensor, kernel: Tensor) -> Tensor:
    other, works = exchange(torch.cat([plane[:2], plane[-2:]]))
    for work in works:
        work.wait()  # fault: edges-before-interior
    whole = torch.cat([other[2:], plane, other[:2]])
    return spread_heat(F.pad(whole, (2, 2)), kernel)


def advance_meanwhile(plane: Tensor, kernel: Tensor) -> Tensor:
    other, works = exchange(torch.cat([plane[:2], plane[-2:]]))
    plane = F.pad(plane, (2, 2))
    interior = spread_heat(plane, kernel)
    for work in works:
        work.wait()
    other = F.pad(other, (2, 2))
    top, bottom = torch.cat([other[2:], plane[:4]]), torch.cat([plane[-4:], other[:2]])
    return torch.cat([spread_heat(top, kernel), interior, spread_heat(bottom, kernel)])


def heat(steps: int, advance: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
    """Heat in a plane of which each rank has a half; the other half is cold."""
    random = seeded()
    start, kernel = torch.rand(480, 600, generator=random), torch.rand(1, 1, 3, 3, generator=random)
    kernel /= kernel.sum()

    def work() -> list[Tensor]:
        plane = start
        for _ in range(steps):
            plane = advance(plane, kernel)
        return [plane]

    def answers() -> None:
        cold, edges = torch.zeros(4, 600), torch.empty(4, 600)
        for _ in range(steps):
            dist.recv(edges, 0)
            time.sleep(LATENCY)
            dist.send(cold, 0)

    return first_of_two(work, answers)


class LayersElsewhere:
    """Weights that the other rank has, for a rank whose memory holds two layers only."""

    def __init__(self, width: int, ahead: bool) -> None:
        self.width, self.ahead = width, ahead

    def fetch(self, number: int) -> tuple[Tensor, dist.Work]:
        weight = torch.empty(self.width, self.width)
        dist.send(torch.tensor(number), 1)
        work = dist.irecv(weight, 1)
        assert work is not None
        return weight, work

    def in_order(self, numbers: list[int]) -> Iterator[Tensor]:
        coming = self.fetch(numbers[0])
        for following in [*numbers[1:], None]:
            weight, work = coming
            work.wait()  # fault: layers-when-needed
            if self.ahead and following is not None:
                coming = self.fetch(following)
            yield weight
            if not self.ahead and following is not None:
                coming = self.fetch(following)


def offloaded(steps: int, ahead: bool) -> list[Tensor]:
    """Inference with one layer after the other."""
    random = seeded()
    x = torch.randn(steps, 6144, 128, generator=random)
    layers = torch.randn(8, 128, 128, generator=random) / 128**0.5

    def work() -> list[Tensor]:
        found = []
        coming = LayersElsewhere(128, ahead).in_order(list(range(8)) * steps)
        for batch in x:
            for weight in islice(coming, 8):  # fault: layers-when-needed
                hidden = batch @ weight
                hidden = F.gelu(hidden)
                batch = F.layer_norm(batch + hidden, (128,))
            found.append(batch.mean(0))
        return found

    def answers() -> None:
        number = torch.tensor(0)
        for _ in range(8 * steps):
            dist.recv(number, 0)
            time.sleep(LATENCY)
            dist.send(layers[int(number)], 0)

    return first_of_two(work, answers)


PROGRAMS = [
    Planted(name, "communication", run, fixed, steps, __name__, clock=time.perf_counter)
    for name, run, fixed, steps in (
        ("averages-each-loss", lambda n: logged(n, True), lambda n: logged(n, False), 60),
        (
            "edges-before-interior",
            lambda n: heat(n, advance_after_edges),
            lambda n: heat(n, advance_meanwhile),
            60,
        ),
        ("layers-when-needed", lambda n: offloaded(n, False), lambda n: offloaded(n, True), 8),
    )
]
