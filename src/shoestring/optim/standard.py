"""Torch's own optimizers over groups of parameters: weight decay on matrices only, and groups by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer

from shoestring.core.job import Job
from shoestring.core.task import Params
from shoestring.optim.groups import Group, check_matched, matching


def factory(
    kind: Callable[..., Optimizer], job: Job, weight_decay: float, groups: Sequence[Group], settings: dict[str, Any]
) -> Callable[[Params], Optimizer]:
    """For `Job.build_with`: an optimizer of torch with these settings, one of which is `lr`, over what is trained."""

    def build(parameters: Params) -> Optimizer:
        check_matched(groups, job.trained)
        tables = parameter_groups(job.trained, settings["lr"], weight_decay, groups)
        return kind(tables, fused=_can_fuse(kind, parameters), **settings)

    return build


def parameter_groups(
    trained: Mapping[str, Tensor], lr: float, weight_decay: float, groups: Sequence[Group] = ()
) -> list[dict[str, Any]]:
    """Torch's parameter groups: in each of `groups` and among the rest, what decays as a matrix and what does not."""
    tables: dict[tuple[int, bool], dict[str, Any]] = {}
    for name, parameter in trained.items():
        group, is_vector = matching(groups, name), parameter.ndim < 2
        decay = 0.0 if is_vector else weight_decay
        settings = {"weight_decay": decay, "lr": lr}
        if group is not None:
            settings = {"weight_decay": decay * group.decay_scale, "lr": lr * group.lr_scale}
        key = (groups.index(group) + 1 if group else 0, is_vector)
        tables.setdefault(key, {"params": []} | settings)["params"].append(parameter)
    return [tables[key] for key in sorted(tables)]


def _can_fuse(kind: Callable[..., Optimizer], parameters: list[nn.Parameter]) -> bool:
    if kind is SGD and any(isinstance(parameter, DTensor) for parameter in parameters):  # not in torch up to 2.13
        return False
    return all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in parameters)
