"""Selects the layers with the largest residuals for their bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoestring.comm.selection.budget import Layers, Notes, Selector, choose_fitting

EXACTLY = 14  # largest number of layers for which all sets are compared


class Knapsack(Selector):
    """Maximises the sum of u = ‖e + g‖² (1 + steps waited) over the layers sent, within the allowed bytes.

    g is not known yet, so ‖e + g‖² is estimated by ‖e‖² + the average of ‖g‖². An average of earlier ‖e + g‖² would
    send a layer again that has just been sent.

    It is exact for few layers. For more it takes the better of the greedy choice by u per byte and the single most
    valuable layer, which reaches at least half of the optimum (Dantzig 1957). A layer that costs more than a whole
    budget makes the others wait once it comes first.
    """

    def choose(self, layers: Layers, notes: Notes) -> tuple[Sequence[int], Notes]:
        u = (layers.unsent**2 + layers.gradient) * (1 + layers.waited)
        return choose_best(u, layers), notes


def choose_best(u: np.ndarray, layers: Layers) -> list[int]:
    """Choose the layers with the largest sum of u whose prices fit the allowance."""
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
    """Compare all 2^n sets of layers: set i holds layer l where bit l of i is set."""
    value, cost = np.zeros(1), np.zeros(1)
    for layer_value, layer_price in zip(u, price, strict=True):
        value, cost = np.concatenate([value, value + layer_value]), np.concatenate([cost, cost + layer_price])
    chosen = int(np.where(cost <= allowance, value, -1.0).argmax())
    return [layer for layer in range(len(u)) if chosen >> layer & 1]
