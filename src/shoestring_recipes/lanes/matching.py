"""Compares detected lanes with the true lanes: one-to-one matches, F1 and precision."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment

from shoestring_recipes.lanes.roads import HEIGHT, WIDTH

TOLERANCE = 10.0
"""Tolerance of a lane's position in a row, in columns."""
SHARE = 0.85
"""Minimum fraction of rows in which a matching lane is within the tolerance."""
FIRST_ROW = 81
"""First row that is compared; in the rows above, all markings are close together."""


@dataclass(frozen=True)
class LaneCounts:
    """Numbers of matched, detected and true lanes; the counts of several images can be added."""

    matched: int = 0
    detected: int = 0
    true: int = 0

    def __add__(self, other: LaneCounts) -> LaneCounts:
        return LaneCounts(self.matched + other.matched, self.detected + other.detected, self.true + other.true)

    @property
    def f1(self) -> float:
        """F1 score: twice the matched lanes divided by the sum of detected and true lanes; 1 if there are no lanes."""
        return 2 * self.matched / (self.detected + self.true) if self.detected + self.true else 1.0

    @property
    def precision(self) -> float:
        """Matched lanes divided by detected lanes; 1 if no lane was detected."""
        return self.matched / self.detected if self.detected else 1.0


def agreement(detected: np.ndarray, true: np.ndarray) -> np.ndarray:
    """Return the fraction of each true lane's rows in which each detected lane is within the tolerance.

    Args:
        detected: columns of the detected lanes, (n, HEIGHT); NaN in rows without the lane.
        true: columns of the true lanes, (m, HEIGHT).

    Returns:
        The fractions, (n, m). Rows in which the true lane is outside the image are ignored; a true lane without
        remaining rows has the value 0.
    """
    compared = (true >= 0) & (true < WIDTH) & (np.arange(HEIGHT) >= FIRST_ROW)
    close = np.abs(detected[:, None] - true) < TOLERANCE
    rows = compared.sum(-1)
    return np.where(rows > 0, (close & compared).sum(-1) / np.maximum(rows, 1), 0.0)


def matches(detected: np.ndarray, true: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Match as many detected and true lanes as possible, one to one; returns the indices of the detected and of the
    true lanes."""
    close = agreement(detected, true) > SHARE
    pairs = linear_sum_assignment(close, maximize=True)
    matched = close[pairs]
    return pairs[0][matched], pairs[1][matched]


def compare(detected: np.ndarray, true: np.ndarray) -> LaneCounts:
    """Count the matched, detected and true lanes of an image."""
    return LaneCounts(len(matches(detected, true)[0]), len(detected), len(true))
