"""Agreement among raters: Krippendorff's alpha, Fleiss' kappa and Cohen's kappa, with bootstrap intervals.

A measure is NaN where it is undefined: if no item has two ratings, or if all ratings that can be paired are the same,
so that no disagreement could be expected by chance.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from shoestring.core.errors import ConfigError, DataError, nearest

LEVELS = ("nominal", "ordinal", "interval", "ratio")
"""Levels of measurement; the level determines how much two different ratings disagree."""
MOST_VALUES = 4000
"""Maximum number of different ratings; memory grows with its square, because all pairs of values are compared."""
MOST_UNDEFINED = 0.05
"""Maximum share of bootstrap samples in which a measure may be undefined; above it the interval is undefined too."""


def tally(ratings: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Count how often each item got each rating.

    Args:
        ratings: (items, raters), NaN where a rater has not rated an item.

    Returns:
        The counts (items, values) and the sorted values.

    Raises:
        DataError: the ratings are not a table, include infinity, or have more than `MOST_VALUES` different values.
    """
    table = np.asarray(ratings, dtype=np.float64)
    if table.ndim != 2 or np.isinf(table).any():
        raise DataError(f"ratings of shape {table.shape} are no table of finite numbers", hint="use NaN for a hole")
    rated = ~np.isnan(table)
    values, places = np.unique(table[rated], return_inverse=True)
    if len(values) > MOST_VALUES:
        raise DataError(f"there are {len(values)} different ratings, more than {MOST_VALUES}", hint="round them")
    cells = np.nonzero(rated)[0] * len(values) + places
    return np.bincount(cells, minlength=table.shape[0] * len(values)).reshape(table.shape[0], len(values)), values


def krippendorff(ratings: np.ndarray, level: str = "nominal") -> float:
    """Compute Krippendorff's alpha (Krippendorff, *Content analysis*, 2004) of ratings (items, raters), NaN for holes.

    Raises:
        ConfigError: `level` is not in `LEVELS`.
        DataError: as for `tally`, or a rating is negative at level `ratio`.
    """
    return alpha(*tally(ratings), level)


def alpha(counts: np.ndarray, values: np.ndarray, level: str = "nominal") -> float:
    """Compute Krippendorff's alpha from how often each item got each of the sorted values; see `krippendorff`."""
    numbers = counts.sum(1)
    paired, pairs = counts[numbers > 1].astype(np.float64), numbers[numbers > 1] - 1.0
    weighted = paired / pairs[:, None]
    coincidences = weighted.T @ paired - np.diag(weighted.sum(0))
    totals = paired.sum(0)
    differences = _differences(values, totals, level)
    if not len(pairs):
        return math.nan
    expected = totals @ differences @ totals / (totals.sum() - 1)
    return float(1 - (coincidences * differences).sum() / expected) if expected > 0 else math.nan


def _differences(values: np.ndarray, totals: np.ndarray, level: str) -> np.ndarray:
    """Return the squared differences of all pairs of values at a level of measurement."""
    if level == "nominal":
        return 1.0 - np.eye(len(values))
    if level == "interval":
        return np.square(values[:, None] - values)
    if level == "ordinal":  # ranks differ by the ratings between two values, plus half of those at both
        ranks = np.cumsum(totals) - totals / 2
        return np.square(ranks[:, None] - ranks)
    if level == "ratio":
        if len(values) and values[0] < 0:
            raise DataError("a rating is negative, which the level `ratio` has no meaning for", hint="use `interval`")
        sums = values[:, None] + values
        return np.square(np.divide(values[:, None] - values, sums, out=np.zeros_like(sums), where=sums > 0))
    raise ConfigError(f"there is no level `{level}`", hint=nearest(level, LEVELS))


def fleiss(counts: np.ndarray) -> float:
    """Compute Fleiss' kappa (Fleiss, 1971) from how often each item got each class, (items, classes).

    Raises:
        DataError: the items have different numbers of ratings.
    """
    numbers = np.unique(counts.sum(1))
    if len(numbers) > 1:
        raise DataError(
            f"items have from {numbers[0]} to {numbers[-1]} ratings, but Fleiss' kappa needs the same number for all",
            hint="use Krippendorff's alpha, which allows holes",
        )
    if not len(numbers) or numbers[0] < 2:
        return math.nan
    number = float(numbers[0])
    observed = float(np.mean((np.square(counts).sum(1) - number) / (number * (number - 1))))
    expected = float(np.square(counts.sum(0) / counts.sum()).sum())
    return (observed - expected) / (1 - expected) if expected < 1 else math.nan


def cohen(pairs: np.ndarray, weights: str = "") -> float:
    """Compute Cohen's kappa (Cohen, 1960; 1968) of two raters.

    Args:
        pairs: (items, 2), NaN where a rater has not rated an item; only items that both have rated count.
        weights: `linear` or `quadratic`, so that larger differences of ratings count more; empty for no weights.

    Raises:
        ConfigError: `weights` is none of these.
    """
    both = np.asarray(pairs, dtype=np.float64)
    both = both[~np.isnan(both).any(1)]
    values, places = np.unique(both, return_inverse=True)
    joint = np.zeros((len(values), len(values)))
    np.add.at(joint, tuple(places.reshape(both.shape).T), 1.0)
    if weights in ("linear", "quadratic"):
        costs = np.abs(values[:, None] - values) ** (1 if weights == "linear" else 2)
    elif not weights:
        costs = 1.0 - np.eye(len(values))
    else:
        raise ConfigError(f"there are no weights `{weights}`", hint=nearest(weights, ("linear", "quadratic")))
    expected = (np.outer(joint.sum(1), joint.sum(0)) * costs).sum()
    return float(1 - joint.sum() * (joint * costs).sum() / expected) if expected > 0 else math.nan


def bootstrap(
    measure: Callable[[np.ndarray], float], rows: np.ndarray, draws: int = 1000, seed: int = 0
) -> tuple[float, float]:
    """Compute the 95% bootstrap interval (percentile method) of a measure, by resampling items with replacement.

    Args:
        measure: function that computes the measure from rows of items, such as the counts of `tally`.
        draws: number of bootstrap samples; more give a steadier interval and take longer.
    """
    rng = np.random.default_rng(seed)
    drawn = [measure(rows[rng.integers(len(rows), size=len(rows))]) for _ in range(draws)] if len(rows) else [math.nan]
    defined = [value for value in drawn if not math.isnan(value)]
    if len(defined) < (1 - MOST_UNDEFINED) * len(drawn):
        return math.nan, math.nan
    low, high = np.quantile(defined, (0.025, 0.975))
    return float(low), float(high)


def described(value: float, interval: tuple[float, float] | None = None) -> str:
    """Describe a measure and its interval in words, `undefined` if it is NaN."""
    if math.isnan(value):
        return "undefined"
    if interval is None or math.isnan(interval[0]):
        return f"{value:z.3f}"
    return f"{value:z.3f} (95% interval {interval[0]:z.3f} to {interval[1]:z.3f})"
