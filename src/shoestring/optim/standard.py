"""Builds torch's optimizers, with parameter groups by name and weight decay on matrices only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from shoestring.core.attachments import Attachments
from shoestring.core.task import Params
from shoestring.optim.groups import check_matched, matching
from shoestring.sharded import is_sharded

if TYPE_CHECKING:
    from shoestring.optim.settings.groups import Group


def factory(
    kind: Callable[..., Optimizer],
    attachments: Attachments,
    weight_decay: float,
    groups: Sequence[Group],
    settings: dict[str, Any],
) -> Callable[[Params], Optimizer]:
    """Return a factory for `Attachments.build_with`, which builds torch's optimizer `kind` over the trained parameters.

    Args:
        settings: keyword arguments of `kind`, including `lr`.
    """

    def build(parameters: Params) -> Optimizer:
        check_matched(groups, attachments.trained)
        tables = parameter_groups(attachments.trained, settings["lr"], weight_decay, groups)
        fused = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in parameters)
        if kind is SGD and any(is_sharded(parameter) for parameter in parameters):
            fused = False  # torch up to 2.13 has no fused SGD for DTensors
        optimizer = kind(tables, fused=fused, **settings)
        if fused and settings.get("momentum"):
            optimizer.register_step_pre_hook(_lay_out_momentum)
        return optimizer

    return build


def parameter_groups(
    trained: Mapping[str, Tensor], lr: float, weight_decay: float, groups: Sequence[Group] = ()
) -> list[dict[str, Any]]:
    """Build torch's parameter groups: matrices, which have weight decay, and vectors, which have none, are in separate
    groups.

    Parameters that match none of `groups` come first; the parameters of `groups` follow, in the order of `groups`.
    """
    tables: dict[tuple[int, bool], dict[str, Any]] = {}
    for name, parameter in trained.items():
        group, is_vector = matching(groups, name), parameter.ndim < 2
        decay = 0.0 if is_vector else weight_decay
        settings: dict[str, Any] = {"weight_decay": decay, "lr": lr}
        if group is not None:
            settings = {"weight_decay": decay * group.decay_scale, "lr": lr * group.lr_scale}
            settings |= {"betas": tuple(group.betas)} if group.betas else {}
        key = (groups.index(group) + 1 if group else 0, is_vector)
        tables.setdefault(key, {"params": []} | settings)["params"].append(parameter)
    return [tables[key] for key in sorted(tables)]


def _lay_out_momentum(optimizer: Optimizer, *_: object) -> None:
    """Create a zero momentum for parameters at their first step if other parameters of the group already have a
    momentum.

    This function is a step pre-hook. Torch's fused SGD requires that either all parameters of a group have a momentum
    or none.
    """
    for group in optimizer.param_groups:
        stepped = [parameter for parameter in group["params"] if parameter.grad is not None]
        lacking = [parameter for parameter in stepped if optimizer.state[parameter].get("momentum_buffer") is None]
        if len(lacking) < len(stepped):  # at a group's first step torch creates all momenta
            for parameter in lacking:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
