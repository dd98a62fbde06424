"""No order of tasks is faster than the bound, and a list schedule is one of them: by brute force over all orders."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.graph.schedule import listed, lower_bound
from shoestring.planning.simulate import Task, makespan, simulate


@st.composite
def tasks(draw):
    """A few tasks on two resources, each behind some of the earlier ones; some take no time."""
    made = []
    for index in range(draw(st.integers(1, 6))):
        after = draw(st.sets(st.integers(0, index - 1), max_size=2)) if index else set()
        seconds = float(draw(st.integers(0, 4)))
        made.append(Task(str(index), "compute", seconds, draw(st.sampled_from("ab")), tuple(sorted(after))))
    return made


def best(made):
    """Seconds of the fastest order: each order of all tasks that keeps dependencies is an order on every resource."""
    fastest = float("inf")
    for order in permutations(range(len(made))):
        place = {index: at for at, index in enumerate(order)}
        if all(place[one] < place[index] for index in order for one in made[index].after):
            again = [
                Task(made[index].name, "compute", made[index].seconds, made[index].resource,
                     tuple(sorted(place[one] for one in made[index].after)))
                for index in order
            ]  # fmt: skip
            fastest = min(fastest, makespan(simulate(again)))
    return fastest


@given(made=tasks())
@settings(max_examples=60)
def test_the_best_order_is_between_the_bound_and_the_list(made):
    assert lower_bound(made) <= best(made) + 1e-9
    assert best(made) <= listed(made) + 1e-9
