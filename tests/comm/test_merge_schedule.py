"""When replicas are merged: each fragment once a period, and at no other step wherever a run begins."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.comm.local.schedule import MergeSchedule


def sent(schedule: MergeSchedule, steps: int, total: int) -> dict[int, list[int]]:
    """The steps after which each fragment is sent."""
    due = {step: schedule.due(step - 1, step, total) for step in range(1, steps + 1)}
    return {f: [step for step, which in due.items() if f in which] for f in range(schedule.fragments)}


@given(every=st.integers(1, 9), final=st.sampled_from([0, 5]), fragments=st.integers(1, 4), total=st.integers(0, 60))
@settings(max_examples=25)
def test_a_constant_period_is_counted_from_the_first_step(every: int, final: int, fragments: int, total: int) -> None:
    fragments, total = min(fragments, every), total * (final == 0)  # without a known end, periods do not grow
    for fragment, steps in sent(MergeSchedule(every, final, fragments), 60, total).items():
        phase = every * (fragment + 1) // fragments
        assert steps == [step for step in range(1, 61) if (step - phase) % every == 0]


@given(every=st.integers(1, 6), more=st.integers(1, 20), fragments=st.integers(1, 4), total=st.integers(1, 120))
@settings(max_examples=25)
def test_periods_grow_with_the_progress(every: int, more: int, fragments: int, total: int) -> None:
    fragments, final = min(fragments, every), every + more
    of_fragments = sent(MergeSchedule(every, final, fragments), total + 2 * final, total)
    for steps in of_fragments.values():
        gaps = [later - step for step, later in pairwise(steps)]
        assert all(every <= gap <= final for gap in gaps)
        assert steps[0] <= every
    gaps = [later - step for step, later in pairwise([0, *of_fragments[fragments - 1]])]
    assert gaps == sorted(gaps)
    assert gaps[0] == every and gaps[-1] == final


def test_lengths_between_are_those_of_the_progress() -> None:
    assert sent(MergeSchedule(2, 5, 1), 14, 12) == {0: [2, 4, 7, 10, 14]}
    assert sent(MergeSchedule(4, 8, 2), 16, 16) == {0: [2, 6, 12], 1: [4, 9, 15]}


@given(strides=st.lists(st.sampled_from([0.5, 1.0, 1.75, 3.0]), min_size=1, max_size=30))
@settings(max_examples=25)
def test_steps_that_are_worth_several_pass_no_mark(strides: list[float]) -> None:
    schedule, position, passed = MergeSchedule(4, 9, 2), 0.0, []
    for stride in strides:
        passed += schedule.due(position, position + stride, 40)
        position += stride
    assert sorted(passed) == sorted(f for f, steps in sent(schedule, int(position), 40).items() for _ in steps)
