"""What the tests of ZeRO run on ranks of a pool."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shoestring import optim
from shoestring.checkpoint import Plain
from shoestring.comm import Dense
from shoestring.core.compose import attach, compose
from shoestring.core.errors import ConfigError
from shoestring.core.job import Job, attachments_of
from shoestring.core.kept import Progress
from shoestring.core.world import World
from shoestring.memory import Zero
from shoestring.memory.zero.collectives import Collectives
from shoestring.optim import AdamW, Clip
from shoestring.parallel import DDP
from shoestring.testing import jobs
from shoestring.testing.scenarios import here


def wide(unused: bool = False) -> nn.Module:
    """A model of tied, frozen, uneven and scalar parameters, whose large ones travel without a copy."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = jobs.Tiny(0.0)
        model.gain = nn.Parameter(torch.ones(()))
        model.odd = nn.Linear(jobs.WIDTH, 3)
        model.average = nn.BatchNorm1d(jobs.WIDTH)
        model.never = nn.Parameter(torch.ones(5)) if unused else None
    forward = model.forward

    def gained(tokens):
        hidden = (
            model.odd(model.average(model.embedding(tokens).flatten(0, 1))).sum()
            if tokens.sum() % 2 or not unused
            else 0.0
        )
        return forward(tokens) * model.gain + 0.01 * hidden

    model.forward = gained
    return model


def sums(model: nn.Module) -> list[str]:
    """The exact bits of a model's parameters."""
    return bits(model.parameters())


def bits(tensors: Iterable[torch.Tensor]) -> list[str]:
    """The exact bits of tensors."""
    return [tensor.detach().double().numpy().tobytes().hex() for tensor in tensors]


def train(
    *,
    stage: int = 0,
    steps: int = 8,
    micro: int = 1,
    clip: float = 0.0,
    dtype: str = "float32",
    bucket_mb: float = 4.0,
    in_flight_mb: float = 100.0,
    unused: bool = False,
    each: bool = False,
) -> dict[str, Any]:
    """Train with `memory.zero`, or with DDP where `stage` is 0.

    Args:
        each: let DDP exchange the gradients of every micro-batch, as stage 2 does.
    """
    world = here()
    model = wide(unused).to(getattr(torch, dtype))
    features = [AdamW(lr=1e-2), *([Clip(max_norm=clip)] if clip else [])]
    if stage:
        features.append(Zero(stage=stage, bucket_mb=bucket_mb, in_flight_mb=in_flight_mb))
    else:
        features.append(DDP(find_unused=unused))
    losses = []
    with compose(Job(model, progress=Progress(total=steps), world=world), features) as job:
        for number in range(steps):
            batches = [jobs.batch(number * micro + index, world.rank, world.size) for index in range(micro)]
            losses.append(float(job.step(*batches)))
        model.state_dict()  # waits for what is being gathered
        placed = {name: type(tensor).__name__ for name, tensor in attachments_of(job).trained.items()}
        buffers = bits(model.buffers())
        return {
            "losses": losses,
            "weights": sums(model),
            "buffers": buffers,
            "placed": placed,
            "sent": job.trace.facts.get("zero_bytes"),
        }


def accumulate(*, steps: int = 4, micro: int = 3) -> dict[str, Any]:
    """Micro-batches of a loop of its own, under stage 2 and under DDP that exchanges and adds each by itself."""
    world = here()
    zero, ddp = wide(), DistributedDataParallel(wide())
    job = attach(zero, torch.optim.AdamW(zero.parameters(), lr=1e-2), Zero())
    optimizer = torch.optim.AdamW(ddp.module.parameters(), lr=1e-2)
    parameters = [parameter for parameter in ddp.parameters() if parameter.requires_grad]
    for number in range(steps):
        totals = [torch.zeros_like(parameter) for parameter in parameters]
        for index in range(micro):
            batch = jobs.batch(number * micro + index, world.rank, world.size)
            for model in (zero, ddp):
                nn.functional.cross_entropy(model(batch["inputs"]).flatten(0, 1), batch["targets"].flatten()).backward()
            for total, parameter in zip(totals, parameters, strict=True):
                total += parameter.grad
                parameter.grad = None
        for total, parameter in zip(totals, parameters, strict=True):
            parameter.grad = total
        for each in (job.optimizer, optimizer):
            each.step()
            each.zero_grad()
    job.close()
    return {"zero": sums(zero), "ddp": sums(ddp)}


def reduced(*, folder: str, resume: bool = False, steps: int = 3) -> dict[str, Any]:
    """Train in bf16 with float32 masters and save, or resume from there; the state, whole."""
    world = here()
    model = wide().bfloat16()
    features = [AdamW(lr=1e-2), Plain(folder=folder, every=steps), Zero(bucket_mb=1e-3)]
    with compose(Job(model, progress=Progress(total=steps), world=world), features) as job:
        if resume:
            assert job.restore is not None and job.restore("auto") == steps
        while job.progress.step < steps:
            job.step(jobs.batch(job.progress.step, world.rank, world.size))
        state = {"model": job.kept["model"].state.state_dict(), "optimizer": job.kept["optimizer"].state.state_dict()}
        whole = {}
        for name, tensor in flat(state):
            whole[name] = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).double().tolist()
        model.state_dict()
        rounded = {name: parameter.double().tolist() for name, parameter in model.named_parameters()}
        return {"state": whole, "weights": rounded, "facts": job.trace.facts}


def flat(tree: Any, name: str = "") -> list[tuple[str, torch.Tensor]]:
    """The tensors in nested mappings, by path."""
    if isinstance(tree, torch.Tensor):
        return [(name, tree.detach())]
    return (
        [pair for key, value in tree.items() for pair in flat(value, f"{name}/{key}")] if isinstance(tree, dict) else []
    )


def in_hosts(*, hosts: int, how: str = "leave", steps: int = 4, unused: bool = False) -> dict[str, Any]:
    """Train on two virtual hosts: divided inside each, with `hosts = how` between them; or over all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    world = World(rank=rank, size=size, local_rank=rank % (size // hosts), local_size=size // hosts)
    features = [AdamW(lr=1e-2), Zero(hosts=how if hosts > 1 else "shard", bucket_mb=1e-3)]
    if hosts > 1 and how == "leave":
        features.append(Dense())
    model = wide(unused).double()
    with compose(Job(model, progress=Progress(total=steps), world=world), features) as job:
        losses = [float(job.step(jobs.batch(number, rank, size))) for number in range(steps)]
        model.state_dict()
        facts = job.trace.facts
        return {
            "losses": losses,
            "weights": [parameter.tolist() for parameter in model.parameters()],
            "buffers": bits(model.buffers()),
            "sent": facts["zero_bytes"] / facts["zero_steps"],
            "held": facts["zero_held"],
        }


def without_between(*, name: str) -> dict[str, Any]:
    """Train on two virtual hosts that are replicas, one of whose exchanges is left out."""
    left_out = {
        "mean_of_whole": lambda self, tensor, dtype: tensor.to(dtype),
        "broadcast": lambda self, tensors: None,
    }
    whole = Collectives.__init__

    def init(self: Any, group: Any, across: Any = None) -> None:
        whole(self, group, across)
        if across is not None:
            setattr(across, name, left_out[name].__get__(across))

    Collectives.__init__ = init
    try:
        return in_hosts(hosts=2, how="replicate", unused=True, steps=8)
    finally:
        Collectives.__init__ = whole


def by_optimizer(*, name: str, zero: bool, steps: int = 5) -> dict[str, Any]:
    """Train with an optimizer that needs norms or products of whole tensors."""
    world = here()
    model = wide()
    more = {"vector_lr": 0.01} if name == "LARS" else {}
    features = [getattr(optim, name)(lr=1e-2, **more), Zero() if zero else DDP()]
    with compose(Job(model, progress=Progress(total=steps), world=world), features) as job:
        losses = [float(job.step(jobs.batch(number, world.rank, world.size))) for number in range(steps)]
        model.state_dict()
        return {"losses": losses, "weights": sums(model)}


def refused(*, of: str) -> str:
    """Attach to an optimizer of torch's, and say how it was refused."""
    model = wide()
    try:
        attach(model, getattr(torch.optim, of)(model.parameters()), Zero())
    except ConfigError as error:
        return str(error)
    return ""
