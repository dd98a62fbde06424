"""Attaches a codec to a job: with DDP through the communication hook, otherwise right before the optimizer step."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shoestring._torch import overflows
from shoestring.comm.codecs.traffic import ring_bytes
from shoestring.comm.exchange.coordinator import Coordinator, join_names, refuse_added
from shoestring.comm.exchange.ddp_hook import HookState, in_memory_order
from shoestring.comm.exchange.replicas import broadcast_weights
from shoestring.comm.exchange.route import Route
from shoestring.comm.exchange.state import ExchangeState
from shoestring.comm.exchange.wire import naming_failures
from shoestring.core.attachments import Attachments
from shoestring.core.errors import ConfigError
from shoestring.core.feature import DATA, LOCAL, Phase
from shoestring.sharded import local_part

if TYPE_CHECKING:
    from shoestring.comm.settings.base import Exchange

log = logging.getLogger("shoestring")

NORM_EVERY = 25  # steps between measurements of the residuals' norm; a measurement takes a pass over memory


def install(attachments: Attachments, settings: Exchange) -> None:
    """Attach the codec of `settings`, so that every step exchanges gradients with it; does nothing on a single rank."""
    # This exchange leaves out axes over which parameters are sharded, and axes over which local steps merge replicas.
    spread = {axis for axis in DATA if f"SHARD over {axis}" in attachments.owners}
    left = [axis for axis in DATA if axis not in {*attachments.replicas, *spread}]
    in_hook = isinstance(attachments.model, DistributedDataParallel) and attachments.world.ranks_over(left) == 1
    axes = [axis for axis in DATA if axis in attachments.replicas] if in_hook else left
    if attachments.world.ranks_over(axes) == 1 and not settings.runs_alone:
        return
    sharded_codec = settings.needs_all_gradients and bool(attachments.divided)
    transport = settings.transport
    routes = [
        Route(attachments.world, axes, torus=transport.torus, sharded=sharded_codec) for _ in range(transport.channels)
    ]
    ignored = getattr(attachments.model, "parameters_to_ignore", ())  # set by some users of DDP
    trained = {name: tensor for name, tensor in attachments.trained.items() if name not in ignored}
    sizes = {name: local_part(tensor).numel() * tensor.element_size() for name, tensor in trained.items()}
    # Right before the optimizer step, gradients are already unscaled.
    scale = (lambda: attachments.scaler.get_scale()) if in_hook else (lambda: 1.0)
    coordinator = Coordinator(
        routes, settings.make_budgeted_codec(), sizes, settings.exchanges, attachments.world.device, scale
    )
    attachments.exits.callback(coordinator.close)
    sharded = bool(attachments.divided) or routes[0].inner is not None
    state = ExchangeState(
        attachments, coordinator, attachments.world.ranks_over([LOCAL]) if sharded else 1, repr(settings)
    )
    if in_hook:
        assert isinstance(attachments.model, DistributedDataParallel)
        attachments.exits.callback(
            HookState(coordinator, attachments.model, sum(sizes.values()) // settings.exchanges).detach
        )
    else:
        # Without DDP, nothing else makes replicas over these axes equal, or makes them skip the same steps.
        weights = [*attachments.model.parameters(), *attachments.model.buffers()]
        broadcast_weights(weights, attachments.world.group(axes))
        attachments.exchange(axes)
        _skip_together(attachments)
        # Gradients must be averaged before they are clipped, and clipping happens in the same phase.
        tensors = dict(attachments.trained)
        attachments.at(Phase.CLIP, partial(_exchange, attachments, tensors, state, settings.name))
    attachments.keep(settings.name.split(".")[0], state, across="own", merge=state.merge)
    attachments.at(Phase.CAPTURE, _ExchangeMetrics(attachments, coordinator, routes[0]).publish)


def _skip_together(attachments: Attachments) -> None:
    """Make all ranks skip an optimizer step and its exchange if the loss scaler of any rank finds an overflow.

    With DDP this is not needed, because all ranks unscale the same averaged gradients.
    """
    group = attachments.world.group(attachments.replicas)
    if group is None or not attachments.scaler.is_enabled():
        return
    scaler, unscale = attachments.scaler, attachments.scaler.unscale_

    def unscale_(optimizer: Optimizer) -> None:
        unscale(optimizer)
        for overflow in overflows(scaler, optimizer):
            with naming_failures("all-reduce of whether the gradients of a rank overflowed"):
                dist.all_reduce(overflow, dist.ReduceOp.MAX, group=group)

    scaler.unscale_ = unscale_
    attachments.exits.callback(delattr, scaler, "unscale_")


def _exchange(attachments: Attachments, tensors: Mapping[str, Tensor], state: ExchangeState, name: str) -> None:
    """Exchange the gradients of `tensors`. For parameters that this rank did not use in this step, or that are frozen
    now, zeros are exchanged.

    So all ranks exchange the gradients of the same parameters. The average gradient of a frozen parameter is added to
    the residual. In a replayed step nothing is exchanged, because the gradients are already averages.

    Raises:
        ConfigError: a parameter is trained now, but was frozen or missing when the exchange was attached; or a
            parameter was removed.
    """
    if state.replaying:
        return
    trained, coordinator = attachments.trained, state.coordinator
    refuse_added(name, [parameter for parameter in trained if parameter not in tensors])
    present = trained.keys() | dict(attachments.module.named_parameters()).keys()
    if gone := [parameter for parameter in tensors if parameter not in present]:
        raise ConfigError(
            f"{join_names(gone)} was removed from the model after `{name}` was attached", hint=f"attach `{name}` again"
        )
    grads: dict[str, Tensor] = {}  # this rank's shards
    for key, tensor in tensors.items():
        if (parameter := trained.get(key)) is None:  # frozen
            grads[key] = torch.zeros_like(local_part(tensor))
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        grads[key] = local_part(parameter.grad)
    dense = {key: in_memory_order(grad, like=local_part(tensors[key])) for key, grad in grads.items()}
    coordinator.exchange(dense)
    for key, grad in grads.items():
        if key not in trained:
            coordinator.return_to_residual(key, dense[key])
        elif grad.data_ptr() != dense[key].data_ptr():
            grad.copy_(dense[key].as_strided(grad.shape, local_part(tensors[key]).stride()))


class _ExchangeMetrics:
    """Publishes the metrics of a step: bytes sent, bytes without compression, and exposed communication time."""

    def __init__(self, attachments: Attachments, coordinator: Coordinator, route: Route) -> None:
        self.attachments, self.coordinator = attachments, coordinator
        self.before, self.step = coordinator.sent, attachments.progress.step
        attachments.trace.facts["wire_without"] = ring_bytes("all-reduce", sum(coordinator.sizes.values()), route.size)

    def publish(self) -> None:
        if self.step == self.attachments.progress.step:  # `Job.finish` publishes the last step a second time
            return
        self.step = self.attachments.progress.step
        sent, facts = self.coordinator.sent, self.attachments.trace.facts
        self.attachments.numbers["wire_mb"] = (sent - self.before) / 1e6
        self.attachments.numbers["exposed_seconds"] = self.coordinator.exposed
        facts["wire_bytes"] = facts.get("wire_bytes", 0.0) + sent - self.before
        facts["wire_steps"] = facts.get("wire_steps", 0.0) + 1
        facts["wire_exposed"] = facts.get("wire_exposed", 0.0) + self.coordinator.exposed
        self.before = sent
        if self.attachments.progress.step % NORM_EVERY == 0 and "residual" in self.coordinator.codec.state:
            self.attachments.numbers["residual"] = self.coordinator.codec.norm("residual")
