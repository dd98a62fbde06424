"""The layers that are owed most for their bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoestring.comm.selection.budget import Layers, Notes, Selector, choose_fitting

EXACTLY = 14  # layers for which all sets are compared


class Knapsack(Selector):
    """Maximise the sum of u = ‖e + g‖² (1 + steps waited) over the layers sent, within the bytes allowed.

    ‖e + g‖² is what will be owed at this step, ‖e‖² + the average of ‖g‖², for g is not known yet. An average of
    what was owed before would send a layer again that has just been sent.

    Exact for few layers; for more the better of the greedy choice by u per byte and the single most valuable layer,
    which together reach at least half of the optimum (Dantzig 1957). A layer that costs more than a whole budget is
    waited for once it comes first.
    """

    def choose(self, layers: Layers, notes: Notes) -> tuple[Sequence[int], Notes]:
        u = (layers.unsent**2 + layers.gradient) * (1 + layers.waited)
        return choose_best(u, layers), notes


def choose_best(u: np.ndarray, layers: Layers) -> list[int]:
    """The layers of the greatest sum of u that the allowance affords."""
    order = np.argsort(-u / layers.price, kind="stable")
    if layers.budget < layers.price[order[0]] > layers.allowance:
        return []
    if len(u) <= EXACTLY:
        return choose_exactly(u, layers.price, layers.allowance)
    greedy = choose_fitting(order, layers, patience=layers.budget)
    affordable = np.where(layers.price <= layers.allowance, u, -1.0)
    single = int(affordable.argmax())
    return greedy if u[greedy].sum() >= affordable[single] else [single]


def choose_exactly(u: np.ndarray, price: np.ndarray, allowance: float) -> list[int]:
    """By all 2^n sets of layers: set i holds layer l where bit l of i is set."""
    value, cost = np.zeros(1), np.zeros(1)
    for one, bytes_ in zip(u, price, strict=True):
        value, cost = np.concatenate([value, value + one]), np.concatenate([cost, cost + bytes_])
    chosen = int(np.where(cost <= allowance, value, -1.0).argmax())
    return [layer for layer in range(len(u)) if chosen >> layer & 1]
