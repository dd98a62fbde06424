"""What numbers among the settings may be."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from shoestring.core.errors import ConfigError

if TYPE_CHECKING:
    from shoestring.core.feature import Feature


def positive(feature: Feature, *names: str) -> None:
    for name in names:
        if not 0 < getattr(feature, name) < math.inf:
            raise ConfigError(f"`{feature.name}.{name}` must be a positive number, got {getattr(feature, name)}")


def at_least_zero(feature: Feature, *names: str) -> None:
    for name in names:
        if not 0 <= getattr(feature, name) < math.inf:
            raise ConfigError(f"`{feature.name}.{name}` must be zero or positive, got {getattr(feature, name)}")


def betas_below_one(feature: Feature, betas: tuple[float, ...]) -> None:
    if not all(0 <= beta < 1 for beta in betas):
        raise ConfigError(f"`{feature.name}.betas` must lie in [0, 1), got {list(betas)}")
