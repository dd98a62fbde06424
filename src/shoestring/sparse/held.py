"""STEP: train dense until Adam's second moments are stable, then freeze the second moments and train with masks.

Gradients under masks are noisy, and second moments computed from noisy gradients make steps too small (Lu et al.,
2023). With frozen bias-corrected second moments v̂*, AdamW's step is w ← (1 - lr·decay)·w - lr·m̂ / (√v̂* + ε).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoestring._torch import (
    foreach_add,
    foreach_add_,
    foreach_addcdiv_,
    foreach_div,
    foreach_lerp_,
    foreach_mul,
    foreach_mul_,
    foreach_norm,
    foreach_sqrt_,
    foreach_sub_,
)
from shoestring.core.errors import ConflictError
from shoestring.sharded import local_part
from shoestring.sparse.masked import ALL, Masks
from shoestring.sparse.shards import summed

if TYPE_CHECKING:
    from shoestring.core.attachments import Attachments
    from shoestring.sparse.settings import STEP

LOOK_EVERY = 25
"""Steps between two checks of how stable the second moments are; each check waits for the device."""


class HeldMoments(Masks):
    """Masks of STEP, and Adam's steps after second moments are frozen; see `attached.SparseMethod`."""

    def __init__(self, attachments: Attachments, settings: STEP) -> None:
        super().__init__(attachments, settings)
        self.step = settings
        self.dense, self.adam = True, True
        self.held: dict[str, int] = {}  # number of steps of each weight since second moments were frozen
        self.changes: Tensor | None = None  # ring buffer: mean |change of v| in each of the newest steps
        self.seen = 0  # number of steps written to `changes`

    def start(self) -> None:
        optimizer = self.attachments.optimizer
        self.adam = isinstance(optimizer, torch.optim.Adam)
        if not self.adam and not isinstance(optimizer, torch.optim.SGD):
            raise ConflictError(
                f"`sparse.step` freezes the second moments of Adam, and the optimizer is {type(optimizer).__name__}",
                hint="train with [optim.adamw]",
            )
        if any(group.get("amsgrad") for group in optimizer.param_groups):
            raise ConflictError("`sparse.step` cannot freeze the second moments of amsgrad", hint="train without it")
        if self.attachments.scaler.is_enabled():
            raise ConflictError("`sparse.step` does not know which steps a loss scaler skips", hint="train in bf16")
        window = max(1, round(1 / (1 - optimizer.param_groups[0]["betas"][1]))) if self.adam else 1
        self.changes = torch.zeros(window, device=self.attachments.world.device)
        for mask in self.masks.values():
            mask.fill_(ALL)

    def before_step(self) -> None:
        if self.dense and self._stable():
            self.dense = False
        if not self.dense:
            self._refresh()

    def _stable(self) -> bool:
        """Whether masks should begin: after `earliest` if second moments are stable, after `latest` in any case."""
        progress, changes = self.attachments.progress, self.changes
        if progress.position < self.step.earliest * progress.total or changes is None:
            return False
        if progress.total and progress.position >= self.step.latest * progress.total:
            return True
        if not self.adam:  # there are no second moments to wait for
            return True
        if self.seen < len(changes) or self.seen % LOOK_EVERY:
            return False
        return float(changes.mean()) < self.attachments.optimizer.param_groups[0]["eps"]

    @torch.no_grad()
    def before_update(self) -> None:
        if not self.adam:
            return
        if not self.dense:
            names = self._names()
            for group in self.attachments.optimizer.param_groups:
                self._update(group, names)
            return
        # Record the mean change of second moments in this step: (1 - β₂)·|g² - v|.
        changes, first = self.changes, next(iter(self.attachments.trained.values()))
        assert changes is not None
        sums = torch.zeros(2, device=changes.device)
        for group in self.attachments.optimizer.param_groups:
            moments = self._moments(group)
            if not moments["exp_avg_sq"]:
                continue
            differences = foreach_mul(moments["grads"], moments["grads"])
            foreach_sub_(differences, moments["exp_avg_sq"])
            sums[0] += (1 - group["betas"][1]) * torch.stack(foreach_norm(differences, 1)).sum()
            sums[1] += sum(difference.numel() for difference in differences)
        total, count = summed(sums, first)
        changes[self.seen % len(changes)] = total / count.clamp_min(1)
        self.seen += 1

    def _names(self) -> dict[int, str]:
        """Maps the `id` of each trained tensor to its name."""
        return {id(tensor): name for name, tensor in self.attachments.trained.items()}

    def _update(self, group: dict[str, Any], names: Mapping[int, str]) -> None:
        """Apply Adam's update with frozen second moments, and remove the gradients, so that the optimizer updates
        nothing."""
        moments = self._moments(group)
        weights, grads, first = moments["weights"], moments["grads"], moments["exp_avg"]
        if not weights:
            return
        rate, decay, (beta1, beta2) = float(group["lr"]), group["weight_decay"], group["betas"]
        counts = moments["counts"]  # steps of the optimizer before `exp_avg_sq` was frozen
        steps = [self._count(names[id(weight)]) for weight, _ in self._with_moments(group)]
        if isinstance(self.attachments.optimizer, torch.optim.AdamW):
            foreach_mul_(weights, 1 - rate * decay)
        elif decay:
            grads = foreach_add(grads, weights, alpha=decay)
        foreach_lerp_(first, grads, 1 - beta1)
        scale = foreach_div(moments["exp_avg_sq"], [1 - beta2**count for count in counts])
        foreach_sqrt_(scale)
        foreach_add_(scale, group["eps"])
        factors = [-rate / (1 - beta1 ** (count + own)) for count, own in zip(counts, steps, strict=True)]
        foreach_addcdiv_(weights, first, scale, factors)
        for weight in group["params"]:
            if "exp_avg_sq" in self.attachments.optimizer.state.get(weight, {}):
                weight.grad = None

    def _count(self, name: str) -> int:
        """Count a step of a weight with frozen moments, and return the number of such steps."""
        self.held[name] = self.held.get(name, 0) + 1
        return self.held[name]

    def _moments(self, group: Mapping[str, Any]) -> dict[str, list[Any]]:
        """This rank's shards of all weights in a group that have moments and a gradient, as lists for foreach
        operators."""
        lists: dict[str, list[Any]] = {"weights": [], "grads": [], "exp_avg": [], "exp_avg_sq": [], "counts": []}
        for weight, state in self._with_moments(group):
            lists["weights"].append(local_part(weight))
            lists["grads"].append(local_part(weight.grad))
            lists["exp_avg"].append(local_part(state["exp_avg"]))
            lists["exp_avg_sq"].append(local_part(state["exp_avg_sq"]))
            lists["counts"].append(float(state["step"]) if not self.dense else 0.0)
        return lists

    def _with_moments(self, group: Mapping[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Yield the weights of a group that have moments and a gradient, each with its optimizer state."""
        for weight in group["params"]:
            state = self.attachments.optimizer.state.get(weight, {})
            if weight.grad is not None and "exp_avg_sq" in state:
                yield weight, state

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"held": dict(self.held), "changes": self.changes, "seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        held, self.seen = state_dict["held"], state_dict["seen"]
        if isinstance(held, list):  # earlier versions saved one number per parameter group
            names = self._names()
            groups = zip(self.attachments.optimizer.param_groups, held, strict=False)
            held = {names[id(weight)]: steps for group, steps in groups for weight in group["params"]}
        self.held = dict(held)
        if self.changes is not None and self.changes.shape == state_dict["changes"].shape:
            self.changes.copy_(state_dict["changes"])
