"""Detected lanes beside the true ones: one-to-one matches, F1 and precision."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment

from shoestring_recipes.lanes.roads import HEIGHT, WIDTH

TOLERANCE = 10.0
"""Columns by which a lane may be off in a row."""
SHARE = 0.85
"""Fraction of the rows in which a lane must be within the tolerance."""
FIRST_ROW = 81
"""Rows above are not compared: all markings are close together there."""


@dataclass(frozen=True)
class LaneCounts:
    """Numbers of lanes; those of several pictures are added up."""

    matched: int = 0
    detected: int = 0
    true: int = 0

    def __add__(self, other: LaneCounts) -> LaneCounts:
        return LaneCounts(self.matched + other.matched, self.detected + other.detected, self.true + other.true)

    @property
    def f1(self) -> float:
        """Twice the matched over the detected and the true; 1 where there are neither."""
        return 2 * self.matched / (self.detected + self.true) if self.detected + self.true else 1.0

    @property
    def precision(self) -> float:
        """The matched over the detected; 1 where nothing was detected."""
        return self.matched / self.detected if self.detected else 1.0


def agreement(detected: np.ndarray, true: np.ndarray) -> np.ndarray:
    """The fraction of the rows of each true lane in which each detected one is within the tolerance.

    Args:
        detected: (n, HEIGHT), columns; NaN where a lane has none.
        true: (m, HEIGHT).

    Returns:
        (n, m). Rows in which the true lane is outside of the picture do not count; a lane without any row has 0.
    """
    compared = (true >= 0) & (true < WIDTH) & (np.arange(HEIGHT) >= FIRST_ROW)
    close = np.abs(detected[:, None] - true) < TOLERANCE
    rows = compared.sum(-1)
    return np.where(rows > 0, (close & compared).sum(-1) / np.maximum(rows, 1), 0.0)


def matches(detected: np.ndarray, true: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of the detected and of the true lanes that match, one to one, as many as possible."""
    close = agreement(detected, true) > SHARE
    pairs = linear_sum_assignment(close, maximize=True)
    matched = close[pairs]
    return pairs[0][matched], pairs[1][matched]


def compare(detected: np.ndarray, true: np.ndarray) -> LaneCounts:
    """The numbers of matched, detected and true lanes of a picture."""
    return LaneCounts(len(matches(detected, true)[0]), len(detected), len(true))
