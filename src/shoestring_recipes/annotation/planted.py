"""Simulated raters of Fashion-MNIST: each confuses kinds of clothes that look alike, at a known rate of its own."""

from __future__ import annotations

import numpy as np

from shoestring_recipes.annotation.raters import Labels

NAMES = ("T-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
LOOK_ALIKES = ((6, 3), (3, 4), (4, 6), (4, 0), (2, 6), (7, 9), (0, 2, 4), (9, 5), (6, 5), (7, 5))
"""For each kind of clothes, the numbers of the kinds for which it is mistaken."""


def confusions(raters: int, noise: float, rng: np.random.Generator) -> np.ndarray:
    """Draw confusion matrices (raters, kinds, labels). The mean error rate of all raters is about `noise`; that of one
    rater is 0.4 to 1.6 times as high."""
    kinds = len(NAMES)
    rates = np.minimum(noise * rng.uniform(0.4, 1.6, (raters, 1)) * rng.uniform(0.5, 1.5, (raters, kinds)), 0.95)
    table = np.zeros((raters, kinds, kinds))
    for kind, wrong in enumerate(LOOK_ALIKES):
        table[:, kind, wrong] = rates[:, kind, None] * rng.dirichlet(np.ones(len(wrong)), raters)
        table[:, kind, kind] = 1 - rates[:, kind]
    return table


def planted(truth: np.ndarray, raters: int, per_item: int, noise: float, seed: int) -> Labels:
    """Draw the labels of simulated raters for items whose kinds are known.

    Args:
        truth: kind of each item.
        raters: number of raters.
        per_item: number of raters who label each item.
        noise: mean share of wrong labels.
    """
    rng = np.random.default_rng(seed)
    table = confusions(raters, noise, rng)
    people = np.argsort(rng.random((len(truth), raters)), 1)[:, :per_item]
    chances = table[people, truth[:, None]].cumsum(2)
    answers = np.minimum((rng.random(people.shape)[..., None] > chances).sum(2), len(NAMES) - 1)
    items = np.repeat(np.arange(len(truth)), people.shape[1])
    return Labels(items, people.ravel(), answers.ravel(), len(truth), raters, len(NAMES))
