"""Which settings matter: total-effect indices (Sobol) of a Gaussian process of the results, with their uncertainty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from shoestring.tune.gaussian import Array, fit, width
from shoestring.tune.gaussian import encode as encode_all
from shoestring.tune.space import Dimension

LEAST, MOST = 8, 150
"""Results below which nothing can be said, and of which the process takes no more."""
_SAMPLES, _POINTS = 20, 256


@dataclass(frozen=True)
class Importance:
    """Variance of the results that remains when all settings but one are fixed, over all: mean and 90% interval."""

    key: str
    mean: float
    low: float
    high: float


def importances(
    space: Sequence[Dimension], settings: Sequence[Mapping[str, Any]], values: Sequence[float], seed: int = 0
) -> list[Importance]:
    """The importance of each dimension, the largest first; empty where there are too few results.

    Values are replaced by their normal scores, so that a few diverged trials do not decide. Each interval is that of
    fits to random subsets of the results, which also differ in the points at which the effects are measured.
    """
    if len(values) < max(LEAST, 2 * len(space)):
        return []
    chance = np.random.default_rng(seed)
    points = np.array([_encode(space, each) for each in settings])
    scores = stats.norm.ppf((stats.rankdata(values) - 0.5) / len(values))
    found = []
    for _ in range(_SAMPLES):
        chosen = np.unique(chance.integers(len(scores), size=len(scores)))[:MOST]
        process = fit(points[chosen], scores[chosen])
        first, second = _sample(space, chance), _sample(space, chance)
        base = process.marginal(first)[0]
        found.append(_effects(space, first, second, base, lambda at, process=process: process.marginal(at)[0]))
    effects = np.array(found)
    low, high = np.quantile(effects, [0.05, 0.95], axis=0)
    rows = [
        Importance(each.key, float(effects[:, at].mean()), float(low[at]), float(high[at]))
        for at, each in enumerate(space)
    ]
    return sorted(rows, key=lambda row: -row.mean)


def _effects(space: Sequence[Dimension], first: Array, second: Array, base: Array, at: Any) -> list[float]:
    """Jansen's estimate for each dimension, over the variance."""
    variance = float(base.var()) or 1.0
    effects, column = [], 0
    for dimension in space:
        columns = slice(column, column + width([dimension]))
        column = columns.stop
        mixed = first.copy()
        mixed[:, columns] = second[:, columns]
        effects.append(min(1.0, float(np.mean((base - at(mixed)) ** 2) / 2 / variance)))  # by chance above
    return effects


def _encode(space: Sequence[Dimension], settings: Mapping[str, Any]) -> Array:
    """A setting that does not exist lies in the middle of its range, or is none of its choices."""
    parts = [
        encode_all([dimension], settings)
        if dimension.key in settings
        else np.full(width([dimension]), 0.0 if dimension.choices else 0.5)
        for dimension in space
    ]
    return np.concatenate(parts)


def _sample(space: Sequence[Dimension], chance: np.random.Generator) -> Array:
    columns = []
    for dimension in space:
        if dimension.choices:
            columns.append(np.eye(len(dimension.choices))[chance.integers(len(dimension.choices), size=_POINTS)])
        else:
            columns.append(chance.random((_POINTS, 1)))
    return np.concatenate(columns, axis=1)
