"""How long the steps of a run take where they are not alike: gradients first, then merges at a period that grows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

MOST = 4000  # steps of the longest run


@dataclass(frozen=True)
class Pace:
    """Seconds of each step of a run.

    Args:
        first: seconds of a step where replicas are merged every `every` steps, or where all steps are alike.
        last: seconds of a step where they are merged every `final_every` steps, to which the period grows in `horizon`
            steps; 0 where it does not grow. Seconds between are linear in merges a step.
        starting: seconds of each of the first `start` steps.
    """

    first: float
    last: float = 0.0
    every: int = 1
    final_every: int = 0
    horizon: int = 0
    starting: float = 0.0
    start: int = 0

    @cached_property
    def _elapsed(self) -> np.ndarray:
        """Seconds after each number of steps, (MOST + 1,)."""
        steps = np.full(MOST, self.first)
        if self.last:
            progress = np.minimum(np.arange(MOST) / self.horizon, 1.0)
            period = self.every + (self.final_every - self.every) * progress
            least, most = 1 / self.final_every, 1 / self.every
            steps = self.last + (self.first - self.last) * (1 / period - least) / (most - least)
        steps[: self.start] = self.starting
        return np.concatenate([[0.0], steps.cumsum()])

    def elapsed(self, steps: float) -> float:
        """Seconds that so many steps take."""
        return float(np.interp(steps, np.arange(MOST + 1), self._elapsed))

    def steps(self, seconds: float) -> float:
        """Steps that are made in so many seconds."""
        return float(np.interp(seconds, self._elapsed, np.arange(MOST + 1)))
