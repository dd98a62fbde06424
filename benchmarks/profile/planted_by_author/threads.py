"""More threads than cores."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from benchmarks.profile.planted.program import Planted, seeded, weights
from benchmarks.profile.planted_by_author.model import Blocks, Training

CORES = len(os.sched_getaffinity(0))


@contextmanager
def _as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _many(steps: int, fixed: bool) -> list[Tensor]:
    x = torch.randn(512, 256, generator=seeded())
    training = Training(Blocks(256, 512))
    with _as_before():
        torch.set_num_threads(1 if fixed else 8 * CORES)  # fault: threads-for-each-core
        for _ in range(steps):
            training.step(x)
    return weights(training.model)


def _pool(steps: int, fixed: bool) -> list[Tensor]:
    generator = seeded()
    parts = [torch.randn(128, 256, generator=generator) for _ in range(8)]
    model, training = Blocks(256, 512), Training(Blocks(64, 64))

    def score(x: Tensor) -> Tensor:
        with torch.no_grad():
            return model(x).mean()

    found = []
    with _as_before(), ThreadPoolExecutor(1 if fixed else 8) as pool:
        torch.set_num_threads(1 if fixed else 2 * CORES)  # fault: pool-of-threads
        for _ in range(steps):
            training.step(parts[0][:, :64])
            found.append(torch.stack(list(pool.map(score, parts))).sum())
    return found


def _attention(steps: int, fixed: bool) -> list[Tensor]:
    x = torch.randn(4, 256, 64, generator=seeded())
    training, found = Training(Blocks(64, 64)), []
    with _as_before():
        if not fixed:
            torch.set_num_threads(6 * CORES)  # fault: threads-of-a-larger-machine
        for _ in range(steps):
            training.step(x[0])
            found.append(torch.nn.functional.scaled_dot_product_attention(x, x, x).mean())
    return found


PROGRAMS = [
    Planted(name, "threads", partial(run, fixed=False), partial(run, fixed=True), steps, __name__)
    for name, run, steps in (
        ("threads-for-each-core", _many, 40),
        ("pool-of-threads", _pool, 30),
        ("threads-of-a-larger-machine", _attention, 100),
    )
]
