"""Tests whether an optimizer updates shards in the same way as whole tensors, by trying the optimizer on both."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from shoestring._torch import step_without_hooks
from shoestring.core.errors import ConfigError
from shoestring.sharded import is_sharded

OWN_STATE = ("state", "param_groups", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def check_shardable(optimizer: Optimizer, mesh: DeviceMesh, feature: str) -> None:
    """Check that an optimizer updates a shard in the same way as the shard's rows in the whole parameter; a collective.

    Raises:
        ConfigError: the optimizer updates shards differently, or fails on shards.
    """
    message = f"`{feature}` lets each rank update its shards of the parameters, but {type(optimizer).__name__}"
    hint = "use optim.AdamW or optim.SGD, or shard nothing with parallel.DDP()"
    for group in optimizer.param_groups:
        settings = {name: value for name, value in group.items() if name != "params"} | {"lr": 1.0}
        try:
            whole = _stepped(optimizer, settings, None, mesh)
            sharded = _stepped(optimizer, settings, mesh, mesh)
        except Exception as error:
            raise ConfigError(f"{message} fails on shards: {type(error).__name__}: {error}", hint=hint) from error
        if not (whole - sharded).abs().max() < 1e-3:  # updates are about as large as the learning rate, 1
            raise ConfigError(f"{message} updates shards differently from whole parameters", hint=hint)


def steps_apart(optimizer: Optimizer) -> bool:
    """Whether an optimizer can update its parameters in several calls: true for torch's own optimizers, false for
    others."""
    return type(optimizer).__module__.startswith("torch.optim")


def _stepped(optimizer: Optimizer, settings: Mapping[str, Any], on: DeviceMesh | None, mesh: DeviceMesh) -> Tensor:
    """Run three steps of a copy of `optimizer` on a matrix, and return this rank's rows of the matrix.

    Args:
        on: the mesh on which the matrix is sharded; if None, the matrix is not sharded.
    """
    size, rank, device = mesh.size(), mesh.get_local_rank(), optimizer.param_groups[0]["params"][0].device
    rows = slice(8 * rank, 8 * rank + 8)
    generator = torch.Generator().manual_seed(0)
    scale = torch.arange(1, 8 * size + 1)[:, None]
    drawn = [(torch.randn(8 * size, 8, generator=generator) * scale).to(device) for _ in range(4)]
    if on is not None:
        from torch.distributed.tensor import DTensor, Shard

        drawn = [DTensor.from_local(tensor[rows].clone(), on, [Shard(0)], run_check=False) for tensor in drawn]
    matrix, *gradients = drawn
    # Create an optimizer with the same class and attributes, but for the matrix and without state.
    parameters = [matrix.requires_grad_()]
    alike = copy.copy(optimizer)
    for name, value in vars(optimizer).items():
        if name not in OWN_STATE:
            setattr(alike, name, _copied(value))
    alike.state = defaultdict(dict)
    alike.param_groups = [{**settings, "params": list(parameters)}]
    alike._optimizer_step_pre_hooks = OrderedDict()
    alike._optimizer_step_post_hooks = OrderedDict()
    for gradient in gradients:
        matrix.grad = gradient
        step_without_hooks(alike)
    return matrix.to_local().detach() if is_sharded(matrix) else matrix.detach()[rows]


def _copied(value: Any) -> Any:
    """Copy an attribute, so that the trial does not change the original. An attribute that cannot be copied, such as a
    process group, is returned itself."""
    try:
        return copy.deepcopy(value)
    except (TypeError, RuntimeError):
        return value
