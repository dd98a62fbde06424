"""Communication that the step waits for, although less of it or an earlier start would do.

Two ranks: the other one is a fork that joins each collective five milliseconds after it could, as over a slow link.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.profile.planted.program import Planted, seeded, weights

DELAY = 0.005  # seconds


def join(folder: str, rank: int) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )


def late(folder: str, collectives: Callable[[], object], times: int) -> None:
    """The other rank: joins so many collectives."""
    join(folder, 1)
    for _ in range(times):
        time.sleep(DELAY)
        collectives()
    dist.destroy_process_group()
    os._exit(0)


def beside(collectives: Callable[[], object], times: int, work: Callable[[], list[Tensor]]) -> list[Tensor]:
    """Do the work as the first of two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, collectives, times)
        other = multiprocessing.get_context("fork").Process(target=late, args=arguments, daemon=True)
        other.start()
        try:
            join(folder, 0)
            return work()
        finally:
            dist.destroy_process_group()
            other.join(20)
            other.kill()


def average_one_by_one(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        dist.all_reduce(parameter.grad)  # fault: gradient-by-gradient
        assert parameter.grad is not None
        parameter.grad /= 2


def average_together(parameters: list[nn.Parameter]) -> None:
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat)
    parts = flat.div_(2).split([grad.numel() for grad in grads])
    torch._foreach_copy_(grads, [part.view_as(grad) for part, grad in zip(parts, grads, strict=True)])


def data_parallel(steps: int, together: bool) -> list[Tensor]:
    """Data parallelism by hand."""
    random = seeded()
    model = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 16))
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    average = average_together if together else average_one_by_one
    shapes = [torch.Size([sum(p.numel() for p in parameters)])] if together else [p.shape for p in parameters]

    def train() -> list[Tensor]:
        for _ in range(steps):
            x, y = torch.randn(256, 128, generator=random), torch.randint(0, 16, (256,), generator=random)
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            average(parameters)
            optimizer.step()
        return weights(model)

    turns = iter(shapes * steps)
    return beside(lambda: dist.all_reduce(torch.zeros(next(turns))), len(shapes) * steps, train)


def score(model: nn.Module, images: Tensor) -> Tensor:
    return model(images).log_softmax(dim=1)


def evaluation(steps: int, each_batch: bool) -> list[Tensor]:
    """Predictions of all ranks are gathered after each batch, or once in the end."""
    random = seeded()
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(10),
    ).eval()
    model(torch.zeros(1, 3, 32, 32))

    def gather(predictions: Tensor) -> Tensor:
        both = [torch.empty_like(predictions) for _ in range(2)]
        dist.all_gather(both, predictions)  # fault: gathered-each-batch
        return torch.cat(both)

    @torch.no_grad()
    def evaluate() -> list[Tensor]:
        found = []
        for _ in range(steps):
            predictions = score(model, torch.rand(32, 3, 32, 32, generator=random))
            found.append(gather(predictions) if each_batch else predictions)
        return [(torch.cat(found) if each_batch else gather(torch.cat(found))).sum(dim=0)]

    rows = 32 if each_batch else 32 * steps
    return beside(lambda: gather(torch.zeros(rows, 10)), steps if each_batch else 1, evaluate)


def augmented(pictures: Tensor, random: torch.Generator) -> Tensor:
    """A batch of pictures, blurred and with noise."""
    kernel = torch.ones(3, 1, 5, 5) / 25
    blurred = F.conv2d(F.pad(pictures, (2, 2, 2, 2), mode="reflect"), kernel, groups=3)
    return F.dropout(blurred, 0.1) + 0.05 * torch.randn(pictures.shape, generator=random)


def parameter_server(steps: int, overlapped: bool) -> list[Tensor]:
    """A server averages the gradients; the next batch is prepared after its answer, or meanwhile."""
    random = seeded()
    model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))
    model(torch.zeros(1, 3, 48, 48))
    parameters = list(model.parameters())
    gradients = torch.zeros(sum(parameter.numel() for parameter in parameters))
    for parameter, part in zip(parameters, gradients.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)
    optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=True)
    answers = torch.zeros_like(gradients)

    def train() -> list[Tensor]:
        pictures = torch.rand(10, 3, 48, 48, generator=random)
        batch = augmented(pictures, random)
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=False)
            model(batch).logsumexp(dim=1).mean().backward()
            dist.send(gradients, 1)
            if overlapped:
                answer = dist.irecv(gradients, 1)
                batch = augmented(pictures, random)
                assert answer is not None
                answer.wait()
            else:
                dist.recv(gradients, 1)  # fault: batch-after-gradients
                batch = augmented(pictures, random)
            optimizer.step()
        return weights(model)

    def answer() -> None:
        dist.recv(answers, 0)
        time.sleep(2 * DELAY)
        dist.send(answers, 0)

    return beside(answer, steps, train)


PROGRAMS = [
    Planted(
        "gradient-by-gradient",
        "communication",
        lambda steps: data_parallel(steps, False),
        lambda steps: data_parallel(steps, True),
        steps=12,
        module=__name__,
        clock=time.perf_counter,
    ),
    Planted(
        "gathered-each-batch",
        "communication",
        lambda steps: evaluation(steps, True),
        lambda steps: evaluation(steps, False),
        steps=40,
        module=__name__,
        clock=time.perf_counter,
    ),
    Planted(
        "batch-after-gradients",
        "communication",
        lambda steps: parameter_server(steps, False),
        lambda steps: parameter_server(steps, True),
        steps=40,
        module=__name__,
        clock=time.perf_counter,
    ),
]
