"""Adam's second moment of the replicas' mean gradient, which each replica estimates from its own gradients.

Adam divides by the root of v, a mean of squared gradients over about 1 / (1 - beta2) steps. One of N replicas has the
gradient g of an N-th of the batch. Its noise has N times the variance of the mean gradient's, so v is too large, and v
averages N times fewer samples, so a replica whose gradient is large for once divides by that what it alone could tell
the others. Here v averages over N times as many steps, beta = 1 - (1 - beta2) / N, and takes the first moment m for the
mean of g:

    v <- beta v + (1 - beta) (g^2 / N + (1 - 1/N) m^2)

which would be the mean square of the mean gradient if m were exact. Nothing is exchanged for it.
"""

from __future__ import annotations

from typing import Any

import torch

from shoestring._torch import foreach_addcmul_
from shoestring.comm.exchange.replicas import local_shard
from shoestring.core.job import Job


class SecondMoments:
    """Around the steps of one job's optimizer, where it keeps `exp_avg` and `exp_avg_sq` as torch's Adam does.

    Others with `betas` and `eps` average longer, and no more; what has neither is left alone.

    Args:
        replicas: N.
    """

    def __init__(self, job: Job, replicas: int) -> None:
        self.job, self.replicas = job, replicas
        self._betas: list[tuple[dict[str, Any], tuple[float, float]]] = []  # the program's, of each group, in a step

    def before_step(self) -> None:
        """Let the optimizer's next step average over N times as many steps."""
        self._restore()  # of a step that an error broke off
        for group in self.job.built_optimizer.param_groups:
            if "eps" in group and len(group.get("betas", ())) == 2:
                first, second = group["betas"]
                self._betas.append((group, (first, second)))
                group["betas"] = (first, 1 - (1 - second) / self.replicas)

    @torch.no_grad()
    def after_step(self) -> None:
        """Put the estimate in the place of the g^2 that the step has added: v += (1 - beta) (1 - 1/N) (m^2 - g^2)."""
        optimizer = self.job.built_optimizer
        overflowed = bool(getattr(optimizer, "found_inf", False))  # of a fused one, which skips such a step by itself
        for group, _ in () if overflowed else self._betas:
            stepped = [each for each in group["params"] if each.grad is not None]
            adams = [each for each in stepped if {"exp_avg", "exp_avg_sq"} <= optimizer.state.get(each, {}).keys()]
            if adams:
                states = [optimizer.state[each] for each in adams]
                v, m = ([local_shard(state[key]) for state in states] for key in ("exp_avg_sq", "exp_avg"))
                g = [local_shard(each.grad) for each in adams]
                share = (1 - group["betas"][1]) * (1 - 1 / self.replicas)
                foreach_addcmul_(v, m, m, share)
                foreach_addcmul_(v, g, g, -share)
        self._restore()

    def _restore(self) -> None:
        for group, betas in self._betas:
            group["betas"] = betas
        self._betas.clear()
