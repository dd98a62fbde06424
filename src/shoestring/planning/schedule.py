"""Orders the tasks of a step so that it ends early, and bounds how early it can end in any order.

A resource, such as a processor or one direction of a link, does one task at a time, and a task waits for others. The
best order is the solution of a resource-constrained scheduling problem, which no fast algorithm solves in general:

- **Bound.** No order is faster than the best order of any single resource, in which each task comes after its longest
chain of predecessors and before its longest chain of successors (`bound`). So the bound covers critical paths and loads
too.
- **Order.** Priority rules give the first orders. In each, tasks are pushed to the right and then to the left
  (justification; Valls, Ballestín and Quintanilla, 2005), which never makes the order longer. Then the order within
  windows of time is drawn at random, and a new order is accepted if it is not longer. For few tasks, all orders are
  tried.

Durations are integers, numbers are drawn from a fixed seed, and nothing depends on the clock, on the machine or on the
order in which tasks are listed (except tasks of the same name). So ranks that know the same tasks know the same order.
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shoestring.planning.bound import heads_of, preemptive, tails_of, without_preemption
from shoestring.planning.simulate import Task, makespan, simulate

RULES = 60
"""Number of priority rules that are tried."""
ROUNDS = 1200
"""Number of windows whose order is drawn anew."""
FULL = 400
"""Number of tasks below which more windows are tried, as each takes less time."""
SMALL = 7
"""Largest number of tasks for which all orders are tried."""
CLOSE = 1e-4
"""An order is not improved any further once it exceeds the bound by at most this fraction."""
_TICKS = 1 << 40
_NEVER = 1 << 62


@dataclass(frozen=True)
class TaskOrder:
    """An order of tasks."""

    order: tuple[int, ...]
    """Indices of the tasks; a task comes after those that it waits for."""
    seconds: float
    """Time at which the last task ends."""
    bound: float
    """Lower bound of the seconds that the tasks take in any order."""

    @property
    def ratio(self) -> float:
        """Seconds of this order over the bound: 1 if no order is faster."""
        return self.seconds / self.bound if self.bound else 1.0


def schedule(tasks: Sequence[Task], rounds: int = ROUNDS, *, tight: bool = False) -> TaskOrder:
    """Order tasks so that the last one ends early.

    Args:
        tasks: tasks in any order; `after` are indices into them.
        rounds: number of windows whose order is drawn anew; 0 for a quick order.
        tight: whether to spend about as much time on the bound as on the order: a tighter bound if a resource has few
            tasks.

    Raises:
        ValueError: tasks wait for each other, or a duration is no number of seconds.
    """
    shop = _Shop(tasks)
    least = shop.bound()
    starts = min(shop.first_orders(RULES if rounds else 0), key=shop.length)
    if len(tasks) <= SMALL:
        starts = shop.best_of_all(starts, least)
    else:
        starts = shop.improved(starts, least, rounds * max(FULL // len(tasks), 1))
    if tight:
        least = shop.tight_bound(least, starts)
    order = tuple(shop.numbers[place] for place in shop.by_start(starts))
    return TaskOrder(order, makespan(simulate(in_order(tasks, order))), least / shop.scale)


def lower_bound(tasks: Sequence[Task]) -> float:
    """Lower bound of the seconds that tasks take in any order."""
    shop = _Shop(tasks)
    return shop.bound() / shop.scale


def in_order(tasks: Sequence[Task], order: Sequence[int]) -> list[Task]:
    """Reorder tasks for `simulate`; `after` is renumbered."""
    places = {index: place for place, index in enumerate(order)}
    return [replace(tasks[index], after=tuple(sorted(places[one] for one in tasks[index].after))) for index in order]


def sorted_tasks(tasks: Sequence[Task]) -> list[int]:
    """Indices of tasks in topological order: each after those that it waits for, and otherwise by name.

    Raises:
        ValueError: tasks wait for each other, or a duration is no number of seconds.
    """
    counts, keys = Counter[str](), list[tuple[str, int]]()
    for index, task in enumerate(tasks):
        if not (0 <= task.seconds < math.inf):
            raise ValueError(f"task {index} ({task.name}) takes {task.seconds} seconds")
        if any(not 0 <= one < len(tasks) for one in task.after):
            raise ValueError(f"task {index} ({task.name}) waits for {task.after}, of {len(tasks)} tasks")
        keys.append((task.name, counts[task.name]))
        counts[task.name] += 1
    missing, users = [len(set(task.after)) for task in tasks], _users([set(task.after) for task in tasks])
    heap, order = [(keys[index], index) for index, count in enumerate(missing) if not count], list[int]()
    heapq.heapify(heap)
    while heap:
        _, index = heapq.heappop(heap)
        order.append(index)
        for user in users[index]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(heap, (keys[user], user))
    if len(order) < len(tasks):
        names = [tasks[index].name for index, count in enumerate(missing) if count]
        raise ValueError(f"tasks wait for each other: {', '.join(names[:4])}")
    return order


def _users(before: Sequence[Sequence[int] | set[int]]) -> list[list[int]]:
    """For each task, the tasks that wait for it."""
    users: list[list[int]] = [[] for _ in before]
    for index, earlier in enumerate(before):
        for one in earlier:
            users[one].append(index)
    return users


class _Shop:
    """Tasks that are numbered so that each comes after those that it waits for, with integer durations ("ticks").

    A schedule is the list of all tasks' starts.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.numbers = sorted_tasks(tasks)
        places = {index: place for place, index in enumerate(self.numbers)}
        total = math.fsum(task.seconds for task in tasks)
        self.scale = _TICKS / total if total else 1.0
        self.ticks = [round(tasks[index].seconds * self.scale) for index in self.numbers]
        names = sorted({task.resource for task in tasks})
        self.resources = len(names)
        self.resource = [names.index(tasks[index].resource) for index in self.numbers]
        self.before = [sorted({places[one] for one in tasks[index].after}) for index in self.numbers]
        self.behind = _users(self.before)
        self.instant = not all(self.ticks)  # whether some tasks take no time
        self.heads, self.tails = heads_of(self.before, self.ticks), tails_of(self.behind, self.ticks)

    def length(self, starts: Sequence[int]) -> int:
        """The end of the last task."""
        return max(map(int.__add__, starts, self.ticks), default=0)

    def by_start(self, starts: Sequence[int]) -> list[int]:
        """The tasks by their starts; a task comes after those that it waits for."""
        return sorted(range(len(starts)), key=lambda task: (starts[task], starts[task] + self.ticks[task], task))

    def bound(self) -> int:
        """Lower bound of the ticks of any schedule."""
        return max((preemptive(heads, self.ticks, self.tails) for heads in self._heads_by_resource()), default=0)

    def tight_bound(self, least: int, starts: Sequence[int]) -> int:
        """A lower bound of the ticks of any schedule, tighter than `least` if a resource has few tasks."""
        length = self.length(starts)
        for heads in self._heads_by_resource():
            if least < length:
                least = max(least, without_preemption([*heads], self.before, self.ticks, self.tails, length))
        return least

    def _heads_by_resource(self) -> list[dict[int, int]]:
        every: list[dict[int, int]] = [{} for _ in range(self.resources)]
        for task, head in enumerate(self.heads):
            every[self.resource[task]][task] = head
        return every

    # -- building schedules --------------------------------------------------------------------------------------------

    def first_orders(self, rules: int) -> Iterator[list[int]]:
        """Yield schedules by priority rules: weighted sums of a task's tail, head and duration.

        The first rule is the longest path from the start of the task to the end; the other rules have random weights.
        """
        parts, draw = [*zip(self.tails, self.heads, self.ticks, strict=True)], random.Random(0)
        yield self.justified(self.listed([tail + own for tail, _, own in parts]))
        for _ in range(rules):
            behind, before, itself = (draw.uniform(-1, 1) for _ in range(3))
            urgency = [behind * tail + before * head + itself * own for tail, head, own in parts]
            yield self.justified(self.listed(urgency))

    def listed(self, urgency: Sequence[float]) -> list[int]:
        """The schedule in which a free resource always begins the most urgent of the tasks that can begin."""
        missing, starts = [len(earlier) for earlier in self.before], [0] * len(self.ticks)
        ready: list[list[tuple[float, int]]] = [[] for _ in range(self.resources)]
        free, running, now = [0] * self.resources, list[tuple[int, int]](), 0
        for task, count in enumerate(missing):
            if not count:
                heapq.heappush(ready[self.resource[task]], (-urgency[task], task))
        while True:
            for resource, waiting in enumerate(ready):
                if waiting and free[resource] <= now:
                    _, task = heapq.heappop(waiting)
                    starts[task] = now
                    free[resource] = now + self.ticks[task]
                    heapq.heappush(running, (free[resource], task))
            if not running:
                return starts
            now = running[0][0]
            while running and running[0][0] == now:
                _, task = heapq.heappop(running)
                for user in self.behind[task]:
                    missing[user] -= 1
                    if not missing[user]:
                        heapq.heappush(ready[self.resource[user]], (-urgency[user], user))

    def inserted(self, order: Sequence[int], before: Sequence[Sequence[int]]) -> list[int]:
        """The schedule in which, one after the other, each task takes the first gap of its resource that fits.

        Args:
            before: for each task, the tasks that it waits for; they come earlier in `order`.
        """
        opens: list[list[int]] = [[0] for _ in range(self.resources)]
        closes: list[list[int]] = [[_NEVER] for _ in range(self.resources)]
        starts, ends = [0] * len(self.ticks), [0] * len(self.ticks)
        for task in order:
            ready, ticks = 0, self.ticks[task]
            for one in before[task]:
                ready = max(ready, ends[one])
            begin, close = opens[self.resource[task]], closes[self.resource[task]]
            gap = bisect_left(close, ready + ticks)
            while (start := max(begin[gap], ready)) + ticks > close[gap]:
                gap += 1
            starts[task], ends[task] = start, start + ticks
            if start > begin[gap] and ends[task] < close[gap]:
                begin.insert(gap + 1, ends[task])
                close.insert(gap, start)
            elif start > begin[gap]:
                close[gap] = start
            elif ends[task] < close[gap] or self.instant:  # a task that takes no time fits between two others
                begin[gap] = ends[task]
            else:
                del begin[gap], close[gap]
        return starts

    def justified(self, starts: Sequence[int]) -> list[int]:
        """The schedule with all tasks pushed to the right, the last ones first, and then to the left."""
        end, ticks = self.length(starts), self.ticks
        last_first = sorted(range(len(starts)), key=lambda task: (-starts[task] - ticks[task], -starts[task], -task))
        mirrored = self.inserted(last_first, self.behind)
        right = [end - start - own for start, own in zip(mirrored, ticks, strict=True)]
        return self.inserted(self.by_start(right), self.before)

    def feasible(self, keys: Sequence[float]) -> list[int]:
        """Sort the tasks by their keys, but each after those that it waits for."""
        raised = list[float]()
        for task, key in enumerate(keys):
            raised.append(max(key, max((raised[one] for one in self.before[task]), default=key)))
        return sorted(range(len(raised)), key=raised.__getitem__)  # sorting is stable

    # -- improving schedules -------------------------------------------------------------------------------------------

    def improved(self, starts: list[int], least: int, rounds: int) -> list[int]:
        """Improve a schedule by drawing the order within `rounds` windows at random.

        A window has a few up to some dozens of tasks.
        """
        draw, length, count = random.Random(0), self.length(starts), len(starts)
        for _ in range(rounds):
            if length <= least * (1 + CLOSE):
                break
            width = length * (2 + 30 * draw.random()) / count
            middle = draw.random() * length
            keys = [
                start + (2 * draw.random() - 1) * width if abs(start - middle) < width else start for start in starts
            ]
            tried = self.inserted(self.feasible(keys), self.before)
            if (reached := self.length(tried)) > length * 1.01:
                continue
            tried = self.justified(tried)
            if (reached := self.length(tried)) <= length:
                starts, length = tried, reached
        return starts

    def best_of_all(self, starts: list[int], least: int) -> list[int]:
        """The best schedule of few tasks: tries all orders that may be shorter than the schedule `starts`."""
        count = len(self.ticks)
        best, length = starts, self.length(starts)
        trial, free = [-1] * count, [0] * self.resources

        def visit(placed: int) -> None:
            nonlocal best, length
            if placed == count and self.length(trial) < length:
                best, length = [*trial], self.length(trial)
            for task in range(count):
                if trial[task] >= 0 or any(trial[one] < 0 for one in self.before[task]) or length <= least:
                    continue
                resource, ready = self.resource[task], free[self.resource[task]]
                start = max([ready, *(trial[one] + self.ticks[one] for one in self.before[task])])
                if start + self.ticks[task] + self.tails[task] < length:
                    trial[task], free[resource] = start, start + self.ticks[task]
                    visit(placed + 1)
                    trial[task], free[resource] = -1, ready

        visit(0)
        return best
