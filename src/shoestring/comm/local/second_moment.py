"""Adam's second moment of the replicas' mean gradient, which each replica estimates from its own gradients.

Adam divides by the root of v, a mean of squared gradients over about 1 / (1 - beta2) steps. One of N replicas has the
gradient g of an N-th of the batch. Its noise has N times the variance of the mean gradient's, so v is too large; and
where a replica's gradient is large for once, as of a token that it alone has read, it divides by that what only it
could tell the others. Here v averages over N times as many steps, beta = 1 - (1 - beta2) / N, and Adam's first moment m
stands for the mean of g:

    v <- beta v + (1 - beta) (g^2 / N + (1 - 1/N) m^2)

If m were exact, that would be the mean square of the mean gradient. A gradient that one replica alone has, and once,
moves the mean of the replicas as far as it would in one batch of all. Nothing is exchanged for it.

g is what the optimizer squares: with weight decay as a penalty (L2), not decoupled, the decayed weight is added to it.
Where gradients are averaged already, g itself is the mean, and v averages over as many steps: Adam takes v / (1 -
beta^t) for the mean, which is right only if beta was the same in all t steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from shoestring._torch import foreach_add, foreach_addcmul_
from shoestring.comm.exchange.replicas import local_shard
from shoestring.core.job import Job

AVERAGED_FOR = "averaged_for"
"""Where an optimizer's group has the number of replicas by whose beta its v is an average so far."""


class SecondMoments:
    """Around the steps of one job's optimizer, where it keeps `exp_avg` and `exp_avg_sq` as torch's Adam does, in fp32.

    Others with `betas` and `eps` average longer, and no more; what has neither is left alone.

    Args:
        replicas: N.
    """

    def __init__(self, job: Job, replicas: int) -> None:
        self.job, self.replicas = job, replicas
        self._betas: list[tuple[dict[str, Any], tuple[float, float]]] = []  # the program's, of each group, in a step

    @torch.no_grad()
    def before_step(self, *, averaged: bool = False) -> None:
        """Change v so that it will be the estimate once the optimizer has added its share of g^2; not in a parameter's
        first step, which has no state yet.

        Args:
            averaged: whether gradients are the mean already, of which v is then the plain average.
        """
        self.after_step()  # of a step that an error broke off
        optimizer, others = self.job.built_optimizer, 1 - 1 / self.replicas
        overflowed = bool(getattr(optimizer, "found_inf", False))  # of a fused one, which skips such a step by itself
        for group in optimizer.param_groups:
            if "eps" not in group or len(group.get("betas", ())) != 2:
                continue
            first, second = group["betas"]
            self._betas.append((group, (first, second)))
            group["betas"] = first, beta = first, _longer(second, self.replicas)
            former = _longer(second, group.get(AVERAGED_FOR, 1))
            group[AVERAGED_FOR] = self.replicas
            if former != beta:
                _rescale([optimizer.state.get(each, {}) for each in group["params"]], former, beta)
            stepped = [each for each in group["params"] if each.grad is not None]
            adams = [each for each in stepped if _precise(optimizer.state.get(each, {}))]
            if adams and not (overflowed or averaged):
                states = [optimizer.state[each] for each in adams]
                v, m = ([local_shard(state[key]) for state in states] for key in ("exp_avg_sq", "exp_avg"))
                g = [local_shard(each.grad) for each in adams]
                if group.get("weight_decay") and not group.get("decoupled_weight_decay", True):
                    decay = -group["weight_decay"] if group.get("maximize") else group["weight_decay"]
                    g = foreach_add(g, [local_shard(each) for each in adams], alpha=decay)
                share = float(others * (1 - beta) / beta)
                foreach_addcmul_(v, m, m, share)
                foreach_addcmul_(v, g, g, -share)

    def after_step(self) -> None:
        """Give the program its betas back."""
        for group, betas in self._betas:
            group["betas"] = betas
        self._betas.clear()


def _longer(beta: float, replicas: int) -> float:
    """The beta of an average over so many times as many steps."""
    return 1 - (1 - beta) / replicas


def _rescale(states: Iterable[dict[str, Any]], former: float, beta: float) -> None:
    """Let Adam find the same mean in an average by beta as it found in v, which is one by a former beta."""
    for state in filter(_precise, states):
        if steps := float(state.get("step", 0)):
            state["exp_avg_sq"].mul_((1 - beta**steps) / (1 - former**steps))


def _precise(state: dict[str, Any]) -> bool:
    """Whether it is Adam's, and v, from which nearly all of g^2 is taken before it is added, cannot end below zero."""
    return "exp_avg" in state and "exp_avg_sq" in state and state["exp_avg_sq"].dtype in (torch.float32, torch.float64)
