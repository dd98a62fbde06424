"""Splits of a model as others would write them: what ranks train differs, and a step is that of one process.

Every rank computes the whole model, so that only what the splits hand to the optimizer, and to checkpoints, is tried.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import shoestring as ss
from shoestring.core.feature import DATA, LOCAL, Feature, Phase, Seam
from shoestring.core.job import Job, attachments_of
from shoestring.core.kept import Progress
from shoestring.testing.scenarios import here


@dataclass(frozen=True, kw_only=True)
class Split(Feature):
    """Ranks of a host share what is trained."""

    size: int = 2
    """Ranks that share a replica."""
    seed: int = 0
    """Which parameters are split in which way."""

    seams: ClassVar = (Seam.SHARD,)

    @property
    def over(self):
        return ("split",)

    def arrange(self, world):
        return world.split(LOCAL, "split", self.size)

    def drawn(self, name: str, count: int) -> int:
        return zlib.crc32(f"{self.seed} {name}".encode()) % count


@dataclass(frozen=True, kw_only=True)
class Placed(Split):
    """Each rank trains a shard of each parameter: rows, columns, a half of each half of the rows, or all of it."""

    def placement(self, name: str, tensor: Tensor) -> object:
        ways = [Replicate(), Shard(0), _StridedShard(0, split_factor=2), Shard(tensor.ndim - 1)]
        return ways[self.drawn(name, len(ways))]

    def apply(self, job, seam):
        mesh = job.world.mesh_over(self.over)
        if mesh is None:
            return

        def part(name: str, tensor: Tensor) -> Tensor:
            placement = self.placement(name, tensor)
            if isinstance(placement, Replicate):
                return tensor.detach().clone()
            parts = placement._split_tensor(tensor.detach(), mesh.size(), with_padding=False)[0]
            local = parts[mesh.get_local_rank()].clone()
            layout = {"shape": tensor.shape, "stride": tensor.stride()}
            return DTensor.from_local(local, mesh, [placement], run_check=False, **layout)

        parameters = dict(job.trained)
        trained = {name: part(name, parameter).requires_grad_() for name, parameter in parameters.items()}

        @contextmanager
        def sync(last: bool) -> Iterator[None]:
            yield
            for name, parameter in parameters.items() if last else ():
                trained[name].grad, parameter.grad = part(name, parameter.grad), None

        @torch.no_grad()
        def refresh() -> None:
            for name, parameter in parameters.items():
                tensor = trained[name].detach()
                parameter.copy_(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)

        job.shard(over=self.over, sync=sync, trained=trained, refresh=refresh)
        job.at(Phase.PROJECT, refresh)


@dataclass(frozen=True, kw_only=True)
class Parted(Split):
    """Each rank trains some of the parameters, as stages of a pipeline do; all of them train one of them."""

    def apply(self, job, seam):
        group = job.world.group(self.over)
        if group is None:
            return
        parameters, index = dict(job.trained), job.world.index_over(self.over)
        homes = {name: self.drawn(name, self.size) for name in parameters}
        homes |= {name: number % self.size for number, name in enumerate(sorted(parameters)[: self.size])}
        tied = max(parameters)
        trained = {name: value for name, value in parameters.items() if homes[name] == index or name == tied}

        @contextmanager
        def sync(last: bool) -> Iterator[None]:
            yield
            for name in parameters.keys() - trained.keys() if last else ():
                parameters[name].grad = None

        @torch.no_grad()
        def share() -> None:
            for name, parameter in parameters.items():
                dist.broadcast(parameter, group=group, group_src=homes[name])

        job.shard(over=self.over, sync=sync, trained=trained)
        job.at(Phase.PROJECT, share)


@dataclass(frozen=True, kw_only=True)
class Unreduced(Split):
    """Gives the optimizer sums that nobody has reduced."""

    def apply(self, job, seam):
        mesh = job.world.mesh_over(self.over)
        trained = {
            name: DTensor.from_local(tensor.detach().clone(), mesh, [Partial()]) for name, tensor in job.trained.items()
        }
        job.shard(over=self.over, trained=trained)


KINDS = {"placed": Placed, "parted": Parted, "unreduced": Unreduced}
BESIDE = {
    "alone": [],
    "clip": [ss.optim.Clip(max_norm=0.05)],
    "lars": [ss.optim.LARS(lr=0.1, vector_lr=0.1)],
    "lamb": [ss.optim.LAMB(lr=0.05)],
    "clipped lamb": [ss.optim.LAMB(lr=0.05), ss.optim.Clip(max_norm=0.05)],
}


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 10, bias=False), nn.Tanh(), nn.LayerNorm(10), nn.Linear(10, 5)]
    return nn.Sequential(*layers).double()


def batch(step: int, index: int, ranks: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(100 + step)
    inputs, targets = torch.randn(8, 6, generator=draw).double(), torch.randint(5, (8,), generator=draw)
    rows = slice(index * 8 // ranks, (index + 1) * 8 // ranks)
    return {"inputs": inputs[rows], "targets": targets[rows]}


def train(
    *,
    kind: str = "",
    seed: int = 0,
    beside: str = "alone",
    over: str = "ddp",
    folder: str = "",
    resume: bool = False,
    stop: int = 6,
    checkpoint: str = "tiered",
) -> dict:
    """Losses of the steps, the norms of clipped gradients, the step that it began with, and the sum of all weights."""
    world = here()
    features: list[Feature] = [KINDS[kind](seed=seed)] if kind else []
    if world.size > (2 if kind else 1):
        features.append({"ddp": ss.parallel.DDP, "fsdp": ss.parallel.FSDP, "zero": ss.memory.Zero}[over]())
    features += BESIDE[beside]
    if folder and checkpoint == "tiered":
        settings = {"memory_folder": f"{folder}/memory", "memory_every": 1, "disk_every": 2}
        features.append(ss.checkpoint.Tiered(folder=f"{folder}/checkpoints", **settings))
    elif folder:
        features.append(ss.checkpoint.Plain(folder=f"{folder}/checkpoints", every=2))

    def adam(parameters: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-2, foreach=False)

    job = ss.compose(Job(model(), optimizer=adam, progress=Progress(total=6), world=world), features)
    with job:
        began = job.restore("auto") if resume and job.restore else None
        attachments, losses, norms = attachments_of(job), [], []
        index, ranks = job.world.index_over(DATA), job.world.ranks_over(DATA)
        while not job.done and job.progress.step < stop:
            losses.append(float(job.step(batch(job.progress.step, index, ranks))))
            norms.append(float(job.numbers.get("grad_norm", 0.0)))
        weights = sum(float(tensor.detach().abs().sum()) for tensor in attachments.module.parameters())
    return {"losses": losses, "norms": norms, "began": began, "weights": weights}
