"""Selects the layers with the largest residuals for their bytes, or those that lower the loss the most for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch

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


class GainKnapsack(Selector):
    """Maximises what sending the layers lowers the loss by, to first order, within the allowed bytes.

    That is ⟨g, M⟩ with g of the next step: known a step later, for layers that were sent and for those that were not.
    Over the number of gradients in M it is averaged over steps, each layer by itself. What is to be sent has one
    gradient more than the steps that it has waited. Before anything is known, ‖g‖² is taken for it.

    Args:
        memory: decay of the average.
        least: share of the mean over the layers that a byte of each is worth at least, so that none waits for ever.
    """

    learns: ClassVar[bool] = True

    def __init__(self, *, memory: float = 0.9, least: float = 0.1) -> None:
        self.memory, self.least = memory, least

    def choose(self, layers: Layers, notes: Notes) -> tuple[Sequence[int], Notes]:
        held = 1 + layers.waited  # gradients in what this choice may send
        known = {name: note.cpu().numpy() for name, note in notes.items()}
        rate, earlier = layers.gradient, held
        if known and len(known["rate"]) == len(held):
            before, earlier = known["held"]  # those of the choice that `gain` is of, and of the one after it
            rate = self.memory * known["rate"] + (1 - self.memory) * layers.gain / before
        least = self.least * (np.abs(rate) / layers.price).mean() * layers.price
        u = np.maximum(rate, least) * held
        return choose_best(u, layers), {
            "rate": torch.from_numpy(rate),
            "held": torch.from_numpy(np.stack([earlier, held])),
        }


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
