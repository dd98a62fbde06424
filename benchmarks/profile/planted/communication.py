"""Communication that training waits for, although it could be hidden or spared.

Links are slow on purpose: in the programs of one process a hook answers after the time that the bytes would take at
200 MB/s; in those of two ranks the other rank, which a fork makes, answers each call four milliseconds late.
"""

import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.profile.planted.program import Planted, seeded, weights

BANDWIDTH = 200e6  # bytes per second
LATENCY = 0.004  # seconds


@contextmanager
def process_group(rank: int, size: int, store: Path) -> Iterator[None]:
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def slow_link(
    state: object,
    bucket: dist.GradBucket,
) -> torch.futures.Future[Tensor]:
    """Averages the gradients of one rank: gives them back after the time that a link takes."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    gradients = bucket.buffer()
    delay = 0.001 + gradients.numel() * gradients.element_size() / BANDWIDTH
    threading.Timer(delay, lambda: future.set_result(gradients)).start()
    return future


def peer(store: Path, answers: Callable[[], None]) -> None:
    with process_group(1, 2, store):
        answers()
    os._exit(0)


def with_peer(work: Callable[[], list[Tensor]], answers: Callable[[], None]) -> list[Tensor]:
    """Run as rank 0 of two; the other rank only answers."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "store")
        other = multiprocessing.get_context("fork").Process(target=peer, args=(store, answers), daemon=True)
        other.start()
        try:
            with process_group(0, 2, store):
                return work()
        finally:
            other.join(20)
            other.kill()


def accumulation(steps: int, every_time: bool) -> list[Tensor]:
    """Accumulates gradients over four small batches, and averages them over the ranks each time or once."""
    random = seeded()
    module = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    with tempfile.TemporaryDirectory() as folder, process_group(0, 1, Path(folder, "store")):
        model = DistributedDataParallel(module)
        model.register_comm_hook(None, slow_link)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        for _ in range(steps):
            for micro in range(4):
                x, y = torch.randn(128, 64, generator=random), torch.randint(0, 10, (128,), generator=random)
                with nullcontext() if every_time or micro == 3 else model.no_sync():
                    loss = F.cross_entropy(model(x), y) / 4
                    loss.backward()  # fault: averaged-each-time
            optimizer.step()
            optimizer.zero_grad()
    return weights(module)


class DeepNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(256, 256) for _ in range(8)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


def buckets(steps: int, megabytes: float) -> list[Tensor]:
    """A deep network whose gradients travel in one bucket when all is done, or in small ones meanwhile."""
    random = seeded()
    module = DeepNet()
    with tempfile.TemporaryDirectory() as folder, process_group(0, 1, Path(folder, "store")):
        model = DistributedDataParallel(module, bucket_cap_mb=megabytes)
        model.register_comm_hook(None, slow_link)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
        for _ in range(steps):
            loss = model(torch.randn(512, 256, generator=random))
            optimizer.zero_grad()
            loss.backward()  # fault: one-large-bucket
            optimizer.step()
    return weights(module)


def late_answers(calls: list[tuple[int, ...]]) -> Callable[[], None]:
    """Takes part in sums of these shapes, each late."""

    def answer() -> None:
        for shape in calls:
            time.sleep(LATENCY)
            dist.all_reduce(torch.zeros(shape))

    return answer


def average_each(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)  # fault: tensor-by-tensor


def average_together(parameters: list[nn.Parameter]) -> None:
    flat = nn.utils.parameters_to_vector([p.grad for p in parameters if p.grad is not None])
    dist.all_reduce(flat)
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)


def data_parallel(steps: int, each: bool) -> list[Tensor]:
    """Data parallelism by hand; the other rank's gradients are zero."""
    random = seeded()
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    parameters = list(model.parameters())
    average = average_each if each else average_together
    optimizer = torch.optim.SGD(parameters, lr=0.05, fused=True)

    def work() -> list[Tensor]:
        for _ in range(steps):
            x = torch.randn(64, 32, generator=random)
            loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            average(parameters)
            optimizer.step()
        return weights(model)

    shapes = [tuple(p.shape) for p in parameters] if each else [(sum(p.numel() for p in parameters),)]
    return with_peer(work, late_answers(shapes * steps))


def answer_statistics(steps: int) -> None:
    """Adds what it was sent to what it had, and answers after the time that a link takes."""
    total, sent = torch.zeros(2), torch.empty(2)
    for _ in range(steps):
        dist.recv(sent, 0)
        total += sent
        time.sleep(LATENCY)
        dist.send(total, 0)


def statistics(steps: int, waits: bool) -> list[Tensor]:
    """A simulation whose statistics another rank adds up; it needs them after the next step only."""
    random = seeded()
    field, kernel = torch.randn(1, 1, 160, 160, generator=random), torch.ones(1, 1, 7, 7) / 49

    def advance(field: Tensor) -> Tensor:
        for _ in range(4):
            field = torch.sin(F.conv2d(F.pad(field, (3, 3, 3, 3), mode="circular"), kernel) * 2 + 0.1)
        return field

    def work() -> list[Tensor]:
        state, totals = field, []
        for _ in range(steps):
            total = torch.empty(2)
            dist.send(torch.stack([state.sum(), state.square().sum()]), 1)
            if waits:
                dist.recv(total, 1)  # fault: waits-for-statistics
                state = advance(state)
            else:
                pending = dist.irecv(total, 1)
                state = advance(state)
                assert pending is not None
                pending.wait()
            totals.append(total)
        return [state, *totals]

    return with_peer(work, lambda: answer_statistics(steps))


PROGRAMS = [
    Planted(name, "communication", run, fixed, steps, __name__, clock=time.perf_counter)
    for name, run, fixed, steps in (
        ("averaged-each-time", lambda n: accumulation(n, True), lambda n: accumulation(n, False), 40),
        ("one-large-bucket", lambda n: buckets(n, 100), lambda n: buckets(n, 0.5), 30),
        ("tensor-by-tensor", lambda n: data_parallel(n, True), lambda n: data_parallel(n, False), 30),
        ("waits-for-statistics", lambda n: statistics(n, True), lambda n: statistics(n, False), 60),
    )
]
