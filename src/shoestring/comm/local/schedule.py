"""When replicas are merged: a function of the run's progress, so there is nothing to save.

Merges are found with integers only, because all ranks must find the same steps whatever their processors.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import count


@dataclass(frozen=True)
class MergeSchedule:
    """Periods of steps, in each of which every fragment is sent once.

    Args:
        every: steps of the first period. final_every: of a period at the end of the run, at least `every`; lengths
            between grow linearly with the progress. A run without a known end keeps the first length.
        fragments: number of fragments, which are sent at equal distances.
    """

    every: int
    final_every: int
    fragments: int

    def due(self, before: float, after: float, total: int) -> list[int]:
        """List the fragments that are sent after a step.

        Args:
            before, after: position of the run before and after the step, in steps. total: position of its end, or 0.
        """
        marks = [
            (first + length * (fragment + 1) // self.fragments, fragment)
            for first, length in self._periods(before, after, total)
            for fragment in range(self.fragments)
        ]
        return list(dict.fromkeys(fragment for mark, fragment in marks if before < mark <= after))

    def _periods(self, before: float, after: float, total: int) -> Iterator[tuple[int, int]]:
        """(first position, length) of every period between two positions."""
        starts = _growing_starts(self.every, self.final_every, total) if self.final_every > self.every else (0,)
        index = bisect_right(starts, before) - 1
        for first, stop in zip(starts[index:], starts[index + 1 :], strict=False):
            if first < after:
                yield first, stop - first
        length = self.final_every if len(starts) > 1 else self.every
        for number in count(max(0, int(before - starts[-1]) // length)):
            if (first := starts[-1] + number * length) >= after:
                return
            yield first, length


def merges_per_step(every: int, final_every: int, total: int) -> float:
    """Merges a step, on average over a run of `total` steps, 0 where its end is not known."""
    if total and final_every > every:
        return math.log(final_every / every) / (final_every - every)
    return 1 / every


@cache
def _growing_starts(every: int, final_every: int, total: int) -> tuple[int, ...]:
    """Where periods begin, up to the first one at or after `total`."""
    starts = [0]
    while starts[-1] < total:
        starts.append(starts[-1] + every + (final_every - every) * starts[-1] // total)
    return tuple(starts)
