"""Range checks of numeric settings; each raises ConfigError."""

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


def momentum_of_nesterov(feature: Feature) -> None:
    """Raise ConfigError for Nesterov momentum with a momentum of 0, because there is no velocity to look ahead
    along."""
    if getattr(feature, "nesterov", False) and not getattr(feature, "momentum", 0):
        hint = f"set {feature.name}.nesterov = false, or a momentum"
        raise ConfigError(f"`{feature.name}.nesterov` needs a momentum above 0", hint=hint)


def betas_below_one(feature: Feature, betas: tuple[float, ...]) -> None:
    if not all(0 <= beta < 1 for beta in betas):
        raise ConfigError(f"`{feature.name}.betas` must lie in [0, 1), got {list(betas)}")
