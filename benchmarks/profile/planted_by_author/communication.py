"""Communication that the step waits for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.profile.planted.program import Planted, seeded, weights
from benchmarks.profile.planted_by_author.model import Blocks, Training


@contextmanager
def _alone() -> Iterator[None]:
    """A process group of this process."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=30))
    try:
        yield
    finally:
        dist.destroy_process_group()


def _model(layers: int, width: int) -> Blocks:
    seeded()
    return Blocks(width, width, layers // 2)


def _each_gradient(steps: int, fixed: bool) -> list[Tensor]:
    model = _model(24, 32)
    optimizer, x = torch.optim.SGD(model.parameters(), 0.01, fused=True), torch.randn(16, 32)
    parameters = list(model.parameters())
    with _alone():
        for _ in range(steps):
            optimizer.zero_grad()
            y = model(x)
            F.mse_loss(y, x).backward()
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            if fixed:
                flat = torch.cat([gradient.flatten() for gradient in gradients])
                dist.all_reduce(flat)
            else:
                for gradient in gradients:
                    dist.all_reduce(gradient)  # fault: reduce-each
            optimizer.step()
    return weights(model)


def _each_metric(steps: int, fixed: bool) -> list[float]:
    training, x, found = Training(_model(4, 64)), torch.randn(64, 64), []
    with _alone():
        for step in range(steps):
            training.step(x)
            y = next(training.model.parameters()).detach()
            values = torch.stack([y.mean(), y.std(), y.amax()])
            if fixed:
                if step % 100 == 0:
                    dist.all_reduce(values)
            else:
                for value in values.unbind():
                    dist.all_reduce(value)  # fault: reduce-each-metric
            found.append(float(values[0]))
    return found


def _barriers(steps: int, fixed: bool) -> Tensor:
    x, weight = torch.randn(64, 64, generator=seeded()), torch.eye(64)
    training = Training(_model(4, 64))
    with _alone():
        for _ in range(steps):
            training.step(x)
            x = torch.tanh(x @ weight)
            if not fixed:
                dist.barrier()  # fault: barrier-each-step
    return x


PROGRAMS = [
    Planted(
        *(name, "communication", partial(run, fixed=False), partial(run, fixed=True), steps, __name__),
        clock=time.perf_counter,
    )
    for name, run, steps in (
        ("reduce-each", _each_gradient, 150),
        ("reduce-each-metric", _each_metric, 500),
        ("barrier-each-step", _barriers, 1000),
    )
]
