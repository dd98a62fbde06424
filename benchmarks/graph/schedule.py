"""How much another order of computations and messages could save, in the steps of planned runs.

A step's tasks (passes of micro-batches, messages, exchanges of gradients) and the resources that do them are those of
`planning.simulate`. Finding the best order is resource-constrained scheduling. Here it is bounded instead: no order is
faster than the preemptive schedule of any single resource (Jackson, 1955), with the longest paths before and behind
each task. Beside it stands a list schedule, which does the waiting task with the longest path behind it first, and
holds as many activations as that takes.

A bar that holds says that a scheduler is not worth building; one that is missed says only that it might be.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from functools import cache, partial

from benchmarks.harness import Bar, Deadline
from benchmarks.parallel.case_costs import links_of
from benchmarks.parallel.cases import CLUSTERS, MODELS, price
from benchmarks.rows import Measured
from shoestring.planning.predict import tasks_of
from shoestring.planning.simulate import Task, makespan, simulate

NAMES = ("GPT", "Llama", "ViT")
"""Beginnings of the names of models; of each, the largest model is planned."""


def heads(tasks: Sequence[Task]) -> list[float]:
    """Seconds before each task can start, if every resource did any number of tasks at once."""
    starts = list[float]()
    for task in tasks:
        starts.append(max((starts[one] + tasks[one].seconds for one in task.after), default=0.0))
    return starts


def tails(tasks: Sequence[Task]) -> list[float]:
    """Seconds from the end of each task to the end of the step, at least."""
    behind = [0.0] * len(tasks)
    for index in range(len(tasks) - 1, -1, -1):
        for one in tasks[index].after:
            behind[one] = max(behind[one], behind[index] + tasks[index].seconds)
    return behind


def lower_bound(tasks: Sequence[Task]) -> float:
    """Seconds that the tasks take in any order, at least."""
    before, behind = heads(tasks), tails(tasks)
    longest = max(a + task.seconds + b for a, task, b in zip(before, tasks, behind, strict=True))
    of_resource = defaultdict[str, list[int]](list)
    for index, task in enumerate(tasks):
        of_resource[task.resource].append(index)
    return max(longest, *(_one_machine(tasks, own, before, behind) for own in of_resource.values()))


def _one_machine(tasks: Sequence[Task], own: Sequence[int], before: Sequence[float], behind: Sequence[float]) -> float:
    """The makespan of the preemptive schedule of one resource, which always works on the task with the longest tail."""
    waiting, left = sorted(own, key=lambda index: before[index]), {index: tasks[index].seconds for index in own}
    ready, now, place, most = list[tuple[float, int]](), 0.0, 0, 0.0
    while place < len(waiting) or ready:
        if not ready:
            now = max(now, before[waiting[place]])
        while place < len(waiting) and before[waiting[place]] <= now:
            heapq.heappush(ready, (-behind[waiting[place]], waiting[place]))
            place += 1
        tail, index = ready[0]
        until = before[waiting[place]] if place < len(waiting) else float("inf")
        done = min(left[index], until - now)
        now, left[index] = now + done, left[index] - done
        if left[index] <= 0:
            heapq.heappop(ready)
            most = max(most, now - tail)
    return most


def listed(tasks: Sequence[Task]) -> float:
    """Seconds of a list schedule: a free resource begins the task with the longest path behind it that can begin."""
    behind, missing = tails(tasks), [len(task.after) for task in tasks]
    users = defaultdict[int, list[int]](list)
    for index, task in enumerate(tasks):
        for one in task.after:
            users[one].append(index)
    ready, free, events, now = (
        defaultdict[str, list[tuple[float, int]]](list),
        set[str](),
        list[tuple[float, int]](),
        0.0,
    )
    for index, task in enumerate(tasks):
        free.add(task.resource)
        if not missing[index]:
            heapq.heappush(ready[task.resource], (-behind[index], index))
    while True:
        for resource in [one for one in free if ready[one]]:
            _, index = heapq.heappop(ready[resource])
            free.remove(resource)
            heapq.heappush(events, (now + tasks[index].seconds, index))
        if not events:
            return now
        now, index = heapq.heappop(events)
        free.add(tasks[index].resource)
        for user in users[index]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready[tasks[user].resource], (-behind[user], user))


@cache
def schedules(name: str) -> dict[str, tuple[float, float, float, float]]:
    """For each cluster: seconds of the planned step, its lower bound, its list schedule, and of the busiest rank."""
    model = max((one for one in MODELS if one.name.startswith(name)), key=lambda one: one.weights)
    steps = dict[str, tuple[float, float, float, float]]()
    for cluster in CLUSTERS:
        plan = price(model, cluster, model.batches[1]).best
        if plan is not None and len({span.kind for span in plan.predicted.trace.spans}) > 1:
            tasks = tasks_of(plan.step, links_of(cluster))
            seconds = makespan(simulate(tasks))
            steps[cluster.label] = seconds, lower_bound(tasks), listed(tasks), max(plan.predicted.busy())
    return steps


def saved(name: str, deadline: Deadline) -> Measured:
    """The largest part of the exposed communication that any order could hide, over clusters."""
    deadline.check()
    parts = dict[str, float]()
    for cluster, (seconds, bound, _, busy) in schedules(name).items():
        exposed = seconds - busy
        parts[cluster] = (seconds - bound) / exposed if exposed > 1e-9 * seconds else 0.0
    ahead = max(seconds / by_list for seconds, _, by_list, _ in schedules(name).values())
    told = ", ".join(f"{cluster} {part:.0%}" for cluster, part in parts.items())
    return Measured(max(parts.values()), f"{told}; by a list schedule at most {ahead:.3f} times as fast")


def rows() -> list[Bar]:
    """What the order of messages is worth."""
    what = "part of the exposed communication of a planned step that another order could hide, at most over clusters"
    return [
        Bar(f"graph.order-{name.lower()}", f"{name}: {what}", "<=", 0.15, partial(saved, name), kind="exact")
        for name in NAMES
    ]
