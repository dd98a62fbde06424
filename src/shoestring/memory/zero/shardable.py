"""Whether an optimizer steps shards as it steps whole tensors, found by letting it do both."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from shoestring._torch import step_without_hooks
from shoestring.core.errors import ConfigError

OWN_STATE = ("state", "param_groups", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def check_shardable(optimizer: Optimizer, mesh: DeviceMesh, feature: str) -> None:
    """Raise ConfigError where a shard of a parameter would not be stepped as within the whole of it; a collective."""
    said = f"`{feature}` lets ranks step shards of the parameters, which {type(optimizer).__name__}"
    hint = "use optim.AdamW or optim.SGD, or shard nothing with parallel.DDP()"
    for group in optimizer.param_groups:
        settings = {name: value for name, value in group.items() if name != "params"} | {"lr": 1.0}
        try:
            whole = _stepped(optimizer, settings, None, mesh)
            sharded = _stepped(optimizer, settings, mesh, mesh)
        except Exception as error:
            raise ConfigError(f"{said} cannot be tried on: {type(error).__name__}: {error}", hint=hint) from error
        if not (whole - sharded).abs().max() < 1e-3:  # of steps of about the learning rate, which is 1 here
            raise ConfigError(f"{said} does not step as it steps the whole of them", hint=hint)


def steps_apart(optimizer: Optimizer) -> bool:
    """Whether parameters may be stepped by one call after the other: true of torch's own, which keep no other state."""
    return type(optimizer).__module__.startswith("torch.optim")


def _stepped(optimizer: Optimizer, settings: Mapping[str, Any], on: DeviceMesh | None, mesh: DeviceMesh) -> Tensor:
    """This rank's rows of a matrix after three steps of an optimizer like `optimizer`: whole, or sharded on a mesh."""
    size, rank, device = mesh.size(), mesh.get_local_rank(), optimizer.param_groups[0]["params"][0].device
    rows = slice(8 * rank, 8 * rank + 8)
    generator = torch.Generator().manual_seed(0)
    scale = torch.arange(1, 8 * size + 1)[:, None]
    drawn = [(torch.randn(8 * size, 8, generator=generator) * scale).to(device) for _ in range(4)]
    if on is not None:
        drawn = [DTensor.from_local(each[rows].clone(), on, [Shard(0)], run_check=False) for each in drawn]
    matrix, *gradients = drawn
    alike = _alike(optimizer, settings, [matrix.requires_grad_()])
    for gradient in gradients:
        matrix.grad = gradient
        step_without_hooks(alike)
    return matrix.to_local().detach() if isinstance(matrix, DTensor) else matrix.detach()[rows]


def _alike(optimizer: Optimizer, settings: Mapping[str, Any], parameters: Sequence[Tensor]) -> Optimizer:
    """An optimizer of the same class and attributes over other parameters, with no state yet."""
    alike = copy.copy(optimizer)
    for name, value in vars(optimizer).items():
        if name not in OWN_STATE:
            setattr(alike, name, _copied(value))
    alike.state = defaultdict(dict)
    alike.param_groups = [{**settings, "params": list(parameters)}]
    alike._optimizer_step_pre_hooks = OrderedDict()
    alike._optimizer_step_post_hooks = OrderedDict()
    return alike


def _copied(value: Any) -> Any:
    """What it keeps of its own must not be changed; process groups and the like cannot be copied, and do not change."""
    try:
        return copy.deepcopy(value)
    except (TypeError, RuntimeError):
        return value
