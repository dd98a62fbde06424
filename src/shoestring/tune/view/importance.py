"""Estimates the importance of settings: total-effect Sobol indices of a Gaussian process fitted to the results."""

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
"""Minimum number of results for an estimate, and maximum number of results to which the Gaussian process is fitted."""
_SAMPLES, _POINTS = 20, 256


@dataclass(frozen=True)
class Importance:
    """A setting's total effect (the variance that remains if all other settings are fixed), with 90% interval."""

    key: str
    mean: float
    low: float
    high: float


def importances(
    space: Sequence[Dimension], settings: Sequence[Mapping[str, Any]], values: Sequence[float], seed: int = 0
) -> list[Importance]:
    """Estimate the importance of each dimension, the largest first; empty if there are too few results.

    Values are replaced by their normal scores, so that a few diverged trials do not dominate. The intervals come from
    fits to random subsets of the results, with different random points of evaluation for each fit.
    """
    if len(values) < max(LEAST, 2 * len(space)):
        return []
    chance = np.random.default_rng(seed)
    points = np.array([_encode(space, trial) for trial in settings])
    scores = stats.norm.ppf((stats.rankdata(values) - 0.5) / len(values))
    samples = []
    for _ in range(_SAMPLES):
        chosen = np.unique(chance.integers(len(scores), size=len(scores)))[:MOST]
        process = fit(points[chosen], scores[chosen])
        first, second = _sample(space, chance), _sample(space, chance)
        base = process.marginal(first)[0]
        samples.append(_effects(space, first, second, base, lambda at, process=process: process.marginal(at)[0]))
    effects = np.array(samples)
    low, high = np.quantile(effects, [0.05, 0.95], axis=0)
    rows = [
        Importance(dimension.key, float(effects[:, at].mean()), float(low[at]), float(high[at]))
        for at, dimension in enumerate(space)
    ]
    return sorted(rows, key=lambda row: -row.mean)


def _effects(space: Sequence[Dimension], first: Array, second: Array, base: Array, at: Any) -> list[float]:
    """Jansen's estimate of each dimension's total effect (Computer Physics Communications 117, 1999)."""
    variance = float(base.var()) or 1.0
    effects, column = [], 0
    for dimension in space:
        columns = slice(column, column + width([dimension]))
        column = columns.stop
        mixed = first.copy()
        mixed[:, columns] = second[:, columns]
        # a sampled estimate may exceed 1
        effects.append(min(1.0, float(np.mean((base - at(mixed)) ** 2) / 2 / variance)))
    return effects


def _encode(space: Sequence[Dimension], settings: Mapping[str, Any]) -> Array:
    """Encode a trial's settings; a missing setting becomes the middle of its range, or zeros if it is a choice."""
    parts = [
        encode_all([dimension], settings)
        if dimension.key in settings
        else np.full(width([dimension]), 0.0 if dimension.choices else 0.5)
        for dimension in space
    ]
    return np.concatenate(parts)


def _sample(space: Sequence[Dimension], chance: np.random.Generator) -> Array:
    """Draw random encoded points of the space."""
    columns = []
    for dimension in space:
        if dimension.choices:
            columns.append(np.eye(len(dimension.choices))[chance.integers(len(dimension.choices), size=_POINTS)])
        else:
            columns.append(chance.random((_POINTS, 1)))
    return np.concatenate(columns, axis=1)
