"""Chooses, from measured errors, the groups of operators that compute in fewer bits; a pure function.

Errors of groups are nearly independent, so their squares add up. Choosing groups is therefore a knapsack problem: the
capacity is the squared bound, the weight of a group is the squared error that fewer bits add, and its value is the
number of bytes that they save. This module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

GAIN = 0.01
"""Minimum fraction of all groups' bytes that a change must save; less is not worth another compilation."""

ROUNDING = 1e-9
"""Relative tolerance of the bound, so that adding errors in another order does not change the choice."""


class Effect(NamedTuple):
    """The effect on a step if a group of operators computes in fewer bits."""

    error: float
    """Increase of the squared relative error of gradients. Negative if errors cancel or the increase is within the
    noise; since neither can be relied on, `choose` uses the absolute value."""
    spared: float
    """Reduction of the bytes that a step reads and writes."""
    product: bool = False
    """Whether the group consists of matrix products, which fewer bits speed up directly."""


def choose(effects: Mapping[str, Effect], narrow: Collection[str], error: float, bound: float) -> set[str]:
    """Choose the groups that compute in fewer bits, so that the error of gradients stays within a bound.

    Matrix products are chosen first, then the groups that add the least error per byte saved. If no product fits, no
    group is narrowed. Groups that are not in `effects` do not change.

    Args:
        effects: effect of fewer bits, for each measured group.
        narrow: groups that compute in fewer bits now.
        error: squared relative error of gradients now.
        bound: maximum squared relative error.
    """
    now = {name for name in narrow if name in effects}
    costs = {name: abs(effect.error) for name, effect in effects.items()}
    measured = sum(costs[name] for name in now)
    if measured > error:  # groups that are narrow now cannot contribute more than the present error
        costs |= {name: costs[name] * error / measured for name in now}
    used = max(error - measured, 0.0)  # error of the groups that were not measured
    worth = [name for name, effect in effects.items() if effect.product or effect.spared > 0]
    chosen = set[str]()
    for name in sorted(worth, key=lambda name: (not effects[name].product, _rate(costs[name], effects[name]), name)):
        if used + costs[name] <= bound * (1 + ROUNDING):
            used += costs[name]
            chosen.add(name)

    if chosen.isdisjoint(products := {name for name, effect in effects.items() if effect.product}) and products:
        # Without narrowed products, the measured errors of the other groups do not hold: products round their inputs
        # anyway, so operators between products add no error of their own.
        chosen.clear()

    def spared(names: Collection[str]) -> float:
        return sum(effects[name].spared for name in names)

    total = sum(abs(effect.spared) for effect in effects.values())
    fits = error <= bound * (1 + ROUNDING) and not any(effects[name].product for name in chosen - now)
    return now if fits and spared(chosen) - spared(now) < GAIN * total else chosen


def _rate(cost: float, effect: Effect) -> float:
    """Squared error added per byte saved."""
    return cost / effect.spared if effect.spared > 0 else math.inf
