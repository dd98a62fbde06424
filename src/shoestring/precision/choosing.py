"""Decides by measured errors which groups of operators compute in fewer bits; numbers in, names out.

Errors of groups are nearly independent, so their squares add up. The groups are then the items of a knapsack: the room
is the squared bound, an item weighs the squared error that its fewer bits add, and is worth the bytes that they spare.

Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

GAIN = 0.01
"""Least part of the bytes of all groups that a change must spare; smaller ones are not worth another compilation."""

ROUNDING = 1e-9
"""Part of the bound by which a sum may exceed it: adding errors in another order must not change the choice."""


class Effect(NamedTuple):
    """What fewer bits do to a step, if a group of operators computes in them."""

    error: float
    """Squared relative error of gradients that they add. Below zero where errors cancel, or within the noise, on which
    nobody should count: a group costs the size of its effect."""
    spared: float
    """Bytes that a step reads and writes less."""
    product: bool = False
    """Whether the group consists of products of matrices, which fewer bits make faster by themselves."""


def choose(effects: Mapping[str, Effect], narrow: Collection[str], error: float, bound: float) -> set[str]:
    """Choose the groups that compute in fewer bits, such that the error of gradients stays within a bound.

    Products come first, and then what adds the least error for the bytes that it spares. Without products nothing is
    narrowed. Groups that are not in `effects` stay as they are.

    Args:
        effects: what fewer bits do, for each measured group. narrow: the measured groups that have them now.
        error: squared relative error of gradients now. bound: the largest squared error.
    """
    now = {name for name in narrow if name in effects}
    costs = {name: abs(effect.error) for name, effect in effects.items()}
    measured = sum(costs[name] for name in now)
    if measured > error:  # the costs of what is narrow now are not more than the error
        costs |= {name: costs[name] * error / measured for name in now}
    used = max(error - measured, 0.0)  # by groups that were not measured
    worth = [name for name, effect in effects.items() if effect.product or effect.spared > 0]
    chosen = set[str]()
    for name in sorted(worth, key=lambda name: (not effects[name].product, _rate(costs[name], effects[name]), name)):
        if used + costs[name] <= bound * (1 + ROUNDING):
            used += costs[name]
            chosen.add(name)

    if chosen.isdisjoint(products := {name for name, effect in effects.items() if effect.product}) and products:
        # What lies between products shows no error of its own, because they round its numbers anyway.
        chosen.clear()

    def spared(names: Collection[str]) -> float:
        return sum(effects[name].spared for name in names)

    total = sum(abs(effect.spared) for effect in effects.values())
    fits = error <= bound * (1 + ROUNDING) and not any(effects[name].product for name in chosen - now)
    return now if fits and spared(chosen) - spared(now) < GAIN * total else chosen


def _rate(cost: float, effect: Effect) -> float:
    """The squared error for each byte spared."""
    return cost / effect.spared if effect.spared > 0 else math.inf
