"""Predicts the time of a step, and chooses among candidates by it.

A step is a set of tasks on resources. Each resource does its tasks in a fixed order, because every rank must issue the
same collectives. So without `slowdown` the makespan is the longest path through the tasks and the resources' orders:
never shorter than the critical path or any resource's load, and never longer when a task becomes shorter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shoestring.core.trace import Kind, Trace
from shoestring.planning.cluster import Cluster


@dataclass(frozen=True)
class Task:
    """Work that takes `seconds` when nothing runs beside it, and starts after the tasks with the indices `after`."""

    name: str
    kind: Kind
    seconds: float
    resource: str
    after: tuple[int, ...] = ()
    nbytes: int = 0


def simulate(tasks: Sequence[Task], slowdown: Mapping[str, float] | None = None) -> Trace:
    """Simulate `tasks` from second 0 and return their trace, one span each; a resource does its tasks in this order.

    Args:
        slowdown: "wire beside compute" -> factor by which the first slows down while the second runs; 1 without an
            entry. Several add up: beside two others with a factor of 2 each, work takes 3 times as long.
    """
    beside, trace, left, now = slowdown or {}, Trace(origin=0.0, keep=max(len(tasks), 1)), {}, 0.0
    queues: dict[str, deque[int]] = {}
    for index, task in enumerate(tasks):
        if any(not 0 <= other < index for other in task.after):
            raise ValueError(f"task {index} ({task.name}) must come after earlier tasks, not {task.after}")
        queues.setdefault(task.resource, deque()).append(index)
        left[index] = task.seconds
    began: dict[int, float] = {}
    while heads := [queue[0] for queue in queues.values() if queue]:
        running = [head for head in heads if not any(other in left for other in tasks[head].after)]
        needs = {head: left[head] * _stretch(head, running, tasks, beside) for head in running}
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


def _stretch(head: int, running: Sequence[int], tasks: Sequence[Task], slowdown: Mapping[str, float]) -> float:
    pairs = [f"{tasks[head].kind} beside {tasks[other].kind}" for other in running if other != head]
    return 1.0 + sum(slowdown.get(pair, 1.0) - 1.0 for pair in pairs)


def makespan(trace: Trace) -> float:
    """Return the end of the last span, in seconds since the trace's origin."""
    return max((span.stop for span in trace.spans), default=0.0)


class Priced(Protocol):
    """A candidate whose effect on a step can be computed."""

    def predict(self, trace: Trace, cluster: Cluster) -> Trace:
        """Predict one step from the `trace` of a step without the candidate; work of every n-th step counts 1/n."""
        ...


@dataclass(frozen=True)
class Decision:
    """A decision; `predicted` has every candidate's seconds a step, preferred candidates first."""

    choice: str
    reason: str
    predicted: dict[str, float]
    worth: dict[str, float] = field(default_factory=dict)
    """Steps of the first candidate that a step of a candidate is worth, where that is known."""

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
    """Choose the first candidate, unless another is faster by more than `margin` of its time. Then choose the fastest,
    or the first candidate that is within half of the margin of the fastest.

    Args:
        worth: steps that a step of a candidate is worth, 1 where there is none; fast is who makes most of them.
    """
    predicted = {name: makespan(each.predict(trace, cluster)) for name, each in candidates.items()}
    worths = {name: (worth or {}).get(name, 1.0) for name in predicted}
    times = {name: seconds / worths[name] for name, seconds in predicted.items()}
    first, best = next(iter(times)), min(times, key=times.__getitem__)
    if times[best] >= times[first] * (1 - margin):
        return Decision(first, f"no candidate is more than {margin:.0%} faster", predicted, worths)
    close = next(name for name, seconds in times.items() if seconds <= times[best] * (1 + margin / 2))
    gain = times[first] / times[close]
    return Decision(close, f"{gain:.2f}x as fast as {first}", predicted, worths)
