"""What four ranks do that form a mesh of 2 hosts x 2 tensor-parallel ranks, and the feature that makes it one."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, combinations
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from shoestring import comm, parallel
from shoestring._torch import timeout_of
from shoestring.core.attachments import Attachments
from shoestring.core.compose import compose
from shoestring.core.errors import NonFiniteError
from shoestring.core.feature import DATA, LOCAL, Feature, Phase, Seam
from shoestring.core.job import Job, attachments_of
from shoestring.core.kept import ModelState, Progress
from shoestring.core.world import World
from shoestring.run import parse
from shoestring.testing import jobs
from shoestring.training.loop import train

SHAPE = (2, 2)  # hosts x ranks of a host
SAMPLES, LENGTH = 24, jobs.SEQUENCE


class _Enter(torch.autograd.Function):
    """The identity; its gradient is summed over the ranks that share the work."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Leave(torch.autograd.Function):
    """The sum over the ranks that share the work; its gradient is the identity."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        tensor = tensor.clone()
        dist.all_reduce(tensor, group=group)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


@dataclass(frozen=True, kw_only=True)
class Columns(Feature):
    """Share the hidden columns of each block's two layers out among the ranks of a host (tensor parallel)."""

    ranks: int = 2
    """Ranks that share the work on the same samples."""

    seams: ClassVar = (Seam.SHARD,)
    over: ClassVar = ("tensor",)

    def arrange(self, world: World) -> World:
        return world.split(LOCAL, "tensor", self.ranks)

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        group = attachments.world.group(self.over)
        if group is None:
            return
        attachments.own("SHARD over tensor", Seam.SHARD)
        names = [name for name, module in attachments.module.named_modules() if isinstance(module, jobs.ResidualBlock)]
        for name in names:
            block = attachments.module.get_submodule(name)
            assert isinstance(block, jobs.ResidualBlock)
            attachments.patch(block, _shared(block, attachments.world.index_over(self.over), self.ranks, group))
        partial = tuple(f"{name}.{part}" for name in names for part in ("up.weight", "up.bias", "down.weight"))

        def whole() -> None:
            for name, tensor in attachments.trained.items():
                if name.endswith(partial):
                    grad = tensor.grad.to_local() if hasattr(tensor.grad, "to_local") else tensor.grad
                    assert isinstance(grad, Tensor)
                    dist.all_reduce(grad, group=group)

        attachments.at(Phase.CLIP, whole)


def _shared(block: jobs.ResidualBlock, index: int, ranks: int, group: dist.ProcessGroup) -> Any:
    mine = slice(index * 2 * jobs.WIDTH // ranks, (index + 1) * 2 * jobs.WIDTH // ranks)

    def forward(hidden: Tensor) -> Tensor:
        normed = _Enter.apply(block.norm(hidden), group)
        previous = torch.cat([torch.zeros_like(normed[:, :1]), normed[:, :-1]], dim=1)
        inputs = torch.cat([normed, previous], dim=-1)
        columns = torch.relu(F.linear(inputs, block.up.weight[mine], block.up.bias[mine]))
        summed = _Leave.apply(F.linear(columns, block.down.weight[:, mine]), group)
        return hidden + block.dropout(summed + block.down.bias)

    return forward


# -- scenarios --------------------------------------------------------------------------------------------------------


def here() -> World:
    """The pool's ranks as two hosts of two; one process alone where there is no group."""
    world = World.current()
    local = SHAPE[1] if world.size > 1 else 1
    return replace(world, local_rank=world.rank % local, local_size=local)


def geometry() -> dict[str, Any]:
    world = here().split(LOCAL, "tensor", 2)
    assert world.split("tensor", "context", 1) is world.split("tensor", "context", 1)
    names = (*world.axes, "pipeline")
    groups = {}
    for axes in chain.from_iterable(combinations(names, number) for number in range(len(names) + 1)):
        group = world.group(axes)
        index, ranks = world.index_over(axes), world.ranks_over(axes)
        members = [world.rank] if group is None else dist.get_process_group_ranks(group)
        assert group is world.group(tuple(reversed(axes))), "it is made once"
        assert len(members) == ranks and members[index] == world.rank, (axes, members, index)
        if group is not None:
            total = torch.tensor([world.rank])
            dist.all_reduce(total, group=group)
            assert int(total) == sum(members)
            assert timeout_of(group) == timeout_of(dist.group.WORLD), "it waits as long as the world does"
        groups["x".join(axes)] = members
    return {"axes": world.axes, "hosts": world.hosts, "groups": groups}


SHARED: dict[str, list[Feature]] = {
    "ddp": [parallel.DDP()],
    "fsdp": [parallel.FSDP()],
    "hybrid": [parallel.FSDP(hosts="replicate")],
    "powersgd": [parallel.DDP(), comm.PowerSGD(rank=2)],
    "local steps": [comm.LocalSGD(every=2)],
}


def steps(*, beside: str, number: int, stop_at: int = 0) -> dict[str, Any]:
    """Train in company of `Columns`; one process does the same alone."""
    world = here()
    features = [*SHARED[beside], Columns()] if world.size > 1 else []
    job = Job(jobs.tiny().double(), optimizer=jobs.sgd(), progress=Progress(total=number), world=world)
    with compose(job, features):
        rank, size = (
            job.world.index_over(attachments_of(job).data_axes),
            job.world.ranks_over(attachments_of(job).data_axes),
        )
        losses = []
        for step in range(number):
            if step + 1 == stop_at and world.rank == world.size - 1:
                job.stop()
            losses.append(float(job.step(jobs.batch(step, rank, size, ragged=True))))
            if attachments_of(job).stopping:
                break
        held_out = job.evaluate([jobs.batch(jobs.HELD_OUT, rank, size, ragged=True)])
        state = ModelState(job.model).state_dict().values()
        whole = [value.full_tensor() if hasattr(value, "full_tensor") else value for value in state]
        weights = [float(value.sum()) for value in whole]
        return {"losses": losses, "tokens": job.progress.tokens, "held_out": held_out, "weights": weights}


def poisoned() -> str:
    """The loss of one rank alone is not finite: one whose loss does not count."""
    world = here()
    job = Job(jobs.tiny(), optimizer=jobs.sgd(), world=world)
    with suppress(AssertionError), compose(job, [parallel.DDP(), Columns()]):
        rank, size = job.world.index_over(DATA), job.world.ranks_over(DATA)
        task = attachments_of(job).loss
        if world.rank == 1:
            attachments_of(job).loss = lambda output, batch: (
                task(output, batch)[0] * float("nan"),
                task(output, batch)[1],
            )
        try:
            job.step(jobs.batch(0, rank, size))
        except NonFiniteError as error:
            return error.args[0]
    return "nothing"


# -- a whole run ------------------------------------------------------------------------------------------------------

seen: list[list[int]] = []


class Samples(Dataset[dict[str, Tensor]]):
    """Sample i: tokens that follow from i, which is the first of them."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = (index + 7 * torch.arange(LENGTH + 1)) % jobs.VOCABULARY
        return {"inputs": tokens[:-1], "targets": tokens[1:]}


def samples() -> tuple[Samples, Samples]:
    return Samples(), Samples()


class Recording(jobs.Tiny):
    """Writes down the first tokens of the batches that it is trained on."""

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training:
            seen.append(tokens[:, 0].tolist())
        return super().forward(tokens)


def model() -> nn.Module:
    return Recording(0.0)


def whole_run(*, folder: str, stops: int = -1) -> dict[str, Any]:
    """`stops`: the rank that asks for the end before its second step."""
    world = here()
    seen.clear()
    document = {
        "run": {"model": "mesh_ranks:model", "data": "mesh_ranks:samples", "steps": 4, "batch": 8, "folder": folder},
        "optim": {"sgd": {"lr": 0.1}},
        "checkpoint": {"plain": {}},
    }
    if world.size > 1:
        document["run"]["packages"] = ["mesh_ranks"]
        document |= {"mesh_ranks": {"columns": {"ranks": 2}}}
    result = train(parse(document, name="mesh"), world, stop=lambda: world.rank == stops and len(seen) > 0)
    rows = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    held_out = [row["held_out_loss"] for row in rows if "held_out_loss" in row]
    return {"seen": seen, "losses": losses, "held_out": held_out, "ended": [result.status, result.metrics["loss"]]}
