"""The simulator against hand-made schedules, against enumeration of all schedules, and its general properties."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoestring.planning.cluster import Collective
from shoestring.planning.simulate import Task, makespan, simulate

RESOURCES = ("compute", "wire", "copy")


@st.composite
def graphs(draw, most=8):
    count = draw(st.integers(1, most))
    tasks = []
    for index in range(count):
        after = tuple(sorted(draw(st.sets(st.integers(0, index - 1), max_size=3)))) if index else ()
        kind = draw(st.sampled_from(RESOURCES))
        tasks.append(Task(f"t{index}", kind, draw(st.integers(0, 20)), kind, after))
    return tasks


def times(trace):
    return {span.name: (span.start, span.stop) for span in trace.spans}


def enumerated(tasks):
    """The shortest makespan of all schedules that keep the order on each resource: brute force over global orders."""
    best = float("inf")
    for order in permutations(range(len(tasks))):
        place = {task: at for at, task in enumerate(order)}
        if any(place[other] > place[i] for i, task in enumerate(tasks) for other in task.after):
            continue
        if any(
            place[i] > place[j] for j in range(len(tasks)) for i in range(j) if tasks[i].resource == tasks[j].resource
        ):
            continue
        free, ended = dict.fromkeys(RESOURCES, 0.0), {}
        for index in order:
            task = tasks[index]
            begin = max([free[task.resource], *(ended[other] for other in task.after)])
            ended[index] = free[task.resource] = begin + task.seconds
        best = min(best, *[max(ended.values())])
    return best


def critical_path(tasks):
    ends = []
    for task in tasks:
        ends.append(task.seconds + max((ends[other] for other in task.after), default=0.0))
    return max(ends)


def test_a_backward_pass_in_two_buckets_hides_the_first_one():
    trace = simulate(
        [
            Task("forward", "compute", 2, "compute"),
            Task("late layers", "compute", 3, "compute", (0,)),
            Task("early layers", "compute", 3, "compute", (1,)),
            Task("bucket 0", "wire", 2, "wire", (1,), nbytes=10),
            Task("bucket 1", "wire", 4, "wire", (2,), nbytes=20),
            Task("optimizer", "compute", 1, "compute", (3, 4)),
        ]
    )
    assert times(trace) == {
        "forward": (0, 2),
        "late layers": (2, 5),
        "early layers": (5, 8),
        "bucket 0": (5, 7),
        "bucket 1": (8, 12),
        "optimizer": (12, 13),
    }
    assert makespan(trace) == 13
    assert trace.totals["bucket 1", "wire"].nbytes == 20


def test_work_beside_other_work_is_slower_only_while_both_continue():
    tasks = [Task("backward", "compute", 4, "compute"), Task("ring", "wire", 1, "wire")]
    trace = simulate(tasks, {"compute beside wire": 1.5, "wire beside compute": 2.0})
    # For 2 s the ring runs at half its speed and the backward pass does 2 / 1.5 of its 4 s.
    assert times(trace) == {"ring": (0, 2), "backward": (0, pytest.approx(2 + 4 - 2 / 1.5))}


def test_channels_share_a_link():
    tasks = [Task(f"ring {each}", "wire", 2, f"channel {each}") for each in range(3)]
    assert makespan(simulate(tasks, {"wire beside wire": 2.0})) == pytest.approx(6)


def test_nothing_takes_no_time():
    assert makespan(simulate([])) == 0
    assert makespan(simulate([Task("nothing", "compute", 0, "a"), Task("wait", "wait", 0, "b", (0,))])) == 0


def test_a_task_cannot_wait_for_a_later_one():
    with pytest.raises(ValueError, match=r"task 0 \(first\) must come after earlier tasks"):
        simulate([Task("first", "compute", 1, "a", (1,)), Task("second", "compute", 1, "b")])


@given(graphs(most=6))
def test_it_is_the_shortest_schedule_with_these_orders(tasks):
    assert makespan(simulate(tasks)) == pytest.approx(enumerated(tasks))


@given(graphs())
def test_never_shorter_than_the_critical_path_or_a_load(tasks):
    found = makespan(simulate(tasks))
    loads = [sum(task.seconds for task in tasks if task.resource == name) for name in RESOURCES]
    assert found >= max(critical_path(tasks), *loads) - 1e-9
    assert found <= sum(task.seconds for task in tasks) + 1e-9


@given(graphs(), st.data())
def test_a_shorter_task_never_makes_it_longer(tasks, data):
    # True for a fixed order on each resource; with a greedy choice of the next task it would not be (Graham 1969).
    index = data.draw(st.integers(0, len(tasks) - 1))
    shorter = [replace(task, seconds=task.seconds * 0.5) if at == index else task for at, task in enumerate(tasks)]
    assert makespan(simulate(shorter)) <= makespan(simulate(tasks)) + 1e-9


@given(graphs(), st.floats(1, 3))
def test_slowdown_costs_time_and_never_breaks_an_order(tasks, factor):
    slow = {f"{one} beside {other}": factor for one in RESOURCES for other in RESOURCES}
    trace = simulate(tasks, slow)
    assert makespan(trace) >= makespan(simulate(tasks)) - 1e-9
    found = times(trace)
    assert len(found) == len(tasks)
    for index, task in enumerate(tasks):
        begin, end = found[task.name]
        assert end - begin >= task.seconds - 1e-9
        before = [other for other in range(index) if other in task.after or tasks[other].resource == task.resource]
        assert all(found[tasks[other].name][1] <= begin + 1e-9 for other in before)


@given(graphs())
def test_full_slowdown_is_one_shared_machine(tasks):
    # Where any two tasks take twice as long together, n take n times as long: nothing is gained by overlap.
    slow = {f"{one} beside {other}": 2.0 for one in RESOURCES for other in RESOURCES}
    assert makespan(simulate(tasks, slow)) == pytest.approx(sum(task.seconds for task in tasks), abs=1e-9)


def test_a_message_takes_what_messages_of_its_size_took():
    """A burst passes at once, so long messages are slower than short ones for their size."""
    points = ((1000.0, 0.1), (4000.0, 0.2), (16000.0, 3.2))
    link = Collective(kind="message", over=("hosts",), ranks=2, latency=0.0, bandwidth=5000.0, points=points)
    assert [link.seconds(size) for size in (0, 500, 1000, 2500, 4000, 10000, 32000)] == pytest.approx(
        [0.1, 0.1, 0.1, 0.15, 0.2, 1.7, 6.4]
    )
    assert replace(link, points=()).seconds(5000) == 1.0
