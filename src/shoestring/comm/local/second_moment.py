"""Estimates Adam's second moment of the replicas' mean gradient; each replica uses only its own gradients.

Adam divides by the root of v, a mean of squared gradients over about 1 / (1 - beta2) steps. Each of N replicas computes
the gradient g of 1 / N of the batch. The noise of g has N times the variance of the mean gradient's noise, so v is too
large. Also, if only one replica reads a rare token, g is large on that replica in one step, and v shrinks the only step
in which the token can be learned. Here v averages over N times as many steps, beta = 1 - (1 - beta2) / N, and Adam's
first moment m replaces the mean of g:

    v <- beta v + (1 - beta) (g^2 / N + (1 - 1/N) m^2)

If the first moment m were exact, v would be the mean square of the mean gradient. A gradient that occurs only once, on
one replica, moves the mean of the replicas' weights as far as it would in one joint batch. Replicas exchange no data
for this estimate.

g is the tensor that the optimizer squares: with L2 weight decay (not decoupled), g includes the decay term. If
gradients have been averaged already, g is the mean gradient, and v averages g^2 with the same beta, because Adam's bias
correction v / (1 - beta^t) is right only if beta is the same in all t steps.
"""

from __future__ import annotations

from typing import Any

import torch

from shoestring._torch import foreach_add, foreach_addcmul_
from shoestring.core.attachments import Attachments
from shoestring.sharded import local_part

AVERAGED_FOR = "averaged_for"
"""Key in an optimizer's parameter group: number N of replicas for which beta = 1 - (1 - beta2) / N was last used."""


class SecondMoments:
    """Adjusts Adam's second moment v around each step of one job's optimizer.

    The optimizer's state must have `exp_avg` and `exp_avg_sq` in fp32 or fp64, as in torch's Adam. In other optimizers
    with `betas` and `eps`, only the averages run over more steps; an optimizer without `betas` and `eps` is not
    changed.

    Args:
        replicas: the number N of replicas.
    """

    def __init__(self, attachments: Attachments, replicas: int) -> None:
        self.attachments, self.replicas = attachments, replicas
        self._betas: list[tuple[dict[str, Any], tuple[float, float]]] = []  # the configured betas, saved during a step

    @torch.no_grad()
    def before_step(self, *, averaged: bool = False) -> None:
        """Change v in advance so that v is the estimate after the optimizer's step, which adds (1 - beta) g^2.

        In a parameter's first step nothing is changed, because there is no state yet.

        Args:
            averaged: whether gradients are already means over replicas; v is then the plain average of their squares.
        """
        self.after_step()  # in case an error ended the previous step early
        optimizer, others = self.attachments.optimizer, 1 - 1 / self.replicas
        overflowed = bool(getattr(optimizer, "found_inf", False))  # a fused optimizer skips such a step
        for group in optimizer.param_groups:
            if "eps" not in group or len(group.get("betas", ())) != 2:
                continue
            first, second = group["betas"]
            self._betas.append((group, (first, second)))
            group["betas"] = first, beta = first, _longer(second, self.replicas)
            former = _longer(second, group.get(AVERAGED_FOR, 1))
            group[AVERAGED_FOR] = self.replicas
            # Only Adam's states in fp32 or fp64: in a lower precision, v could become negative when nearly all of g^2
            # is subtracted.
            states = {
                parameter: state
                for parameter in group["params"]
                if (state := optimizer.state.get(parameter, {})).keys() >= {"exp_avg", "exp_avg_sq"}
                and state["exp_avg_sq"].dtype in (torch.float32, torch.float64)
            }
            if former != beta:  # so that bias correction with the new beta gives the same mean
                for state in states.values():
                    if steps := float(state.get("step", 0)):
                        state["exp_avg_sq"].mul_((1 - beta**steps) / (1 - former**steps))
            adams = [parameter for parameter in states if parameter.grad is not None]
            if adams and not (overflowed or averaged):
                v, m = (
                    [local_part(states[parameter][key]) for parameter in adams] for key in ("exp_avg_sq", "exp_avg")
                )
                g = [local_part(parameter.grad) for parameter in adams]
                if group.get("weight_decay") and not group.get("decoupled_weight_decay", True):
                    decay = -group["weight_decay"] if group.get("maximize") else group["weight_decay"]
                    g = foreach_add(g, [local_part(parameter) for parameter in adams], alpha=decay)
                share = float(others * (1 - beta) / beta)
                foreach_addcmul_(v, m, m, share)
                foreach_addcmul_(v, g, g, -share)

    def after_step(self) -> None:
        """Restore the configured betas of the parameter groups."""
        for group, betas in self._betas:
            group["betas"] = betas
        self._betas.clear()


def _longer(beta: float, replicas: int) -> float:
    """The beta of an average over `replicas` times as many steps."""
    return 1 - (1 - beta) / replicas
