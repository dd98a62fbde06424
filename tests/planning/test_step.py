"""Predictions of steps: against closed forms, and what holds of every plan that features make."""

from __future__ import annotations

import math
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.core.errors import ConfigError, ConflictError
from shoestring.core.feature import DATA, arrange_mesh, check_owners, resolve_all
from shoestring.core.world import World
from shoestring.memory import Recompute, Zero
from shoestring.parallel import DDP, FSDP, Pipeline, Tensor
from shoestring.planning.cluster import Collective
from shoestring.planning.predict import in_flight, predict, tasks_of, with_order
from shoestring.planning.schedule import schedule
from shoestring.planning.step import Links, ModelCosts, PartCosts, group_over, planned_step

MB = 1_000_000.0


class Evenly(dict):
    """All collectives take the same time."""

    def __init__(self, latency: float, bandwidth: float) -> None:
        super().__init__()
        self.speed = Collective(kind="any", over=DATA, ranks=2, latency=latency, bandwidth=bandwidth)

    def __missing__(self, key):
        return self.speed


FREE = Links(Evenly(0.0, math.inf))


def part(seconds: float, trained: int, held: float = MB, sizes=(1, 16)) -> PartCosts:
    """A part whose backward pass takes twice as long as its forward pass."""
    every = lambda number: tuple(number * size for size in sizes)  # noqa: E731
    return PartCosts(forward=every(seconds), backward=every(2 * seconds), held=every(held), trained=trained)


def model(blocks: int = 4, seconds: float = 1.0, around: float = 0.0, tied: int = 0) -> ModelCosts:
    return ModelCosts(
        samples=(1, 16),
        blocks=(part(seconds, int(MB)),) * blocks,
        before=part(around, 0 if tied else int(MB)),
        behind=part(around, int(MB)),
        hidden=(1000,) * (blocks + 1),
        tied=tied,
        scored=1000,
        optimizer=0.0,
        state=2.0,
        moved=1e9,
    )


def predicted(features, world, costs, batch=16, micro=1, links=FREE):
    world = arrange_mesh(world, features)
    step, settled = planned_step(world, resolve_all(features, world), costs, batch=batch, micro=micro)
    return predict(step, links), step, settled


def test_one_process_takes_as_long_as_its_passes():
    result, *_ = predicted([], World(), model(4, 1.0), batch=8, micro=2)
    assert result.seconds == pytest.approx(8 * 4 * 3.0)


@given(st.sampled_from([2, 4]), st.integers(1, 4), st.sampled_from([1, 2, 4, 8]), st.sampled_from(["1f1b", "gpipe"]))
def test_equal_stages_take_the_time_of_a_full_pipeline_and_of_filling_it(stages, each, micro, schedule):
    """(m + S - 1) slots, of a forward and a backward pass of a micro-batch through a stage (Huang et al., 2019)."""
    world = World(size=stages, local_size=1)
    pipeline = Pipeline(schedule=schedule, ahead=0)
    result, *_ = predicted([pipeline], world, model(stages * each, 1.0), batch=8, micro=micro)
    slot = 3.0 * each * 8 / micro
    assert result.seconds == pytest.approx((micro + stages - 1) * slot)


def test_replicas_divide_the_work_and_wait_for_the_last_bucket():
    world, costs = World(size=2, local_size=1), model(4, 1.0)
    alone, *_ = predicted([DDP()], world, costs)
    assert alone.seconds == pytest.approx(8 * 4 * 3.0)
    slow, *_ = predicted([DDP()], world, costs, links=Links(Evenly(0.0, MB)))
    # All gradients, 6 MB, are one bucket, which is full when the backward pass ends.
    assert slow.seconds == pytest.approx(8 * 4 * 3.0 + 6)
    assert [span.nbytes for span in slow.trace.spans if span.kind == "wire"] == [6 * MB]
    early, *_ = predicted([DDP(bucket_mb=0.5)], world, costs, links=Links(Evenly(0.0, MB)))
    assert early.seconds == pytest.approx(8 * 4 * 3.0 + 1)  # only the embeddings' is left


def test_activations_and_gradients_of_two_stages_share_the_wire_of_their_host():
    """With tied embeddings, which the last stage looks up, a host sends twice as much."""
    world, links = World(size=2, local_size=1), Links(Evenly(0.0, 100.0))
    untied, *_ = predicted([Pipeline()], world, model(2, 0.0), batch=8, micro=8, links=links)
    assert untied.seconds == pytest.approx(9 * 10.0)  # nine messages in a row: a gradient goes back the other way
    last, step, _ = predicted(
        [Pipeline(embeddings="last")], world, model(2, 0.0, tied=500), batch=8, micro=8, links=links
    )
    assert step.first == -1
    assert last.seconds >= 2 * 8 * 10.0
    first, step, (settled,) = predicted([Pipeline()], world, model(2, 0.0, tied=500), batch=8, micro=8, links=links)
    assert step.first == 0
    assert settled.embeddings == "first"  # 500 bytes once a step are less than 8,000
    assert first.seconds == pytest.approx(untied.seconds + 5)


def test_the_cuts_follow_from_what_blocks_cost():
    costs = model(6, 1.0, around=3.0)
    _, _, (settled,) = predicted([Pipeline()], World(size=2, local_size=1), costs, batch=8, micro=8)
    assert settled.cuts == (3,)
    lopsided = model(6, 1.0)
    lopsided = ModelCosts(**{**vars(lopsided), "behind": part(4.0, int(MB))})
    _, _, (settled,) = predicted([Pipeline()], World(size=2, local_size=1), lopsided, batch=8, micro=8)
    assert settled.cuts == (5,)


def test_memory_is_what_is_held():
    costs = model(4)
    whole, *_ = predicted([], World(), costs, batch=4, micro=1)
    weights, held = 6 * MB, 6 * 4 * MB  # of four blocks, and of what lies before and behind them, four samples each
    assert whole.peak == pytest.approx(weights * 4 + held + 2 * MB, rel=0.01)
    world = World(size=2, local_size=1)
    zero, *_ = predicted([Zero(stage=2)], world, costs, batch=8)
    ddp, *_ = predicted([DDP()], world, costs, batch=8)
    assert ddp.peak - zero.peak == pytest.approx(weights * (1 + 2) / 2)
    recomputed, *_ = predicted([Recompute()], World(), costs, batch=4)
    assert recomputed.peak < whole.peak
    assert recomputed.seconds == pytest.approx(whole.seconds * 4 / 3)


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_groups_are_those_of_the_mesh(hosts, local, data):
    world = World(size=hosts * local, local_size=local)
    for number, axis in (("stage", "hosts"), ("tensor", "local")):
        divisors = [count for count in range(1, 5) if world.axes[axis] % count == 0]
        world = world.split(axis, number, data.draw(st.sampled_from(divisors)))
    axes = data.draw(st.sets(st.sampled_from(sorted(world.axes))))
    group = group_over(world, axes)
    places = {}
    for rank in range(world.size):
        own = World(**{**vars_of(world), "rank": rank})
        places.setdefault(own.index_over([axis for axis in world.axes if axis not in axes]), []).append(rank)
    assert {len(ranks) for ranks in places.values()} == {group.ranks}
    assert len({rank // local for rank in places[0]}) == group.hosts


def vars_of(world):
    return {"size": world.size, "local_size": world.local_size, "layout": world.layout}


SHARDS = [(), (DDP(),), (Zero(stage=1),), (Zero(stage=2),), (FSDP(),), (FSDP(hosts="replicate"),)]
SPLITS = [(), (Pipeline(stages=2),), (Pipeline(stages=2, chunks=2),), (Tensor(ways=2),)]
WORLDS = [World(size=2, local_size=1), World(size=2, local_size=2), World(size=4, local_size=2)]


@settings(deadline=None)
@given(
    st.sampled_from([*product(SHARDS, SPLITS, [(), (Recompute(),)])]),
    st.sampled_from(WORLDS),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([0, 10_000]),
    st.floats(0, 2),
)
def test_of_every_plan(chosen, world, micro, tied, around):
    """No plan is faster than its work, slower links never make it faster, and its ranks hold their part."""
    features = [feature for group in chosen for feature in group]
    try:
        check_owners(features)
        costs = model(4, 1.0, around, tied)
        fast, step, _ = predicted(features, world, costs, micro=micro)
        slow, *_ = predicted(features, world, costs, micro=micro, links=Links(Evenly(1e-3, 1e5)))
        slower, *_ = predicted(features, world, costs, micro=micro, links=Links(Evenly(2e-3, 5e4)))
    except (ConflictError, ConfigError):
        return
    work = (3 * (4 + 2 * around) + 4 * any(isinstance(one, Recompute) for one in features)) * 16
    computes = step.world.size if step.world.ranks_over(DATA) * step.stages * step.ways == step.world.size else 1
    assert fast.seconds >= work / computes * (1 - 1e-9)
    assert fast.seconds <= slow.seconds + 1e-9
    assert slow.seconds <= slower.seconds + 1e-9
    assert min(fast.peaks) > 0
    assert sum(fast.peaks) * step.divided["parameters"] * step.ways >= costs.trained * 0.99
    assert max(fast.busy()) <= fast.seconds + 1e-9


def test_a_number_of_samples_between_two_measured_ones_is_interpolated():
    costs = ModelCosts(**{**vars(model()), "samples": (2, 4, 16)})
    assert costs.at((2.0, 8.0, 20.0), 3) == 5.0
    assert costs.at((2.0, 8.0, 20.0), 10) == 14.0
    assert costs.at((2.0, 8.0, 20.0), 28) == 32.0
    assert costs.at((2.0, 8.0, 20.0), 1) == 0.0


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from([(2, 1), (2, 2), (4, 1)]),
    st.sampled_from([2, 4, 8]),
    st.sampled_from(["1f1b", "gpipe"]),
    st.sampled_from([0, 500]),
    st.floats(0, 2),
    st.integers(0, 2),
)
def test_passes_in_another_order_are_the_same_and_hold_no_more(shape, micro, kind, tied, latency, more):
    stages, chunks = shape
    pipeline = Pipeline(schedule=kind, chunks=chunks, ahead=0)
    links = Links(Evenly(latency, 1e3))
    _, step, _ = predicted([pipeline], World(size=stages, local_size=1), model(4, 1.0, 0.1, tied), 8, micro, links)
    reordered = with_order(step, links, more, rounds=3)
    for before, after in zip(step.passes, reordered.passes, strict=True):
        assert sorted(before) == sorted(after)
    limits, held = in_flight(step), in_flight(reordered)
    assert all(held[part] <= count + more for part, count in limits.items())
    result = predict(reordered, links)  # the stages do not wait for each other
    assert result.seconds >= schedule(tasks_of(step, links), rounds=0).bound * (1 - 1e-9)


def test_messages_that_take_long_are_hidden_by_another_order():
    """With one micro-batch in flight for each stage, stages wait for messages; with more, another order hides them."""
    links = Links(Evenly(3.0, math.inf))
    result, step, _ = predicted([Pipeline(ahead=0)], World(size=2, local_size=1), model(4, 1.0), 16, 16, links)
    faster = predict(with_order(step, links, more=2), links)
    assert faster.seconds < 0.95 * result.seconds
    assert faster.peak > result.peak


@pytest.mark.slow
@given(st.sampled_from([*product(SHARDS, SPLITS)]), st.sampled_from(WORLDS), st.sampled_from([1, 4]))
def test_tasks_say_all_that_they_wait_for(chosen, world, micro):
    """By their dependencies alone, no pass runs before the one that it needs, and the optimizer is last."""
    features = [feature for group in chosen for feature in group]
    try:
        check_owners(features)
        _, step, _ = predicted(features, world, model(4, 1.0), micro=micro)
    except (ConflictError, ConfigError):
        return
    tasks = tasks_of(step, Links(Evenly(1e-3, 1e5)))
    after = list[set[int]]()
    for task in tasks:
        after.append({*task.after}.union(*(after[index] for index in task.after)))
    for index, task in enumerate(tasks):
        own = {other for other in range(index) if tasks[other].resource == task.resource}
        if task.name.startswith("optimizer"):
            assert own <= after[index]
        if task.name.startswith("backward"):
            stage = task.name.rpartition(" of ")[2]
            assert any(tasks[other].name == f"forward of {stage}" for other in after[index])
