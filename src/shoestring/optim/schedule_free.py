"""Schedule-free AdamW (arXiv:2405.15682): gradients are taken at y = (1 - beta) z + beta x, where z makes AdamW's
steps and x is the average of all z, weighted by the squares of their learning rates. The parameters are y.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoestring._torch import (
    foreach_add,
    foreach_add_,
    foreach_addcmul_,
    foreach_copy_,
    foreach_div,
    foreach_lerp_,
    foreach_mul_,
    foreach_sqrt,
)
from shoestring.core.job import Job
from shoestring.core.task import Params
from shoestring.optim.averaging import check_steps_parameters, swapped
from shoestring.optim.groups import check_matched
from shoestring.optim.norms import local, local_gradient
from shoestring.optim.standard import parameter_groups
from shoestring.optim.stepping import Stepping

if TYPE_CHECKING:
    from shoestring.optim.settings.averaging import ScheduleFree as Settings


def averaged(y: Tensor, z: Tensor, beta: float) -> Tensor:
    """x, from y = (1 - beta) z + beta x."""
    return torch.lerp(y.float(), z.float(), 1 - 1 / beta).to(y.dtype)


class ScheduleFreeAdamW(Stepping):
    """The parameters are where gradients are taken; `average` gives the weights to use."""

    def __init__(
        self,
        params: Any,
        lr: float = 2.5e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        self.betas, self.eps = betas, eps
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def _update(self) -> None:
        for group in self.param_groups:
            if tensors := [each for each in group["params"] if each.grad is not None]:
                self._step(group, tensors)

    def _step(self, group: dict[str, Any], tensors: list[Tensor]) -> None:
        for each in tensors:
            if not (state := self.state[each]):
                state["step"] = torch.zeros(3, dtype=torch.float64)  # steps, sum of weights, largest learning rate
                state["z"] = each.detach().clone()
                state["exp_avg_sq"] = torch.zeros_like(each, memory_format=torch.preserve_format)
        states = [self.state[each] for each in tensors]
        y, grad = [local(each) for each in tensors], [local_gradient(each) for each in tensors]
        z, second = ([local(state[name]) for state in states] for name in ("z", "exp_avg_sq"))
        beta1, beta2 = self.betas
        steps, weights, largest = states[0]["step"].tolist()
        steps += 1
        rate = float(group["lr"]) * (1 - beta2**steps) ** 0.5
        largest = max(largest, rate)
        weights += largest**2
        share = largest**2 / weights if weights else 0.0
        now = torch.tensor([steps, weights, largest], dtype=torch.float64)
        foreach_copy_([state["step"] for state in states], [now] * len(states))
        foreach_mul_(second, beta2)
        foreach_addcmul_(second, grad, grad, 1 - beta2)
        roots = foreach_sqrt(second)
        foreach_add_(roots, self.eps)
        change = foreach_div(grad, roots)
        if group["weight_decay"]:
            change = foreach_add(change, y, alpha=group["weight_decay"])
        foreach_lerp_(y, z, share)
        foreach_add_(y, change, alpha=rate * (beta1 * (1 - share) - 1))
        foreach_add_(z, change, alpha=-rate)

    def average(self) -> dict[Tensor, Tensor]:
        """Parameter -> this rank's part of x, of those that were stepped."""
        return {
            each: averaged(local(each), local(state["z"]), self.betas[0]) for each, state in self.state.items() if state
        }


def build_schedule_free(job: Job, settings: Settings) -> None:
    def build(parameters: Params) -> Optimizer:
        check_matched(settings.groups, job.trained)
        tables = parameter_groups(job.trained, settings.lr, settings.weight_decay, settings.groups)
        return ScheduleFreeAdamW(tables, betas=settings.betas, eps=settings.eps)

    job.build_with(build)


def evaluate_average(job: Job, settings: Settings) -> None:
    """Evaluate the average, and not the weights at which gradients are taken."""
    check_steps_parameters(job, settings.name)

    @contextmanager
    def averages() -> Iterator[None]:
        optimizer = job.built_optimizer
        assert isinstance(optimizer, ScheduleFreeAdamW)
        found = optimizer.average()
        named = {name: found[tensor] for name, tensor in job.trained.items() if tensor in found}
        with swapped(job, named):
            yield

    job.surround_evaluation(averages)
