"""Selectors that solve a knapsack problem: they maximise the residuals sent, or the loss reduction, within a budget of
bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch

from shoestring.comm.selection.budget import Layers, Notes, Selector, choose_fitting

EXACTLY = 14  # maximum number of layers for which all subsets are compared


class Knapsack(Selector):
    """Maximises the sum of u = ‖e + g‖² (1 + steps waited) over the layers sent, within the allowed bytes.

    g is not known yet, so ‖e + g‖² is estimated by ‖e‖² + the average of ‖g‖². An average of earlier ‖e + g‖² is not
    used, because a layer that has just been sent would then be sent again.

    The choice is exact for few layers. For more layers, the greedy choice by u per byte is compared with the single
    most valuable layer, and the better choice is taken; it reaches at least half of the optimum (Dantzig 1957). If a
    layer that costs more than a whole budget ranks first, no layer is sent until it fits.
    """

    def choose(self, layers: Layers, notes: Notes) -> tuple[Sequence[int], Notes]:
        u = (layers.unsent**2 + layers.gradient) * (1 + layers.waited)
        return choose_best(u, layers), notes


class GainKnapsack(Selector):
    """Maximises the loss reduction, to first order, by sending layers within the allowed bytes.

    The loss reduction of a layer is ⟨g, M⟩ with g from the next step; this value is known one step later, for sent and
    unsent layers. For each layer, ⟨g, M⟩ divided by the number of gradients in M is averaged over steps. The M of a
    layer that has waited n steps contains n + 1 gradients. Before the first measurement, ‖g‖² is used instead of the
    average.

    Args:
        memory: decay of the average over steps.
        least: lower bound of a layer's value per byte, as a fraction of the mean over layers, so that every layer is
            sent eventually.
    """

    learns: ClassVar[bool] = True

    def __init__(self, *, memory: float = 0.9, least: float = 0.1) -> None:
        self.memory, self.least = memory, least

    def choose(self, layers: Layers, notes: Notes) -> tuple[Sequence[int], Notes]:
        held = 1 + layers.waited  # number of gradients in each layer's M
        known = {name: note.cpu().numpy() for name, note in notes.items()}
        rate, earlier = layers.gradient, held
        if known and len(known["rate"]) == len(held):
            before, earlier = known["held"]  # at the choice to which `gain` belongs, and at the next choice
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
    if layers.budget < layers.price[order[0]] > layers.allowance:  # save bytes until this layer fits
        return []
    if len(u) <= EXACTLY:
        return choose_exactly(u, layers.price, layers.allowance)
    greedy = choose_fitting(order, layers, patience=layers.budget)
    affordable = np.where(layers.price <= layers.allowance, u, -1.0)
    single = int(affordable.argmax())
    return greedy if u[greedy].sum() >= affordable[single] else [single]


def choose_exactly(u: np.ndarray, price: np.ndarray, allowance: float) -> list[int]:
    """Choose the best of all 2^n subsets of layers; subset i contains layer l if bit l of i is set."""
    value, cost = np.zeros(1), np.zeros(1)
    for layer_value, layer_price in zip(u, price, strict=True):
        value, cost = np.concatenate([value, value + layer_value]), np.concatenate([cost, cost + layer_price])
    chosen = int(np.where(cost <= allowance, value, -1.0).argmax())
    return [layer for layer in range(len(u)) if chosen >> layer & 1]
