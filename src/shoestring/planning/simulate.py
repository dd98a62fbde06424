"""How long a step would take, and what is decided by that.

A step is tasks on resources, each of which does its own in a fixed order, as it must be where every rank has to issue
the same collectives. So without `slowdown` the makespan is the longest path through the tasks and the orders of the
resources: never shorter than the critical path or any resource's load, and never longer when a task becomes shorter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from shoestring.core.trace import Kind, Trace
from shoestring.planning.cluster import Cluster


@dataclass(frozen=True)
class Task:
    """Work of `seconds` when nothing runs beside it; `after` are the indices of earlier tasks that must be done."""

    name: str
    kind: Kind
    seconds: float
    resource: str
    after: tuple[int, ...] = ()
    nbytes: int = 0


def simulate(tasks: Sequence[Task], slowdown: Mapping[str, float] | None = None) -> Trace:
    """The trace of `tasks`, one span each, from second 0; every resource takes its own in the order given.

    Args:
        slowdown: "wire beside compute" -> how many times as long the first takes while the other goes on; 1 where
            there is no entry. Several at once add up: with factors 2 and 2 beside it, work takes 3 times as long.
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
    """When the last span ends, in seconds since the trace's origin."""
    return max((span.stop for span in trace.spans), default=0.0)


class Priced(Protocol):
    """Something that may be chosen, because what it would do to a step can be computed."""

    def predict(self, trace: Trace, cluster: Cluster) -> Trace:
        """One step as it would be, from the `trace` of one without it; what is done every n-th step counts 1/n."""
        ...


@dataclass(frozen=True)
class Plan:
    """A decision. `predicted` has the seconds a step of every candidate, those preferred at equal price first."""

    choice: str
    reason: str
    predicted: dict[str, float]

    @property
    def seconds(self) -> float:
        return self.predicted[self.choice]


def choose(candidates: Mapping[str, Priced], trace: Trace, cluster: Cluster, *, margin: float) -> Plan:
    """The first candidate, unless another one is faster by more than `margin` of its time; then the fastest of all,
    or one before it whose time is within half of the margin."""
    predicted = {name: makespan(each.predict(trace, cluster)) for name, each in candidates.items()}
    first, best = next(iter(predicted)), min(predicted, key=predicted.__getitem__)
    if predicted[best] >= predicted[first] * (1 - margin):
        return Plan(first, f"nothing else is more than {margin:.0%} faster", predicted)
    close = next(name for name, seconds in predicted.items() if seconds <= predicted[best] * (1 + margin / 2))
    gain = predicted[first] / predicted[close]
    return Plan(close, f"{gain:.2f}x as fast as {first}", predicted)
