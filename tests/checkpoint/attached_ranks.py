"""What the ranks do in the tests of `checkpoint.attach`: programs that know nothing of shoestring's jobs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from saving_ranks import digest, whole
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from shoestring import checkpoint
from shoestring.checkpoint import Plain, Tiered
from shoestring.checkpoint.attached import Attached
from shoestring.core.compose import attach, compose
from shoestring.core.job import Job, attachments_of
from shoestring.parallel import DDP, FSDP


def saving(folder: str, state: dict[str, Any]) -> Attached:
    place = Path(folder)
    settings = Tiered(folder=str(place / "saves"), memory_folder=str(place / "memory"), memory_every=0, disk_every=0)
    return checkpoint.attach(state, settings=settings)


def digests(model: nn.Module, optimizer: Optimizer) -> dict[str, str]:
    """Of every tensor of the model and its optimizer, whole."""
    found = dict(model.state_dict())
    for index, state in optimizer.state_dict()["state"].items():
        found |= {f"{index}.{key}": value for key, value in state.items()}
    return {name: digest(whole(value)) for name, value in found.items()}


def sharded(*, folder: str, first: int, stop: int) -> dict[str, Any]:
    """Train a sharded model from a checkpoint, if there is one; what was restored, and what there is at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    if ranks > 1:
        fully_shard(model[0])
        fully_shard(model)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    with saving(folder, {"model": model, "optimizer": optimizer}) as saves:
        assert saves.restore() == first
        begun = digests(model, optimizer)
        for step in range(first, stop):
            model(inputs(step, 0).tensor_split(ranks)[rank]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            saves.step(last=step + 1 == stop)
        return {"begun": begun, "ended": digests(model, optimizer)}


class Factored(Optimizer):
    """Keeps a moment of a matrix as its rows' and its columns' means, as Adafactor does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in (each for group in self.param_groups for each in group["params"]):
            square, state = parameter.grad.square(), self.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["moment"] = torch.zeros_like(parameter)
                state["rows"] = parameter.new_zeros(*parameter.shape[:-1], 1)
                state["columns"] = parameter.new_zeros(*(1 for _ in parameter.shape[:-1]), parameter.shape[-1])
            state["step"] += 1
            state["moment"].lerp_(parameter.grad, 0.5)
            state["rows"] = state["rows"] * 0.5 + square.mean(-1, keepdim=True)
            state["columns"] = state["columns"] * 0.5 + square.mean(tuple(range(square.ndim - 1)) or None, keepdim=True)
            parameter -= 0.1 * state["moment"] * (state["rows"] + state["columns"] + 0.1).rsqrt()


def factored(*, folder: str, first: int, stop: int) -> dict[str, Any]:
    """As `sharded`, with factors of moments; matrices only, for which they are kept."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9, bias=False), nn.Tanh(), nn.Linear(9, 3, bias=False))
    fully_shard(model[0])
    fully_shard(model)
    optimizer = Factored(model.parameters())
    with saving(folder, {"model": model, "optimizer": optimizer}) as saves:
        assert saves.restore() == first
        begun = digests(model, optimizer)
        for step in range(first, stop):
            model(inputs(step, dist.get_rank())).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            saves.step(last=step + 1 == stop)
        return {"begun": begun, "ended": digests(model, optimizer)}


def normed() -> tuple[nn.Module, AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 3))
    return model, AdamW(model.parameters(), lr=1e-2)


def inputs(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def replicated(*, folder: str, first: int, stop: int) -> dict[str, Any]:
    """Train replicas whose buffers differ, as BatchNorm's do; this rank's own model, restored and at the end."""
    model, optimizer = normed()
    rank = dist.get_rank() if dist.is_initialized() else 0
    forward = DistributedDataParallel(model) if dist.is_initialized() else model
    with saving(folder, {"model": model, "optimizer": optimizer}) as saves:
        assert saves.restore() == first
        begun = digests(model, optimizer)
        for step in range(first, stop):
            forward(inputs(step, rank)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            saves.step(last=step + 1 == stop)
        return {"begun": begun, "ended": digests(model, optimizer)}


def in_a_job(*, folder: str, first: int, stop: int) -> dict[str, Any]:
    """The same by features that are attached to the model and its optimizer."""
    model, optimizer = normed()
    settings = Tiered(folder=f"{folder}/saves", memory_folder=f"{folder}/memory", memory_every=0, disk_every=0)
    with attach(model, optimizer, DDP(), settings) as job:
        assert job.restore is not None and (job.restore("auto") or 0) == first
        job.progress.total = stop
        begun = digests(model, optimizer)
        for step in range(first, stop):
            job.model(inputs(step, dist.get_rank())).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return {"begun": begun, "ended": digests(model, optimizer)}


def in_one_file(*, folder: str, first: int, stop: int, sharded: bool) -> dict[str, Any]:
    """The same, saved to one file by the first rank; sharded, where no broadcast makes the buffers equal again."""
    torch.manual_seed(0)
    model, rank = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 3)), 0
    job = Job(model, loss=lambda output, _: (output.sum(), torch.tensor(4)), forward=lambda model, batch: model(batch))
    attachments_of(job).build_optimizer = partial(AdamW, lr=1e-2)
    if job.world.size > 1:
        rank = dist.get_rank()
    with compose(job, [FSDP() if sharded else DDP(), Plain(folder=folder)]):
        assert job.restore is not None and (job.restore("auto") or 0) == first
        job.progress.total = stop
        begun = {name: digest(whole(value)) for name, value in job.kept["model"].state.state_dict().items()}
        for step in range(first, stop):
            job.step(inputs(step, rank))
        ended = {name: digest(whole(value)) for name, value in job.kept["model"].state.state_dict().items()}
        return {"begun": begun, "ended": ended}
