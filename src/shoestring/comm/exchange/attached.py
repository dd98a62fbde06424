"""A codec between the ranks of a job: under DDP by its hook, under FSDP2 or nothing before the optimizer step."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler  # pyright: ignore[reportPrivateImportUsage]
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shoestring._torch import overflows
from shoestring.comm.exchange.coordinator import Coordinator, several
from shoestring.comm.exchange.ddp_hook import Arriving, in_memory_order
from shoestring.comm.exchange.replicas import begin_equal, local
from shoestring.comm.exchange.route import Route
from shoestring.comm.exchange.wire import naming
from shoestring.core.compose import attach as attach_to_loop
from shoestring.core.errors import ConfigError
from shoestring.core.feature import DATA, LOCAL, Phase, Seam
from shoestring.core.job import Job

if TYPE_CHECKING:
    from shoestring.comm.settings.per_step import Exchange

log = logging.getLogger("shoestring")

LOOK = 25  # steps between looks at the residuals, which are as large as the gradients


def install(job: Job, settings: Exchange) -> None:
    """Exchange the job's gradients with the settings' codec from now on; nothing where there is one rank."""
    under_ddp = isinstance(job.model, DistributedDataParallel)
    dimensions = [axis for axis in DATA if (axis in job.replicas) == under_ddp]
    if job.world.ranks_over(dimensions) == 1 and not settings.alone:
        return
    totals = settings.together and job.engine == "fsdp"
    routes = [Route(job.world, dimensions, torus=settings.torus, totals=totals) for _ in range(settings.channels)]
    ignored = getattr(job.model, "parameters_to_ignore", ())  # by DDP, where its user says so
    trained = {name: tensor for name, tensor in job.trained.items() if name not in ignored}
    sizes = {name: local(tensor).numel() * tensor.element_size() for name, tensor in trained.items()}
    scale = (lambda: job.scaler.get_scale()) if under_ddp else (lambda: 1.0)  # else gradients come after `unscale_`
    coordinator = Coordinator(routes, settings.selecting(), sizes, settings.exchanges, job.world.device, scale)
    job.exits.callback(coordinator.close)
    if isinstance(job.model, DistributedDataParallel):
        job.exits.callback(Arriving(coordinator, job.model, sum(sizes.values()) // settings.exchanges).detach)
    else:
        _before_the_step(job, dimensions, coordinator, settings.name)
    sharded = job.engine == "fsdp" or routes[0].inner is not None
    kept = _Kept(coordinator, job.world.ranks_over([LOCAL]) if sharded else 1)
    job.keep(settings.name.split(".")[0], kept, across="own", merge=kept.merge)
    job.at(Phase.CAPTURE, _Meter(job, coordinator, routes[0]).read)


def attach(
    model: nn.Module, feature: Exchange, optimizer: Optimizer | None = None, scaler: GradScaler | None = None
) -> Job:
    """See `shoestring.comm.attach`."""
    job = _attached(model, feature, optimizer)
    if scaler is not None:
        job.scaler = scaler
        _skip_together(job)
        if "scaler" in job.kept:
            job.kept["scaler"] = replace(job.kept["scaler"], state=scaler)
    return job


def _attached(model: nn.Module, feature: Exchange, optimizer: Optimizer | None) -> Job:
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


def _before_the_step(job: Job, dimensions: Sequence[str], coordinator: Coordinator, name: str) -> None:
    """Nobody keeps the models equal over these dimensions but the exchange; it comes before any clipping."""
    begin_equal([*job.model.parameters(), *job.model.buffers()], job.world.group(dimensions))
    job.exchange(dimensions)
    _skip_together(job)
    job.at(Phase.CLIP, partial(_exchange, job, dict(job.trained), coordinator, name))


def _skip_together(job: Job) -> None:
    """Let all ranks skip an optimizer step, and the exchange in it, where the loss scaler of one finds an overflow.

    Under DDP all have the same gradients by then.
    """
    group = job.world.group(job.replicas)
    if group is None or isinstance(job.model, DistributedDataParallel) or not job.scaler.is_enabled():
        return
    scaler, unscale = job.scaler, job.scaler.unscale_

    def unscale_(optimizer: Optimizer) -> None:
        unscale(optimizer)
        for found in overflows(scaler, optimizer):
            with naming("all-reduce of whether the gradients of a rank overflowed"):
                dist.all_reduce(found, dist.ReduceOp.MAX, group=group)

    scaler.unscale_ = unscale_
    job.exits.callback(delattr, scaler, "unscale_")


def _exchange(job: Job, tensors: Mapping[str, Tensor], coordinator: Coordinator, name: str) -> None:
    """Exchange the gradients of `tensors`, with zeros for one that a rank did not use, or has frozen meanwhile.

    So ranks exchange the same whatever each of them uses. What comes for a frozen parameter stays owed.

    Raises:
        ConfigError: a parameter is trained now that was not when the exchange was attached, or is gone.
    """
    trained = job.trained
    if new := [each for each in trained if each not in tensors]:
        raise ConfigError(
            f"trained now, but not when `{name}` was attached: {several(new)}", hint=f"attach `{name}` afterwards"
        )
    there = trained.keys() | dict(job.module.named_parameters()).keys()
    if gone := [each for each in tensors if each not in there]:
        raise ConfigError(
            f"no longer in the model, as when `{name}` was attached: {several(gone)}", hint=f"attach `{name}` anew"
        )
    grads = {each: _gradient(trained.get(each), tensor) for each, tensor in tensors.items()}
    dense = {each: in_memory_order(grad, like=local(tensors[each])) for each, grad in grads.items()}
    coordinator.exchange(dense)
    for each, grad in grads.items():
        if each not in trained:
            coordinator.take_back(each, dense[each])
        elif grad.data_ptr() != dense[each].data_ptr():
            grad.copy_(dense[each].as_strided(grad.shape, local(tensors[each]).stride()))


def _gradient(trained: Tensor | None, before: Tensor) -> Tensor:
    """This rank's part of a tensor's gradient, which from now on it has; of one that is frozen by now, zeros."""
    if trained is None:
        return torch.zeros_like(local(before))
    if trained.grad is None:
        trained.grad = torch.zeros_like(trained)
    return local(trained.grad)


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
