"""Predicted gains as intervals: an estimate, and how far such estimates were from gains that were measured.

`calibration.json` has of each analysis the errors of its estimates on the programs that its author planted, as
`benchmarks/profile/calibration.py` measured them: the gain after the fix less the estimate, both as log odds of a share
of the time, their mean and their spread.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

LIKELY = 1.4
"""Standard deviations either way: an interval is to have the gain in it in five of six cases."""

LARGEST = 0.995
"""Share of the time that a change is taken to save at most."""

WIDEST = 1.5
"""Most over least of an interval that is told. What is known less well has no figure: what the lines take, which the
evidence says, then tells as much."""


@dataclass(frozen=True)
class PredictedGain:
    """What a change saves, as shares of the time."""

    expected: float
    least: float
    most: float
    told: bool = True
    """Whether it may have a figure: how much of a wait can be hidden depends on what else there is to do."""

    @property
    def figure(self) -> tuple[float, float] | None:
        """Least and most, if that says enough."""
        known = self.told and self.expected > 0 and self.most <= WIDEST * self.least
        return (self.least, self.most) if known else None


@cache
def errors() -> dict[str, tuple[float, float]]:
    """Mean and standard deviation of the errors by analysis; that of all analyses has an empty name."""
    return {name: tuple(pair) for name, pair in json.loads(_path().read_text()).items()}


def _path() -> Path:
    return Path(__file__).with_name("calibration.json")


def log_odds(share: float) -> float:
    """Of a share of the time, which is taken to be neither nothing nor all of it."""
    share = min(max(share, 1e-9), LARGEST)
    return math.log(share / (1 - share))


def gain(analysis: str, share: float, spread: float = 0.0) -> PredictedGain:
    """What a change saves.

    Args:
        share: the estimate.
        spread: its standard error from one run to the next.
    """
    if share <= 0:
        return PredictedGain(0.0, 0.0, 0.0)
    mean, error = errors().get(analysis, errors()[""])
    share = min(share, LARGEST)
    half = LIKELY * math.hypot(error, spread / (share * (1 - share)))
    middle = log_odds(share) + mean
    least, expected, most = (min(_share(middle + way * half), LARGEST) for way in (-1, 0, 1))
    return PredictedGain(expected, least, most)


def estimate(analysis: str, expected: float) -> float:
    """Log odds of the estimate of which the gain that is expected was made."""
    mean, _ = errors().get(analysis, errors()[""])
    return log_odds(expected) - mean


def _share(odds: float) -> float:
    return 1 / (1 + math.exp(-odds))
