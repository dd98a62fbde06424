"""Dimensions in Optuna's terms."""

from __future__ import annotations

from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from shoestring.tune.space import Dimension


def distribution(dimension: Dimension) -> BaseDistribution:
    """A dimension in Optuna's terms."""
    if dimension.kind == "choice":
        return CategoricalDistribution(dimension.choices)
    if dimension.kind == "int":
        return IntDistribution(int(dimension.low), int(dimension.high))
    return FloatDistribution(dimension.low, dimension.high, log=dimension.kind == "log")


def suggest(trial: optuna.Trial, dimension: Dimension) -> Any:
    """A value of one dimension from the trial's sampler."""
    return trial._suggest(dimension.key, distribution(dimension))
