"""Fuses consecutive messages of a resource, if the step then ends no later.

A fused message has the latency of one message, but it can start only when all its tensors exist. So fusing pays if
messages are short and the step waits for something else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from shoestring.planning.schedule import TaskOrder, in_order, schedule
from shoestring.planning.simulate import Task

PASSES = 4
"""Largest number of passes over all pairs of neighbouring messages."""

Together = Callable[[Sequence[int]], float | None]
"""Indices of messages -> seconds of one message that carries them all; None if they cannot be fused."""


@dataclass(frozen=True)
class FusedTasks:
    """Tasks of which some are fused messages."""

    tasks: list[Task]
    members: list[tuple[int, ...]]
    """For each task, the indices of the original tasks that it consists of."""
    schedule: TaskOrder
    """An order of the tasks in which they end early."""


def fuse(tasks: Sequence[Task], together: Together) -> FusedTasks:
    """Fuse messages (tasks of the kind "wire") that follow each other on their resource, if the step ends no later.

    Like the order of `schedule`, the result does not depend on the order in which tasks are listed.

    Raises:
        ValueError: see `schedule`.
    """
    first = schedule(tasks, rounds=0)
    fused = _in_its_order([*tasks], [(index,) for index in range(len(tasks))], first)
    for _ in range(PASSES):
        place, before = 0, len(fused.tasks)
        while (pair := _next_pair(fused, place, together)) is not None:
            place, one, other, seconds = pair
            tried = _merged(fused, one, other, seconds)
            if tried is not None and tried.schedule.seconds <= fused.schedule.seconds * (1 + 1e-12):
                fused = tried  # the fused message may be fused with the next one
            else:
                place += 1
        if len(fused.tasks) == before:
            break
    return fused


def _in_its_order(tasks: list[Task], members: list[tuple[int, ...]], planned: TaskOrder) -> FusedTasks:
    order = planned.order
    identity = replace(planned, order=tuple(range(len(order))))
    return FusedTasks(in_order(tasks, order), [members[index] for index in order], identity)


def _next_pair(fused: FusedTasks, place: int, together: Together) -> tuple[int, int, int, float] | None:
    """The first pair of neighbouring messages, from the pair number `place` on, that is shorter as one message.

    Returns:
        The number of the pair, its two tasks, and the seconds of the fused message; None if there is no further pair.
    """
    pairs = list[tuple[int, int]]()
    for resource in sorted({task.resource for task in fused.tasks}):
        own = [index for index, task in enumerate(fused.tasks) if task.resource == resource]
        pairs += [pair for pair in pairwise(own) if all(fused.tasks[index].kind == "wire" for index in pair)]
    for at, (one, other) in enumerate(pairs[place:], place):
        seconds = together((*fused.members[one], *fused.members[other]))
        if seconds is not None and seconds < fused.tasks[one].seconds + fused.tasks[other].seconds:
            return at, one, other, seconds
    return None


def _merged(fused: FusedTasks, one: int, other: int, seconds: float) -> FusedTasks | None:
    """The tasks with two messages as one, in a quick order; None if the second waits for the first."""
    tasks, reached = fused.tasks, {one}
    for index in range(one + 1, other + 1):
        if reached.intersection(tasks[index].after):
            reached.add(index)
    if other in reached:
        return None
    first, second = tasks[one], tasks[other]
    both = replace(
        first,
        seconds=seconds,
        nbytes=first.nbytes + second.nbytes,
        after=tuple(sorted({*first.after, *second.after})),
    )
    # The fused message takes the place of the second one, which comes after all tasks that either message waits for.
    places = {index: index - (index > one) for index in range(len(tasks))} | {one: other - 1}
    merged = [both if index == other else task for index, task in enumerate(tasks) if index != one]
    merged = [replace(task, after=tuple(sorted({places[earlier] for earlier in task.after}))) for task in merged]
    members = [
        (*fused.members[one], *fused.members[index]) if index == other else fused.members[index]
        for index in range(len(tasks))
        if index != one
    ]
    return _in_its_order(merged, members, schedule(merged, rounds=0))
