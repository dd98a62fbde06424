"""Predicted gains as intervals: an estimate, and how far such estimates were from gains that were measured.

`calibration.json` has of each analysis the errors of its estimates on the programs that its author planted, as
`benchmarks/profile/calibration.py` measured them: the gain after the fix less the estimate, both as log odds of a share
of the time, their mean and their spread.
"""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path

LIKELY = 1.645
"""Standard deviations either way: an interval is to have the gain in it in nine of ten cases."""

LARGEST = 0.995
"""Share of the time that a change is taken to save at most."""


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


def interval(analysis: str, share: float, spread: float = 0.0) -> tuple[float, float]:
    """Least and most of the time that a change saves.

    Args:
        share: the estimate.
        spread: its standard error from one run to the next.
    """
    if share <= 0:
        return 0.0, 0.0
    mean, error = errors().get(analysis, errors()[""])
    share = min(share, LARGEST)
    half = LIKELY * math.hypot(error, spread / (share * (1 - share)))
    middle = log_odds(share) + mean
    return _share(middle - half), min(_share(middle + half), LARGEST)


def estimate(analysis: str, gain: tuple[float, float]) -> float:
    """Log odds of the estimate that an interval was made from."""
    mean, _ = errors().get(analysis, errors()[""])
    return (log_odds(gain[0]) + log_odds(gain[1])) / 2 - mean


def chance(analysis: str, gain: tuple[float, float]) -> float:
    """Standard error of an estimate from one run to the next, as log odds, that made an interval wider."""
    _, error = errors().get(analysis, errors()[""])
    half = (log_odds(gain[1]) - log_odds(gain[0])) / 2 / LIKELY
    return math.sqrt(max(half**2 - error**2, 0.0))


def _share(odds: float) -> float:
    return 1 / (1 + math.exp(-odds))
