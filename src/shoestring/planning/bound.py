"""Lower bounds of schedules: the best order on one resource, if all others could do any number of tasks at once.

Tasks are numbered so that each comes after those that it waits for (`before`), and have integer durations ("ticks").
With preemption, the problem of one resource is easy (Jackson, 1955). Without preemption, it is solved for few tasks by
branch and bound, as in Carlier (1982), but with delays between tasks.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

NODES = 1000
"""Largest number of partial orders that branch and bound looks at."""
MOST = 320
"""Largest number of tasks of a resource for which branch and bound is tried."""
_NEVER = 1 << 62


def heads_of(before: Sequence[Sequence[int]], ticks: Sequence[int]) -> list[int]:
    """Lower bound of the ticks before the start of each task, in any schedule."""
    heads = list[int]()
    for earlier in before:
        heads.append(max((heads[one] + ticks[one] for one in earlier), default=0))
    return heads


def tails_of(behind: Sequence[Sequence[int]], ticks: Sequence[int]) -> list[int]:
    """Lower bound of the ticks from the end of each task to the end of the schedule."""
    tails = [0] * len(ticks)
    for task in reversed(range(len(ticks))):
        tails[task] = max((tails[user] + ticks[user] for user in behind[task]), default=0)
    return tails


def preemptive(heads: Mapping[int, int], ticks: Sequence[int], tails: Sequence[int]) -> int:
    """The end of the preemptive schedule on one resource that always runs the ready task with the longest tail.

    Args:
        heads: task on the resource -> tick at which it can start.
    """
    waiting, left = sorted(heads, key=heads.__getitem__), {task: ticks[task] for task in heads}
    ready, now, place, most = list[tuple[int, int]](), 0, 0, 0
    while place < len(waiting) or ready:
        if not ready:
            now = max(now, heads[waiting[place]])
        while place < len(waiting) and heads[waiting[place]] <= now:
            heapq.heappush(ready, (-tails[waiting[place]], waiting[place]))
            place += 1
        tail, task = ready[0]
        until = heads[waiting[place]] if place < len(waiting) else _NEVER
        done = min(left[task], until - now)
        now, left[task] = now + done, left[task] - done
        if not left[task]:
            heapq.heappop(ready)
            most = max(most, now - tail)
    return most


def without_preemption(
    own: Sequence[int], before: Sequence[Sequence[int]], ticks: Sequence[int], tails: Sequence[int], known: int
) -> int:
    """The end of the best schedule of one resource's tasks; 0 if there are too many tasks or orders to find it.

    Args:
        own: the tasks of the resource, in order of their numbers. known: the end of a known schedule of all tasks,
            which the result does not exceed.
    """
    if len(own) > MOST:
        return 0
    search = _OneResource(own, before, ticks, tails, known)
    search.visit({}, 0)
    return search.best if search.nodes < NODES else 0


class _OneResource:
    """Branch and bound over the orders of one resource's tasks; other tasks between them are delays."""

    def __init__(
        self,
        own: Sequence[int],
        before: Sequence[Sequence[int]],
        ticks: Sequence[int],
        tails: Sequence[int],
        known: int,
    ) -> None:
        self.ticks, self.tails, self.best, self.nodes = ticks, tails, known, 0
        # For each task of the resource: nearest ancestor on the same resource (-1: start of the schedule) -> ticks of
        # the longest path between the two, without their own.
        self.delays = dict[int, dict[int, int]]()
        mine, paths = {*own}, list[dict[int, int]]()
        for task, earlier in enumerate(before):
            path = {-1: 0}
            for one in earlier:
                for ancestor, delay in ({one: 0} if one in mine else paths[one]).items():
                    path[ancestor] = max(path.get(ancestor, 0), delay)
            if task in mine:
                self.delays[task] = path
            paths.append({ancestor: delay + ticks[task] for ancestor, delay in path.items()})

    def heads(self, ends: Mapping[int, int], now: int) -> dict[int, int]:
        """Tick at which each remaining task can start, if tasks ended at `ends` and the resource is free from `now`."""
        heads = dict[int, int]()
        for task, delays in self.delays.items():
            if task not in ends:
                heads[task] = now
                for ancestor, delay in delays.items():
                    end = 0
                    if ancestor >= 0:
                        end = ends[ancestor] if ancestor in ends else heads[ancestor] + self.ticks[ancestor]
                    heads[task] = max(heads[task], end + delay)
        return heads

    def visit(self, ends: dict[int, int], now: int) -> None:
        """Lower `best` to the end of the best order that begins with the tasks in `ends`, if that is earlier."""
        self.nodes += 1
        heads = self.heads(ends, now)
        reached = max((end + self.tails[task] for task, end in ends.items()), default=0)
        if not heads:
            self.best = min(self.best, reached)
        if not heads or self.nodes >= NODES or max(reached, preemptive(heads, self.ticks, self.tails)) >= self.best:
            return
        first_end = min(head + self.ticks[task] for task, head in heads.items())
        able = [task for task in heads if all(one < 0 or one in ends for one in self.delays[task])]
        for task in sorted(able, key=lambda task: (heads[task], -self.tails[task])):
            if heads[task] <= first_end:  # otherwise another task fits in front of it
                ends[task] = heads[task] + self.ticks[task]
                self.visit(ends, ends[task])
                del ends[task]
