"""Converts dimensions and their values to Optuna's distributions and back.

Optuna stores the index of a choice, looks choices up by equality, and accepts only strings, numbers and booleans. Lists
are therefore passed to Optuna as text, and so are choices that are equal but have different types (1, 1.0 and true).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from shoestring.tune.space import Dimension, spelled


def distribution(dimension: Dimension) -> BaseDistribution:
    """Convert a dimension to Optuna's distribution."""
    if dimension.kind == "choice":
        return CategoricalDistribution(_labels(dimension))
    if dimension.kind == "int":
        return IntDistribution(int(dimension.low), int(dimension.high))
    return FloatDistribution(dimension.low, dimension.high, log=dimension.kind == "log")


def suggest(trial: optuna.Trial, dimension: Dimension) -> Any:
    """Ask the trial's sampler for a value of a dimension."""
    return _from(dimension, trial._suggest(dimension.key, distribution(dimension)))


def to_optuna(space: Sequence[Dimension], values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a mapping of keys to values into Optuna's values."""
    by_key = {dimension.key: dimension for dimension in space}
    return {
        key: _labels(dimension)[dimension.index(value)] if (dimension := by_key[key]).kind == "choice" else value
        for key, value in values.items()
    }


def from_optuna(space: Sequence[Dimension], values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a mapping of keys to Optuna's values back into values of the dimensions."""
    return {dimension.key: _from(dimension, values[dimension.key]) for dimension in space if dimension.key in values}


def _labels(dimension: Dimension) -> tuple[Any, ...]:
    texts = [spelled(choice) for choice in dimension.choices]
    lists = any(isinstance(choice, list) for choice in dimension.choices)
    if not lists and len(set(dimension.choices)) == len(set(texts)):
        return dimension.choices
    return tuple(texts)


def _from(dimension: Dimension, value: Any) -> Any:
    if dimension.kind != "choice":
        return value
    labels = _labels(dimension)
    return value if labels is dimension.choices else dimension.choices[labels.index(value)]
