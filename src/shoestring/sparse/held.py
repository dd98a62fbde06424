"""STEP: Adam trains dense until its second moments are stable; then they stay, and masks begin (Lu et al., 2023).

Under masks gradients are noisy, and second moments that follow them make steps too small. With v̂*, which is corrected
for its bias, held, a step is w ← (1 - lr·decay)·w - lr·m̂ / (√v̂* + ε), as AdamW has it.
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
from shoestring.sparse.masked import ALL, Masks
from shoestring.sparse.shards import local, summed

if TYPE_CHECKING:
    from shoestring.core.job import Job
    from shoestring.sparse.settings import STEP

LOOK_EVERY = 25
"""Steps between two looks at how stable second moments are, each of which waits for an accelerator."""


class HeldMoments(Masks):
    """See `attached.SparseMethod`."""

    def __init__(self, job: Job, settings: STEP) -> None:
        super().__init__(job, settings)
        self.step = settings
        self.dense, self.adam = True, True
        self.held: list[int] = []  # how many steps each group of parameters has made since moments are held
        self.changes: Tensor | None = None  # of the newest steps: mean |v - v of the step before|
        self.seen = 0

    def start(self) -> None:
        optimizer = self.job.built_optimizer
        self.adam = isinstance(optimizer, torch.optim.Adam)
        if not self.adam and not isinstance(optimizer, torch.optim.SGD):
            raise ConflictError(
                f"`sparse.step` holds the second moments of Adam, and the optimizer is {type(optimizer).__name__}",
                hint="train with [optim.adamw]",
            )
        if any(group.get("amsgrad") for group in optimizer.param_groups):
            raise ConflictError("`sparse.step` cannot hold the moments of amsgrad", hint="train without it")
        if self.job.scaler.is_enabled():
            raise ConflictError("`sparse.step` does not know which steps a loss scaler skips", hint="train in bf16")
        window = max(1, round(1 / (1 - optimizer.param_groups[0]["betas"][1]))) if self.adam else 1
        self.changes = torch.zeros(window, device=self.job.world.device)
        for mask in self.masks.values():
            mask.fill_(ALL)

    def before_step(self) -> None:
        if self.dense and self._stable():
            self.dense = False
            self.held = [0] * len(self.job.built_optimizer.param_groups)
        if not self.dense:
            self._refresh()

    def _stable(self) -> bool:
        progress, changes = self.job.progress, self.changes
        if progress.position < self.step.earliest * progress.total or changes is None:
            return False
        if progress.total and progress.position >= self.step.latest * progress.total:
            return True
        if not self.adam:  # there are no second moments to wait for
            return True
        if self.seen < len(changes) or self.seen % LOOK_EVERY:
            return False
        return float(changes.mean()) < self.job.built_optimizer.param_groups[0]["eps"]

    @torch.no_grad()
    def before_update(self) -> None:
        if not self.adam:
            return
        if self.dense:
            self._watch()
        else:
            for number, group in enumerate(self.job.built_optimizer.param_groups):
                self.held[number] += 1
                self._update(group, self.held[number])

    def _watch(self) -> None:
        """Remember the mean change of second moments in this step: (1 - β₂)·|g² - v|."""
        changes, first = self.changes, next(iter(self.job.trained.values()))
        assert changes is not None
        sums = torch.zeros(2, device=changes.device)
        for group in self.job.built_optimizer.param_groups:
            kept = self._moments(group)
            if not kept["exp_avg_sq"]:
                continue
            apart = foreach_mul(kept["grads"], kept["grads"])
            foreach_sub_(apart, kept["exp_avg_sq"])
            sums[0] += (1 - group["betas"][1]) * torch.stack(foreach_norm(apart, 1)).sum()
            sums[1] += sum(each.numel() for each in apart)
        total, count = summed(sums, first)
        changes[self.seen % len(changes)] = total / count.clamp_min(1)
        self.seen += 1

    def _update(self, group: dict[str, Any], steps: int) -> None:
        """Adam's step with held second moments; the optimizer itself then finds no gradients."""
        kept = self._moments(group)
        weights, grads, first = kept["weights"], kept["grads"], kept["exp_avg"]
        if not weights:
            return
        rate, decay, (beta1, beta2) = float(group["lr"]), group["weight_decay"], group["betas"]
        counts = kept["counts"]
        if isinstance(self.job.built_optimizer, torch.optim.AdamW):
            foreach_mul_(weights, 1 - rate * decay)
        elif decay:
            grads = foreach_add(grads, weights, alpha=decay)
        foreach_lerp_(first, grads, 1 - beta1)
        scale = foreach_div(kept["exp_avg_sq"], [1 - beta2**count for count in counts])
        foreach_sqrt_(scale)
        foreach_add_(scale, group["eps"])
        foreach_addcdiv_(weights, first, scale, [-rate / (1 - beta1 ** (count + steps)) for count in counts])
        for weight in group["params"]:
            if "exp_avg_sq" in self.job.built_optimizer.state.get(weight, {}):
                weight.grad = None

    def _moments(self, group: Mapping[str, Any]) -> dict[str, list[Any]]:
        """This rank's parts of all weights of a group that have moments and a gradient."""
        found: dict[str, list[Any]] = {"weights": [], "grads": [], "exp_avg": [], "exp_avg_sq": [], "counts": []}
        for weight, state in self._with_moments(group):
            found["weights"].append(local(weight))
            found["grads"].append(local(weight.grad))
            found["exp_avg"].append(local(state["exp_avg"]))
            found["exp_avg_sq"].append(local(state["exp_avg_sq"]))
            found["counts"].append(float(state["step"]) if not self.dense else 0.0)
        return found

    def _with_moments(self, group: Mapping[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
        for weight in group["params"]:
            state = self.job.built_optimizer.state.get(weight, {})
            if weight.grad is not None and "exp_avg_sq" in state:
                yield weight, state

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"held": list(self.held), "changes": self.changes, "seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.held, self.seen = list(state_dict["held"]), state_dict["seen"]
        if self.changes is not None and self.changes.shape == state_dict["changes"].shape:
            self.changes.copy_(state_dict["changes"])
