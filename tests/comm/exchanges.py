"""What four ranks do in the tests of exchanges: train small models that have what trips hooks up."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shoestring import parallel
from shoestring.core.compose import attach, compose
from shoestring.core.job import Job, attachments_of
from shoestring.core.kept import Progress
from shoestring.core.world import World
from shoestring.testing import scenarios


class Awkward(nn.Module):
    """Two layers used in turn by `path`, a shared one, a frozen one, a convolution in channels-last layout."""

    def __init__(self, layout: torch.memory_format = torch.channels_last) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(2, 24, 3, padding=1).to(memory_format=layout)
        self.paths = nn.ModuleList(nn.Linear(24, 24) for _ in range(2))
        self.shared = nn.Linear(24, 24, bias=False)
        self.again = self.shared
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.head = nn.Linear(24, 3)
        self.path = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x.contiguous(memory_format=torch.channels_last)).mean((2, 3))
        x = torch.relu(self.paths[self.path](x))
        return self.head(torch.relu(self.frozen(self.again(torch.relu(self.shared(x))))))


def digest(model: nn.Module) -> str:
    """Of this rank's part of the weights."""
    parts = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    content = b"".join(part.detach().contiguous().numpy().tobytes() for part in parts)
    return hashlib.sha256(content).hexdigest()


def _data(step: int, world: World, rows: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + world.rank)
    x = torch.randn(rows, 2, 4, 4, generator=generator)
    return x, (x.mean((1, 2, 3)) > 0).long() + (x[:, 0].amax((1, 2)) > 1).long()


def _world(local: int) -> World:
    whole = World.current()
    rank, size = whole.rank, whole.size
    return World(rank=rank, size=size, local_rank=rank % local, local_size=local)


def foreign(*, feature: dict[str, Any], steps: int, bucket_mb: float, no_sync: bool) -> dict[str, Any]:
    """A script of its own: DDP, two micro-batches, a layer not used in half of the steps; one line of shoestring."""
    world = World.current()
    model = DistributedDataParallel(Awkward(), bucket_cap_mb=bucket_mb, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    digests, losses = [], []
    with attach(model, optimizer, scenarios.decode(feature)) as job:
        for step in range(steps):
            model.module.path = step % 2
            total = 0.0
            for micro in range(2):
                x, y = _data(2 * step + micro, world)
                with model.no_sync() if no_sync and micro == 0 else nullcontext():
                    loss = F.cross_entropy(model(x), y) / 2
                    loss.backward()
                total += float(loss)
            optimizer.step()
            optimizer.zero_grad()
            digests.append(digest(model))
            losses.append(total)
        numbers = {name: float(value) for name, value in job.numbers.items()}
    return {"digests": digests, "losses": losses, "numbers": numbers}


def train(
    *, features: Sequence[dict[str, Any]], steps: int, local: int = 4, wrap: bool = True, delays: bool = False
) -> dict[str, Any]:
    """Job.step over the awkward model, on hosts of `local` ranks each; `delays` holds ranks back at random."""
    world = _world(local)
    several = [scenarios.decode(each) for each in features]
    if wrap:
        several.insert(0, parallel.DDP(bucket_mb=0.002, find_unused=True))
    model = Awkward(torch.channels_last if wrap else torch.contiguous_format)  # fully_shard takes no other
    loss = lambda output, batch: (F.cross_entropy(output, batch[1], reduction="sum"), torch.tensor(len(batch[1])))  # noqa: E731
    job = Job(model, loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.05), progress=Progress(), world=world)
    digests, losses = [], []
    with compose(job, several):
        waits = torch.Generator().manual_seed(world.rank)
        for step in range(steps):
            if delays:
                time.sleep(float(torch.rand((), generator=waits)) * 0.02)
            losses.append(float(job.step(_data(2 * step, world), _data(2 * step + 1, world))))
            digests.append(digest(attachments_of(job).module))
        residual = {name: float(v) for name, v in job.numbers.items()}
    return {"digests": digests, "losses": losses, "numbers": residual, "facts": job.trace.facts}


def nan(*, features: Sequence[dict[str, Any]], at: int) -> dict[str, Any]:
    """One rank's gradient turns infinite in one step: every rank must see it, and no residual may."""
    world = World.current()
    model = DistributedDataParallel(Awkward(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen = []
    with attach(model, optimizer, scenarios.decode(features[0])) as job:
        for step in range(at + 3):
            x, y = _data(step, world)
            loss = F.cross_entropy(model(x), y)
            if step == at and world.rank == 1:
                loss = loss * torch.inf
            loss.backward()
            finite = all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
            seen.append(finite)
            if finite:
                optimizer.step()
            optimizer.zero_grad()
        state = job.kept["comm"].state.state_dict()["codec"]
        kept = all(bool(t.isfinite().all()) for of in state.values() for t in of.values() if isinstance(t, Tensor))
    return {"finite": seen, "kept": kept, "digest": digest(model)}
