"""Orders of tasks: against all orders of a few tasks, within the bound, and the same however tasks are listed."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.graph.two_chains import optimum
from shoestring.planning.bound import heads_of, tails_of, without_preemption
from shoestring.planning.fusion import fuse
from shoestring.planning.schedule import TaskOrder, in_order, lower_bound, schedule
from shoestring.planning.simulate import Task, makespan, simulate

LATENCY = 2.0


@st.composite
def task_lists(draw, most=7, names="abc"):
    """A few tasks on up to three resources, each behind some of the earlier ones; some take no time, many tie."""
    listed = []
    for index in range(draw(st.integers(0, most))):
        after = draw(st.sets(st.integers(0, index - 1), max_size=3)) if index else set()
        resource = draw(st.sampled_from(names))
        kind = "wire" if resource == "b" else "compute"
        seconds = float(draw(st.integers(0, 4)))
        listed.append(Task(f"task {index}", kind, seconds, resource, tuple(sorted(after)), nbytes=int(seconds)))
    return listed


def fastest(tasks):
    """Seconds of the best of all orders: each order of all tasks that keeps dependencies is one on every resource."""
    best = float("inf")
    for order in permutations(range(len(tasks))):
        place = {index: at for at, index in enumerate(order)}
        if all(place[one] < place[index] for index in order for one in tasks[index].after):
            best = min(best, makespan(simulate(in_order(tasks, order))))
    return best


def shuffled(tasks, seed):
    """The same tasks listed in another order, in which a task may come before those that it waits for."""
    order = list(range(len(tasks)))
    random.Random(seed).shuffle(order)
    places = {index: at for at, index in enumerate(order)}
    return [replace(tasks[index], after=tuple(places[one] for one in tasks[index].after)) for index in order]


@pytest.mark.slow
@settings(max_examples=60)
@given(task_lists(most=6))
def test_a_few_tasks_are_ordered_as_well_as_by_trying_all_orders(tasks):
    planned = schedule(tasks, tight=True)
    best = fastest(tasks)
    assert planned.seconds == pytest.approx(best)
    assert planned.bound <= best * (1 + 1e-9)


@settings(max_examples=8)
@given(task_lists(most=7))
def test_seven_tasks_too(tasks):
    assert schedule(tasks).seconds == pytest.approx(fastest(tasks))


@settings(max_examples=60)
@given(task_lists(most=6, names="aab"))
def test_the_bound_of_one_resource_is_its_best_order_if_the_others_did_all_at_once(tasks):
    relaxed = [task if task.resource == "a" else replace(task, resource=task.name) for task in tasks]
    before, ticks = [[*task.after] for task in tasks], [int(task.seconds) for task in tasks]
    behind = [[user for user, task in enumerate(tasks) if index in task.after] for index in range(len(tasks))]
    own, tails = [index for index, task in enumerate(tasks) if task.resource == "a"], tails_of(behind, ticks)
    longest = max(map(sum, zip(heads_of(before, ticks), ticks, tails, strict=True)), default=0)
    bound = without_preemption(own, before, ticks, tails, known=sum(ticks))
    assert max(bound, longest) == max(fastest(relaxed), 0)


@settings(max_examples=60)
@given(task_lists(most=24), st.integers(0, 3))
def test_orders_are_complete_within_the_bound_and_what_simulate_says(tasks, rounds):
    planned = schedule(tasks, rounds, tight=True)
    assert sorted(planned.order) == list(range(len(tasks)))
    place = {index: at for at, index in enumerate(planned.order)}
    assert all(place[one] < place[index] for index, task in enumerate(tasks) for one in task.after)
    assert planned.seconds == makespan(simulate(in_order(tasks, planned.order)))
    assert planned.bound >= lower_bound(tasks)
    assert planned.bound <= planned.seconds * (1 + 1e-9) <= sum(task.seconds for task in tasks) * (1 + 1e-6) + 1e-9
    loads = [sum(task.seconds for task in tasks if task.resource == name) for name in "abc"]
    assert planned.bound >= max(loads) * (1 - 1e-9)


@pytest.mark.slow
@settings(max_examples=60)
@given(task_lists(most=24), st.integers(0, 1000))
def test_all_ranks_have_the_same_order_however_tasks_are_listed(tasks, seed):
    """Tasks have names; ranks may list them otherwise, but order them alike, and fuse the same messages."""
    other = shuffled(tasks, seed)

    def names(listed):
        return [listed[index].name for index in schedule(listed, rounds=5).order]

    def fused_names(listed):
        fused = fuse(listed, lambda members: LATENCY + sum(listed[index].nbytes for index in members))
        return [[listed[index].name for index in members] for members in fused.members]

    assert names(tasks) == names(other)
    assert fused_names(tasks) == fused_names(other)


@pytest.mark.parametrize("seed", range(12))
def test_two_chains_are_ordered_nearly_as_well_as_possible(seed):
    draw, tasks, last = random.Random(seed), [], [-1, -1]
    for index in range(draw.choice([8, 16, 24])):
        chain = index % 2
        after = (last[chain],) if last[chain] >= 0 else ()
        tasks.append(Task(f"task {index}", "compute", draw.uniform(0.2, 2), draw.choice("ab"), after))
        last[chain] = index
    best, planned = optimum(tasks), schedule(tasks, rounds=200, tight=True)
    assert best * (1 - 1e-9) <= planned.seconds <= best * 1.01
    assert planned.bound <= best * (1 + 1e-9)


def test_no_tasks_and_one_resource():
    assert schedule([]) == TaskOrder((), 0.0, 0.0)
    assert schedule([]).ratio == 1.0
    chain = [Task(str(number), "compute", 1.5, "only", ()) for number in range(20)]
    planned = schedule(chain)
    assert [planned.seconds, planned.bound] == pytest.approx([30, 30])
    idle = schedule([Task("nothing", "compute", 0.0, "only"), Task("wait", "wire", 0.0, "other", (0,))])
    assert (idle.seconds, idle.bound, idle.order) == (0.0, 0.0, (0, 1))


def test_a_task_without_duration_fits_between_two_others():
    tasks = [
        Task("first", "compute", 2.0, "a"),
        Task("second", "compute", 2.0, "a", (0,)),
        Task("mark", "compute", 0.0, "a", (0,)),
        *(Task(f"sent {number}", "wire", 1.0, "b", (2,)) for number in range(8)),
    ]
    assert schedule(tasks).seconds == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([Task("a", "compute", 1, "x", (1,)), Task("b", "compute", 1, "x", (0,))], "wait for each other: a, b"),
        ([Task("a", "compute", 1, "x", (0,))], "wait for each other: a"),
        ([Task("a", "compute", 1, "x", (3,))], "waits for"),
        ([Task("a", "compute", -1.0, "x")], "takes -1.0 seconds"),
        ([Task("a", "compute", float("nan"), "x")], "takes nan seconds"),
        ([Task("a", "compute", float("inf"), "x")], "takes inf seconds"),
    ],
)
def test_what_is_no_set_of_tasks_is_refused(tasks, message):
    with pytest.raises(ValueError, match=message):
        schedule(tasks)


def test_a_message_that_the_rest_waits_for_goes_first():
    """In the order of their tensors, the long message would block the short one, which the longest path needs."""
    tasks = [
        Task("long", "wire", 5.0, "wire"),
        Task("short", "wire", 1.0, "wire"),
        *(Task(f"work {number}", "compute", 1.0, "processor", (1,)) for number in range(6)),
        Task("end", "compute", 1.0, "processor", (0,)),
    ]
    planned = schedule(tasks)
    assert [index for index in planned.order if index < 2] == [1, 0]
    assert [planned.seconds, planned.bound] == pytest.approx([8.0, 8.0])
    assert makespan(simulate(tasks)) == 13.0


# -- fusion ------------------------------------------------------------------------------------------------------------


def messages(work):
    """Gradients that are sent one after the other as they are computed, each with a latency; then the optimizer."""
    tasks = []
    for number in range(4):
        tasks.append(Task(f"backward {number}", "compute", work, "processor", (len(tasks) - 2,) if tasks else ()))
        tasks.append(Task(f"gradient {number}", "wire", LATENCY + 1, "wire", (len(tasks) - 1,), nbytes=1))
    return [*tasks, Task("optimizer", "compute", 1.0, "processor", tuple(range(1, 8, 2)))]


def together(tasks):
    return lambda members: LATENCY + sum(tasks[index].nbytes for index in members)


def test_short_messages_are_fused_where_the_wire_is_late_and_not_where_work_is():
    late = messages(work=0.5)
    fused = fuse(late, together(late))
    assert fused.schedule.seconds < schedule(late).seconds
    assert sum(task.kind == "wire" for task in fused.tasks) < 4
    assert makespan(simulate(fused.tasks)) == fused.schedule.seconds
    assert sorted(index for members in fused.members for index in members) == list(range(len(late)))
    for task, members in zip(fused.tasks, fused.members, strict=True):
        assert task.nbytes == sum(late[index].nbytes for index in members)
    slow = messages(work=10.0)
    assert fuse(slow, together(slow)).schedule.seconds == pytest.approx(schedule(slow).seconds)


def test_a_message_is_not_fused_with_one_that_waits_for_it():
    tasks = [
        Task("gather", "wire", 3.0, "wire", (), 1),
        Task("work", "compute", 1.0, "processor", (0,)),
        Task("sum", "wire", 3.0, "wire", (1,), 1),
    ]
    assert [len(members) for members in fuse(tasks, together(tasks)).members] == [1, 1, 1]


def test_what_cannot_be_one_message_stays_apart():
    tasks = [Task(name, "wire", LATENCY + 1, "wire", (), 1) for name in ("sum a", "gather b", "sum c")]
    alike = lambda members: together(tasks)(members) if len({tasks[one].name[:3] for one in members}) == 1 else None  # noqa: E731
    fused = fuse(tasks, alike)
    assert sorted(len(members) for members in fused.members) in ([1, 2], [1, 1, 1])
    assert all(len({tasks[one].name[:3] for one in members}) == 1 for members in fused.members)


@settings(max_examples=60)
@given(task_lists(most=16))
def test_fusing_never_takes_longer(tasks):
    fused = fuse(tasks, together(tasks))
    assert fused.schedule.seconds <= schedule(tasks, rounds=0).seconds * (1 + 1e-9)
    assert makespan(simulate(fused.tasks)) == pytest.approx(fused.schedule.seconds)
