"""Decides when replicas are merged. The schedule is a function of the run's progress, so it has no state to save.

Merge steps are computed in integers, so that ranks with different processors agree on them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Protocol


class MergeTimes(Protocol):
    """Decides which fragments are sent after a step; see `MergeSchedule.due`."""

    def due(self, before: float, after: float, total: int) -> list[int]: ...


@dataclass(frozen=True)
class MergeSchedule:
    """Divides the run into periods of steps; every fragment is sent once per period.

    Args:
        every: number of steps in the first period.
        final_every: number of steps in a period at the end of the run. Period lengths grow linearly with the progress,
            starting at `every`; if `final_every` is below `every`, or the end of the run is unknown, all periods have
            `every` steps.
        fragments: number of fragments, which are sent at equal intervals.
    """

    every: int
    final_every: int
    fragments: int

    def due(self, before: float, after: float, total: int) -> list[int]:
        """List the fragments that are to be sent after a step.

        Args:
            before, after: position of the run before and after the step, in steps.
            total: position of the end of the run; 0 if the end is unknown.
        """
        marks = [
            (first + length * (fragment + 1) // self.fragments, fragment)
            for first, length in self._periods(before, after, total)
            for fragment in range(self.fragments)
        ]
        return list(dict.fromkeys(fragment for mark, fragment in marks if before < mark <= after))

    def _periods(self, before: float, after: float, total: int) -> Iterator[tuple[int, int]]:
        """Yield (first position, length) of every period that overlaps the interval between two positions."""
        starts = _growing_starts(self.every, self.final_every, total) if self.final_every > self.every else (0,)
        index = bisect_right(starts, before) - 1
        for first, stop in zip(starts[index:], starts[index + 1 :], strict=False):
            if first < after:
                yield first, stop - first
        # After the last start, periods no longer grow.
        length = self.final_every if len(starts) > 1 else self.every
        for number in count(max(0, int(before - starts[-1]) // length)):
            if (first := starts[-1] + number * length) >= after:
                return
            yield first, length


def merges_per_step(every: int, final_every: int, total: int) -> float:
    """Number of merges per step, averaged over a run of `total` steps (0: no known end)."""
    if total and final_every > every:
        return math.log(final_every / every) / (final_every - every)
    return 1 / every


@cache
def _growing_starts(every: int, final_every: int, total: int) -> tuple[int, ...]:
    """First steps of all periods, up to the first period that starts at or after `total`."""
    starts = [0]
    while starts[-1] < total:
        starts.append(starts[-1] + every + (final_every - every) * starts[-1] // total)
    return tuple(starts)
