"""Predicts the time of a training step by simulation, and chooses among candidates by their predicted times.

A step is a set of tasks on resources. Each resource runs its tasks in a fixed order, because all ranks must call the
same collectives in the same order. So without `slowdown` the makespan is the longest path through a graph whose edges
are the dependencies between tasks and the order on each resource. The makespan is at least the critical path of the
dependencies, and at least the total time of any resource's tasks. Making a task shorter never makes the
makespan longer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shoestring import figures
from shoestring.core.trace import Kind, Trace
from shoestring.planning.cluster import Cluster


@dataclass(frozen=True)
class Task:
    """Work that takes `seconds` if no other task runs; it starts once the tasks with the indices `after` have ended."""

    name: str
    kind: Kind
    seconds: float
    resource: str
    after: tuple[int, ...] = ()
    nbytes: int = 0


def simulate(tasks: Sequence[Task], slowdown: Mapping[str, float] | None = None) -> Trace:
    """Simulate `tasks` from second 0; returns a trace with one span for each task.

    Args:
        tasks: the tasks of a step; each resource runs its own tasks in this order.
        slowdown: maps a pair of kinds, such as "wire beside compute", to the factor by which a task of the first kind
            slows down while a task of the second kind runs; a missing pair means 1. The excesses over 1
            add up: beside two tasks with a factor of 2 each, a task takes 3 times as long.
    """
    for index, task in enumerate(tasks):
        if any(not 0 <= earlier < index for earlier in task.after):
            raise ValueError(f"task {index} ({task.name}) must come after earlier tasks, not {task.after}")
    if not slowdown:  # each task starts once its resource is free and its inputs exist
        trace, free = Trace(origin=0.0, keep=max(len(tasks), 1)), dict[str, float]()
        starts, ends = list[float](), list[float]()
        for task in tasks:
            starts.append(max((ends[earlier] for earlier in task.after), default=0.0))
            starts[-1] = max(starts[-1], free.get(task.resource, 0.0))
            ends.append(starts[-1] + task.seconds)
            free[task.resource] = ends[-1]
        for index in sorted(range(len(tasks)), key=ends.__getitem__):
            trace.record(tasks[index].name, tasks[index].kind, starts[index], ends[index], tasks[index].nbytes)
        return trace
    beside, trace, left, now = slowdown, Trace(origin=0.0, keep=max(len(tasks), 1)), {}, 0.0
    queues: dict[str, deque[int]] = {}
    for index, task in enumerate(tasks):
        queues.setdefault(task.resource, deque()).append(index)
        left[index] = task.seconds
    began: dict[int, float] = {}
    while heads := [queue[0] for queue in queues.values() if queue]:
        running = [head for head in heads if not any(earlier in left for earlier in tasks[head].after)]
        needs: dict[int, float] = {}  # task -> seconds until it would end if no other task started or ended
        for head in running:
            pairs = [f"{tasks[head].kind} beside {tasks[task].kind}" for task in running if task != head]
            needs[head] = left[head] * (1.0 + sum(beside.get(pair, 1.0) - 1.0 for pair in pairs))
        passed = min(needs.values())
        for head, need in needs.items():
            began.setdefault(head, now)
            left[head] *= 1 - passed / need if need > passed else 0.0
            if need <= passed:
                task = tasks[queues[tasks[head].resource].popleft()]
                trace.record(task.name, task.kind, began[head], now + passed, task.nbytes)
                del left[head]
        now += passed
    return trace


def makespan(trace: Trace) -> float:
    """Return the time at which the last span ends, in seconds since the trace's origin."""
    return max((span.stop for span in trace.spans), default=0.0)


class Priced(Protocol):
    """A candidate whose effect on a step can be predicted."""

    def predict(self, trace: Trace, cluster: Cluster) -> Trace:
        """Predict the trace of a step with this candidate from the `trace` of a step without it.

        Work that is done only in every n-th step counts as 1/n of its time per step.
        """
        ...


@dataclass(frozen=True)
class Decision:
    """The chosen candidate and the reason; `predicted` maps candidates, in order of preference, to seconds per step."""

    choice: str
    reason: str
    predicted: dict[str, float]
    worth: dict[str, float] = field(default_factory=dict)
    """Candidate -> training progress of one step with this candidate, relative to one step with the first candidate."""

    @property
    def seconds(self) -> float:
        return self.predicted[self.choice]


def choose(
    candidates: Mapping[str, Priced],
    trace: Trace,
    cluster: Cluster,
    *,
    margin: float,
    worth: Mapping[str, float] | None = None,
) -> Decision:
    """Choose the first candidate unless the fastest one saves more than the fraction `margin` of its time.

    Otherwise choose the first candidate whose time exceeds the fastest candidate's by at most half of `margin`.

    Args:
        worth: candidate -> training progress of one step with this candidate, relative to one step with the first
            candidate; 1 for candidates without an entry. Candidates are compared by their time for equal progress.
    """
    predicted = {name: makespan(candidate.predict(trace, cluster)) for name, candidate in candidates.items()}
    worths = {name: (worth or {}).get(name, 1.0) for name in predicted}
    times = {name: seconds / worths[name] for name, seconds in predicted.items()}
    first, best = next(iter(times)), min(times, key=times.__getitem__)
    if times[best] >= times[first] * (1 - margin):
        return Decision(first, f"no candidate is more than {figures.percent(margin)} faster", predicted, worths)
    close = next(name for name, seconds in times.items() if seconds <= times[best] * (1 + margin / 2))
    gain = times[first] / times[close]
    return Decision(close, f"{gain:.2f}x as fast as {first}", predicted, worths)
