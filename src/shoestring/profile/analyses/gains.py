"""Predicts gains as intervals: estimates, widened by the known errors of such estimates.

`calibration.json` contains the mean and standard deviation of each analysis's errors on programs with planted faults,
as measured by `benchmarks/profile/calibration.py`. An error is the log odds of the measured gain minus the log odds of
the estimate; both are shares of the time.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

LIKELY = 1.4
"""Half width of an interval in standard deviations; chosen so that five of six intervals contain the measured gain."""

LARGEST = 0.995
"""Maximum share of the time that a change is assumed to save."""

TOLD = 0.98
"""Maximum gain that is shown, as a share of the time (50 times as fast). Larger gains depend on the remaining work,
which is too short to measure."""

WIDEST = 1.5
"""Maximum ratio of the upper to the lower end of an interval that is shown. A less certain gain is not shown, because
it tells no more than the time of the lines, which the evidence states."""


@dataclass(frozen=True)
class PredictedGain:
    """The predicted saving of a change, as shares of the profiled time: the expected value, and the interval's ends."""

    expected: float
    least: float
    most: float
    told: bool = True
    """Whether the gain may be shown; False for waits, because how much of a wait can be overlapped depends on other
    work."""

    @property
    def figure(self) -> tuple[float, float] | None:
        """The interval (`least`, `most`) if it is narrow enough to be shown; otherwise None."""
        known = self.told and self.expected > 0 and self.most <= WIDEST * self.least
        return (self.least, self.most) if known else None


@cache
def errors() -> dict[str, tuple[float, float]]:
    """Map an analysis's name to the mean and standard deviation of its errors; "" stands for all analyses together."""
    table = json.loads(Path(__file__).with_name("calibration.json").read_text())
    return {name: tuple(pair) for name, pair in table.items()}


def log_odds(share: float) -> float:
    """Log odds of a share of the time; the share is clipped to avoid 0 and 1."""
    share = min(max(share, 1e-9), LARGEST)
    return math.log(share / (1 - share))


def gain(analysis: str, share: float, spread: float = 0.0) -> PredictedGain:
    """Predict the share of the time that a change saves, as an interval.

    Args:
        share: the estimate, as a share of the time.
        spread: standard error of the estimate between runs.
    """
    if share <= 0:
        return PredictedGain(0.0, 0.0, 0.0)
    mean, error = errors().get(analysis, errors()[""])
    share = min(share, LARGEST)
    half = LIKELY * math.hypot(error, spread / (share * (1 - share)))
    middle = log_odds(share) + mean
    least, expected, most = (min(1 / (1 + math.exp(-odds)), TOLD) for odds in (middle - half, middle, middle + half))
    return PredictedGain(expected, least, most)


def estimate(analysis: str, expected: float) -> float:
    """Recover the log odds of the estimate from which `gain` computed an expected gain."""
    mean, _ = errors().get(analysis, errors()[""])
    return log_odds(expected) - mean
