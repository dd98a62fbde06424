"""Schedule-free AdamW (arXiv:2405.15682).

Three sequences of weights: z makes AdamW's steps; x is the average of all z, weighted by the squares of their learning
rates; gradients are taken at y = (1 - beta) z + beta x. The model's parameters hold y. Evaluations and exports use x.
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
from shoestring.core.attachments import Attachments
from shoestring.core.task import Params
from shoestring.optim.averaging import MovingAverage, check_steps_parameters
from shoestring.optim.groups import check_matched
from shoestring.optim.norms import local_gradient
from shoestring.optim.standard import parameter_groups
from shoestring.optim.statistics import average_statistics
from shoestring.optim.stepping import Stepping
from shoestring.optim.swapping import swapped
from shoestring.sharded import local_part

if TYPE_CHECKING:
    from shoestring.optim.settings.averaging import ScheduleFree as Settings

STATISTICS_DECAY = 0.9
"""Decay of the moving average of normalization statistics. Statistics measured with y are close to statistics measured
with x, but noisy. In phases in which the weights changed fast, the loss was off by up to 8% with a decay of 0.95 or
more, and by at most 1% with a decay of 0.9."""


def averaged(y: Tensor, z: Tensor, beta: float) -> Tensor:
    """Solve y = (1 - beta) z + beta x for x, the average."""
    return torch.lerp(y.float(), z.float(), 1 - 1 / beta).to(y.dtype)


class ScheduleFreeAdamW(Stepping):
    """Schedule-free AdamW. The parameters hold y, where gradients are taken; `average` returns x, for evaluation."""

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
            # Tensors with equal counters are updated together. Counters differ only if some tensor had no gradient in a
            # step.
            batches: dict[tuple[float, ...], list[Tensor]] = {}
            for tensor in group["params"]:
                if tensor.grad is not None:
                    batches.setdefault(tuple(self._state(tensor)["step"].tolist()), []).append(tensor)
            for counters, tensors in batches.items():
                self._step(group, tensors, *counters)

    def _state(self, tensor: Tensor) -> dict[str, Any]:
        if not (state := self.state[tensor]):
            # Number of steps, sum of averaging weights, largest learning rate.
            state["step"] = torch.zeros(3, dtype=torch.float64)
            state["z"] = tensor.detach().clone()
            state["exp_avg_sq"] = torch.zeros_like(tensor, memory_format=torch.preserve_format)
        elif not state["step"][0]:  # a resume created the state before it loaded the weights
            state["z"].copy_(tensor)
        return state

    def _step(self, group: dict[str, Any], tensors: list[Tensor], steps: float, weights: float, largest: float) -> None:
        """Update the tensors of one group that have equal counters.

        Args:
            steps: number of steps so far. weights: sum of the averaging weights so far. largest: largest learning rate
                so far.
        """
        states = [self.state[tensor] for tensor in tensors]
        y, grad = [local_part(tensor) for tensor in tensors], [local_gradient(tensor) for tensor in tensors]
        z, second = ([local_part(state[name]) for state in states] for name in ("z", "exp_avg_sq"))
        beta1, beta2 = self.betas
        steps += 1
        rate = float(group["lr"]) * (1 - beta2**steps) ** 0.5
        largest = max(largest, rate)
        weights += largest**2
        share = largest**2 / weights if weights else 0.0
        counters = torch.tensor([steps, weights, largest], dtype=torch.float64)
        foreach_copy_([state["step"] for state in states], [counters] * len(states))
        foreach_mul_(second, beta2)
        foreach_addcmul_(second, grad, grad, 1 - beta2)
        roots = foreach_sqrt(second)
        foreach_add_(roots, self.eps)
        change = foreach_div(grad, roots)
        if group["weight_decay"]:
            change = foreach_add(change, y, alpha=group["weight_decay"])
        # x moves towards the new z by `share`. The update is written in terms of y and z, so that x is not stored.
        foreach_lerp_(y, z, share)
        foreach_add_(y, change, alpha=rate * (beta1 * (1 - share) - 1))
        foreach_add_(z, change, alpha=-rate)

    def average(self) -> dict[Tensor, Tensor]:
        """Return this rank's shard of x for each parameter that has been updated at least once."""
        return {
            tensor: averaged(local_part(tensor), local_part(state["z"]), self.betas[0])
            for tensor, state in self.state.items()
            if state and state["step"][0]
        }


def build_schedule_free(attachments: Attachments, settings: Settings) -> None:
    """Attach schedule-free AdamW as the job's optimizer."""

    def build(parameters: Params) -> Optimizer:
        check_matched(settings.groups, attachments.trained)
        tables = parameter_groups(attachments.trained, settings.lr, settings.weight_decay, settings.groups)
        return ScheduleFreeAdamW(tables, betas=settings.betas, eps=settings.eps)

    attachments.build_with(build)


def evaluate_average(attachments: Attachments, settings: Settings) -> None:
    """Evaluate with the average x in place of the parameters, which are y."""
    check_steps_parameters(attachments, settings.name)

    @contextmanager
    def averages() -> Iterator[None]:
        optimizer = attachments.optimizer
        assert isinstance(optimizer, ScheduleFreeAdamW)
        average = optimizer.average()
        tensors = attachments.named()
        with swapped(tensors, {name: average[tensor] for name, tensor in tensors.items() if tensor in average}):
            yield

    attachments.surround_evaluation(averages)
    average_statistics(attachments, settings.name, MovingAverage(STATISTICS_DECAY))
