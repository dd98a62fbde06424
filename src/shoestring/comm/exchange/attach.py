"""Attaches a codec to a job: under DDP by its communication hook, otherwise before the optimizer step."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shoestring._torch import overflows, unscale_before_steps
from shoestring.comm.codecs.traffic import ring_bytes
from shoestring.comm.exchange.coordinator import Coordinator, join_names, refuse_added
from shoestring.comm.exchange.ddp_hook import HookState, in_memory_order
from shoestring.comm.exchange.replicas import broadcast_weights, local_shard
from shoestring.comm.exchange.route import Route
from shoestring.comm.exchange.state import ExchangeState
from shoestring.comm.exchange.wire import naming_failures
from shoestring.core.compose import attach as attach_to_loop
from shoestring.core.compose import check_features
from shoestring.core.errors import ConfigError
from shoestring.core.feature import DATA, LOCAL, Phase, Seam
from shoestring.core.job import Job

if TYPE_CHECKING:
    from shoestring.comm.settings.base import Exchange

log = logging.getLogger("shoestring")

NORM_EVERY = 25  # steps between norms of the residuals, which are as large as the gradients


def install(job: Job, settings: Exchange) -> None:
    """Exchange the job's gradients by the settings' codec from now on; do nothing on a single rank."""
    under_ddp = isinstance(job.model, DistributedDataParallel)
    axes = [axis for axis in DATA if (axis in job.replicas) == under_ddp]
    if job.world.ranks_over(axes) == 1 and not settings.runs_alone:
        return
    sharded_codec = settings.needs_all_gradients and job.engine in ("fsdp", "zero")
    routes = [Route(job.world, axes, torus=settings.torus, sharded=sharded_codec) for _ in range(settings.channels)]
    ignored = getattr(job.model, "parameters_to_ignore", ())  # parameters that the user told DDP to ignore
    trained = {name: tensor for name, tensor in job.trained.items() if name not in ignored}
    sizes = {name: local_shard(tensor).numel() * tensor.element_size() for name, tensor in trained.items()}
    scale = (lambda: job.scaler.get_scale()) if under_ddp else (lambda: 1.0)  # without DDP they are unscaled before
    coordinator = Coordinator(
        routes, settings.make_budgeted_codec(), sizes, settings.exchanges, job.world.device, scale
    )
    job.exits.callback(coordinator.close)
    sharded = job.engine in ("fsdp", "zero") or routes[0].inner is not None
    state = ExchangeState(job, coordinator, job.world.ranks_over([LOCAL]) if sharded else 1, repr(settings))
    if isinstance(job.model, DistributedDataParallel):
        job.exits.callback(HookState(coordinator, job.model, sum(sizes.values()) // settings.exchanges).detach)
    else:
        _exchange_before_step(job, axes, state, settings.name)
    job.keep(settings.name.split(".")[0], state, across="own", merge=state.merge)
    job.at(Phase.CAPTURE, _ExchangeMetrics(job, coordinator, routes[0]).publish)


def attach(
    model: nn.Module, feature: Exchange, optimizer: Optimizer | None = None, scaler: GradScaler | None = None
) -> Job:
    """See `shoestring.comm.attach`."""
    job = _build_job(model, feature, optimizer)
    if scaler is not None:
        job.scaler = scaler
        _skip_together(job)
        if not isinstance(model, DistributedDataParallel):  # there gradients are exchanged without the scale
            job.exits.callback(unscale_before_steps(job.built_optimizer))
        if "scaler" in job.kept:
            job.kept["scaler"] = replace(job.kept["scaler"], state=scaler)
    return job


def _build_job(model: nn.Module, feature: Exchange, optimizer: Optimizer | None) -> Job:
    if isinstance(feature, Optimizer):
        raise ConfigError(
            f"the second argument of `comm.attach` is a feature, and {type(feature).__name__} is an optimizer",
            hint="write comm.attach(model, feature, optimizer)",
        )
    if optimizer is not None:
        return attach_to_loop(model, optimizer, feature)
    check_features([feature])
    if Seam.OPTIM in feature.seams:
        raise ConfigError(
            f"`{feature.name}` builds its own optimizer, and none was given to replace",
            hint="give the optimizer as third argument, and step with the returned job's `built_optimizer`",
        )
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(
            f"`{feature.name}` exchanges gradients before the optimizer's step, and no optimizer was given",
            hint="give the optimizer as third argument, or wrap the model in DistributedDataParallel first",
        )
    job = Job(model)
    feature = feature.resolve(job.world)
    feature.check(job)
    feature.apply(job, Seam.WIRE)
    return job


def _exchange_before_step(job: Job, axes: Sequence[str], state: ExchangeState, name: str) -> None:
    """Exchange before any clipping; nothing else keeps the replicas over these mesh axes equal."""
    broadcast_weights([*job.model.parameters(), *job.model.buffers()], job.world.group(axes))
    job.exchange(axes)
    _skip_together(job)
    job.at(Phase.CLIP, partial(_exchange, job, dict(job.trained), state, name))


def _skip_together(job: Job) -> None:
    """Make all ranks skip an optimizer step and its exchange when the loss scaler of one rank finds an overflow.

    Under DDP all ranks have the same gradients by then, and agree anyway.
    """
    group = job.world.group(job.replicas)
    if group is None or isinstance(job.model, DistributedDataParallel) or not job.scaler.is_enabled():
        return
    scaler, unscale = job.scaler, job.scaler.unscale_

    def unscale_(optimizer: Optimizer) -> None:
        unscale(optimizer)
        for overflow in overflows(scaler, optimizer):
            with naming_failures("all-reduce of whether the gradients of a rank overflowed"):
                dist.all_reduce(overflow, dist.ReduceOp.MAX, group=group)

    scaler.unscale_ = unscale_
    job.exits.callback(delattr, scaler, "unscale_")


def _exchange(job: Job, tensors: Mapping[str, Tensor], state: ExchangeState, name: str) -> None:
    """Exchange the gradients of `tensors`, with zeros for parameters that a rank did not use or has frozen since.

    So all ranks exchange the same parameters. The average for a frozen parameter goes back to the residual. A step that
    is replayed has its averages already.

    Raises:
        ConfigError: a parameter is trained now but was not when the exchange was attached, or has been removed.
    """
    if state.replaying:
        return
    trained, coordinator = job.trained, state.coordinator
    refuse_added(name, [parameter for parameter in trained if parameter not in tensors])
    there = trained.keys() | dict(job.module.named_parameters()).keys()
    if gone := [parameter for parameter in tensors if parameter not in there]:
        raise ConfigError(
            f"{join_names(gone)} was removed from the model after `{name}` was attached", hint=f"attach `{name}` again"
        )
    grads = {key: _get_gradient(trained.get(key), tensor) for key, tensor in tensors.items()}
    dense = {key: in_memory_order(grad, like=local_shard(tensors[key])) for key, grad in grads.items()}
    coordinator.exchange(dense)
    for key, grad in grads.items():
        if key not in trained:
            coordinator.return_to_residual(key, dense[key])
        elif grad.data_ptr() != dense[key].data_ptr():
            grad.copy_(dense[key].as_strided(grad.shape, local_shard(tensors[key]).stride()))


def _get_gradient(trained: Tensor | None, before: Tensor) -> Tensor:
    """This rank's shard of a parameter's gradient, created where there is none; zeros for a frozen parameter."""
    if trained is None:
        return torch.zeros_like(local_shard(before))
    if trained.grad is None:
        trained.grad = torch.zeros_like(trained)
    return local_shard(trained.grad)


class _ExchangeMetrics:
    """Publishes the metrics of a step: bytes sent, bytes without compression, and exposed communication time."""

    def __init__(self, job: Job, coordinator: Coordinator, route: Route) -> None:
        self.job, self.coordinator = job, coordinator
        self.before, self.step = coordinator.sent, job.progress.step
        job.trace.facts["wire_without"] = ring_bytes("all-reduce", sum(coordinator.sizes.values()), route.size)

    def publish(self) -> None:
        if self.step == self.job.progress.step:  # counted already: `Job.finish` ends at the step that was just done
            return
        self.step = self.job.progress.step
        sent, facts = self.coordinator.sent, self.job.trace.facts
        self.job.numbers["wire_mb"] = (sent - self.before) / 1e6
        self.job.numbers["exposed_seconds"] = self.coordinator.exposed
        facts["wire_bytes"] = facts.get("wire_bytes", 0.0) + sent - self.before
        facts["wire_steps"] = facts.get("wire_steps", 0.0) + 1
        facts["wire_exposed"] = facts.get("wire_exposed", 0.0) + self.coordinator.exposed
        self.before = sent
        if self.job.progress.step % NORM_EVERY == 0 and "residual" in self.coordinator.codec.state:
            self.job.numbers["residual"] = self.coordinator.codec.norm("residual")
