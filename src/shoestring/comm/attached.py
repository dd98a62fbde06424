"""A codec between the ranks of a job: under DDP by its hook, under FSDP2 or nothing before the optimizer step."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shoestring.comm.coordinator import Coordinator
from shoestring.comm.ddp import Arriving
from shoestring.comm.route import Route
from shoestring.core._torch import rebucket
from shoestring.core.compose import attach as attach_to_loop
from shoestring.core.errors import ConfigError
from shoestring.core.feature import HOSTS, LOCAL, Phase, Seam
from shoestring.core.job import Job

if TYPE_CHECKING:
    from shoestring.comm.per_step import Exchange

log = logging.getLogger("shoestring")

LEAST = 2**20  # bytes of a bucket: that of DDP's first, which torch.compile takes for the smallest
LOOK = 25  # steps between looks at the residuals, which are as large as the gradients


def install(job: Job, settings: Exchange) -> None:
    """Exchange the job's gradients with the settings' codec from now on; nothing where there is one rank."""
    under_ddp = isinstance(job.model, DistributedDataParallel)
    dimensions = [each for each in (HOSTS, LOCAL) if (each in job.replicas) == under_ddp]
    if job.world.ranks_over(dimensions) == 1 and not settings.alone:
        return
    routes = [Route(job.world, dimensions, torus=settings.torus) for _ in range(settings.channels)]
    ignored = getattr(job.model, "parameters_to_ignore", ())  # by DDP, where its user says so
    trained = {name: tensor for name, tensor in job.trained.items() if name not in ignored}
    sizes = {name: _local(p).numel() * p.element_size() for name, p in trained.items()}
    coordinator = Coordinator(routes, settings.selecting(), sizes, settings.parts, job.world.device)
    job.exits.callback(coordinator.close)
    if isinstance(job.model, DistributedDataParallel):
        _early(job.model, sum(sizes.values()) // settings.parts)
        arriving = Arriving(coordinator, {parameter: name for name, parameter in job.module.named_parameters()})
        arriving.attach(job.model)
        job.at(Phase.CLIP, arriving.take_back)
    else:
        _before_the_step(job, dimensions, coordinator)
    sharded = job.engine == "fsdp" or routes[0].inner is not None
    kept = _Kept(coordinator, job.world.local_size if sharded else 1)
    job.keep(settings.name.split(".")[0], kept, across="own", merge=kept.merge)
    job.at(Phase.CAPTURE, _Meter(job, coordinator, routes[0]).read)


def _early(model: DistributedDataParallel, part: int) -> None:
    """Let DDP hand over a part of so many bytes before the next is computed: two buckets a part, if its own are larger.

    With DDP's usual 25 MB a small model has a single bucket, and nothing travels during the backward pass.
    """
    if model.bucket_bytes_cap > (nbytes := max(part // 2, LEAST)):
        rebucket(model, nbytes)


def attach(model: nn.Module, feature: Exchange, optimizer: Optimizer | None = None) -> Job:
    """See `shoestring.comm.attach`."""
    if optimizer is not None:
        return attach_to_loop(model, optimizer, feature)
    if Seam.OPTIM in feature.seams:
        raise ConfigError(
            f"`{feature.name}` is defined for an optimizer that it builds itself",
            hint="give yours as third argument, and step with the returned job's `built_optimizer`",
        )
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(
            f"`{feature.name}` exchanges gradients before the optimizer's step, and there is no optimizer",
            hint="give the optimizer as third argument, or wrap the model in DistributedDataParallel first",
        )
    job = Job(model)
    feature = feature.resolve(job.world)
    feature.check(job)
    feature.apply(job, Seam.WIRE)
    return job


def _before_the_step(job: Job, dimensions: Sequence[str], coordinator: Coordinator) -> None:
    """Nobody keeps the models equal over these dimensions but the exchange; it comes before any clipping."""
    if (group := job.world.group(dimensions)) is not None:
        for tensor in [*job.model.parameters(), *job.model.buffers()]:
            dist.broadcast(_local(tensor.detach()), group=group, group_src=0)
    job.exchange(dimensions)
    job.at(Phase.CLIP, lambda: coordinator.exchange(dict(_gradients(job.module))))


def _gradients(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """This rank's part of every gradient, with zeros where a rank had no use for a parameter that others may have."""
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        grad = _local(parameter.grad)
        if not grad.is_contiguous():
            raise AssertionError(f"the gradient of {name} is not contiguous")
        yield name, grad


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class _Kept:
    """What survives of an exchange. Where rows are spread over the ranks of a host, each of those has its own rows."""

    def __init__(self, coordinator: Coordinator, locals_: int) -> None:
        self.coordinator, self.locals = coordinator, locals_

    def state_dict(self) -> dict[str, Any]:
        return {"locals": self.locals, **self.coordinator.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.coordinator.load_state_dict(state_dict)

    def merge(self, states: Sequence[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        if states[0]["locals"] != self.locals:
            log.warning("comm: what was not sent yet is lost, for the ranks of a host hold other rows than before")
            return {"round": states[0]["round"], "codec": {}}
        alike = states[rank % self.locals :: self.locals]
        return {"locals": self.locals, **self.coordinator.merged(alike)}


class _Meter:
    """The numbers of a step: bytes sent, what they would have been, and time that nothing hid."""

    def __init__(self, job: Job, coordinator: Coordinator, route: Route) -> None:
        self.job, self.coordinator = job, coordinator
        whole = sum(coordinator.sizes.values())
        self.dense = 2 * (route.size - 1) / route.size * whole
        self.before = coordinator.sent
        self.interfaces = interface_bytes()
        job.trace.facts["wire_without"] = self.dense

    def read(self) -> None:
        sent, facts = self.coordinator.sent, self.job.trace.facts
        self.job.numbers["wire_mb"] = (sent - self.before) / 1e6
        self.job.numbers["exposed_seconds"] = self.coordinator.exposed
        facts["wire_bytes"] = facts.get("wire_bytes", 0.0) + sent - self.before
        facts["wire_steps"] = facts.get("wire_steps", 0.0) + 1
        facts["wire_exposed"] = facts.get("wire_exposed", 0.0) + self.coordinator.exposed
        facts["interface_bytes"] = interface_bytes() - self.interfaces
        self.before = sent
        if self.job.progress.step % LOOK == 0:
            self.job.numbers["residual"] = self.coordinator.codec.norm("residual")


def interface_bytes(table: Path = Path("/proc/self/net/dev")) -> int:
    """Bytes that this host's network interfaces have sent, loopback aside; 0 where Linux does not say."""
    try:
        lines = table.read_text().splitlines()[2:]
    except OSError:
        return 0
    rows = (line.partition(":") for line in lines)
    return sum(int(counters.split()[8]) for name, _, counters in rows if name.strip() != "lo")
