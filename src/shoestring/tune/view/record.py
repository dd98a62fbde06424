"""The data of a study, for the study's page and for the progress display."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoestring.tune.settings import Halving, Population, Study
from shoestring.tune.space import Dimension
from shoestring.tune.store import TrialLease


@dataclass(frozen=True)
class StudyRecord:
    """A study with its trials and their reported values."""

    study: Study
    space: Sequence[Dimension]
    schedule: Halving | Population | None
    trials: Sequence[TrialLease]
    reports: Mapping[int, Mapping[int, float]]
    """Maps a trial's id and a step to the reported value."""

    @property
    def sign(self) -> int:
        """1 if smaller values of the objective are better, -1 if larger values are better."""
        return 1 if self.study.direction == "minimize" else -1

    @property
    def done(self) -> list[TrialLease]:
        """Trials with a result."""
        return [trial for trial in self.trials if trial.state == "done" and trial.value is not None]

    @property
    def ranked(self) -> list[TrialLease]:
        """Trials with a result, the best first."""
        return sorted(self.done, key=lambda trial: (self.sign * (trial.value or 0.0), trial.number))

    @property
    def hours(self) -> float:
        """Hours of work, summed over all workers."""
        return sum(trial.seconds for trial in self.trials) / 3600

    def best_so_far(self) -> list[tuple[float, float]]:
        """List (hours of work, best result) so far after each trial with a result, in the order of trial numbers."""
        points: list[tuple[float, float]] = []
        spent, best = 0.0, math.inf
        for trial in sorted(self.trials, key=lambda trial: trial.number):
            spent += trial.seconds / 3600
            if trial.state == "done" and trial.value is not None:
                best = min(best, self.sign * trial.value)
                points.append((spent, self.sign * best))
        return points
