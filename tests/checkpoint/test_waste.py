"""checkpoint.waste-*: the simulator against a walk through the run and Daly's model, its search, rows at tiny sizes."""

import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.checkpoint.waste import HOUR, Sizes, cache, compared, rows, two
from benchmarks.harness import Deadline, OutOfBudget
from benchmarks.rows import unique
from shoestring.checkpoint.tiers.interval import Level, waste
from tests.rigs.checkpointing.failure_simulation import (
    Failures,
    FailureSetting,
    Intervals,
    coarse,
    drawn,
    optimum,
    simulate,
)

TINY = Sizes(events=120, runs=8, final_events=600, final_runs=16, points=3)


def walked(levels, step, every, gaps, failed):
    """The share of one run's time that is lost, by going through it step by step and save by save."""
    here, pause, kept = 0, 0.0, [0] * len(levels)
    for gap, lost in zip(gaps, failed, strict=True):
        clock, done, started = pause, here, []
        while clock < gap:
            clock, done = clock + step, done + 1
            for index, level in enumerate(levels):
                if done % every[index] == 0:
                    clock += level.cost
                    started.append((clock + max(level.duration - level.cost, 0.0), index, done))
        for usable, index, steps in started:
            if usable <= gap:
                kept[index] = steps
        kept = [0 if index < lost else steps for index, steps in enumerate(kept)]
        here, pause = max(kept), levels[lost].restart
    return 1 - here * step / sum(gaps)


def one(cost=5.0, mean=600.0, restart=30.0, shape=1.0):
    return FailureSetting((Level("disk", cost, cost, 1 / mean, restart),), step=1.0, shape=shape)


@pytest.mark.parametrize("seed", range(30))
def test_the_simulator_loses_what_a_walk_through_the_run_loses(seed):
    random = np.random.default_rng(seed)
    count, step = seed % 3 + 1, random.uniform(0.1, 2)
    levels = [
        Level(str(index), random.uniform(0, 4**index), random.choice([0.0, random.uniform(0, 9)]), 0.02 / 3**index, 4.0)
        for index in range(count)
    ]
    failures = drawn(FailureSetting(tuple(levels), step, random.choice([0.7, 1.0])), events=40, runs=3, seed=seed)
    every = np.cumprod(random.integers(1, 5, (4, count)), axis=1)
    found = simulate(levels, step, every, failures)
    for point, run in np.ndindex(4, 3):
        expected = walked(levels, step, every[point], failures.gaps[:, run], failures.levels[:, run])
        assert found[point, run] == pytest.approx(expected, abs=1e-9)
    assert found.std() > 0.005  # the points differ


def test_a_life_by_hand():
    # Steps of 1 s; every 2 steps a checkpoint of 0.5 s, every 4 one of 1 s more that can be recovered from 2 s later.
    levels = [Level("memory", 0.5, 0.5, 1.0, 3.0), Level("disk", 1.0, 3.0, 1.0, 7.0)]
    # Saves end at 2.5 (2 steps), 5 and 6 (4 steps; from disk at 8), 8.5 (6), 11 and 12 (8; from disk at 14).
    for gap, failed, kept in ((2.4, 0, 0), (2.6, 0, 2), (5.5, 0, 4), (5.5, 1, 0), (7.9, 1, 0), (8.1, 1, 4), (13, 1, 4)):
        failures = Failures(np.array([[gap]]), np.array([[failed]]))
        assert simulate(levels, 1.0, np.array([[2, 4]]), failures) == pytest.approx(1 - kept / gap)
    # After the disk's restart of 7 s the memory has nothing: what the next failure leaves is the disk's again.
    failures = Failures(np.array([[8.1], [9.4]]), np.array([[1], [0]]))
    assert simulate(levels, 1.0, np.array([[2, 4]]), failures) == pytest.approx(1 - 4 / 17.5)


@pytest.mark.parametrize("mean", [60.0, 600.0])
def test_one_level_loses_what_dalys_model_says(mean):
    setting = one(mean=mean)
    failures = drawn(setting, events=4000, runs=32, seed=3)
    expected = mean * math.exp(30 / mean) * math.expm1((70 + 5) / mean)
    assert simulate(setting.levels, 1.0, np.array([[70]]), failures).mean() == pytest.approx(
        1 - 70 / expected, rel=0.02
    )


@pytest.mark.parametrize("shape", [0.7, 1.0])
def test_failures_are_renewals_of_the_mean_and_shape_asked_for(shape):
    setting = cache(HOUR, shape)
    failures = drawn(setting, events=4000, runs=16, seed=1)
    assert failures.gaps.shape == failures.levels.shape == (4000, 16)
    assert failures.gaps.min() >= 0
    assert failures.gaps.mean() == pytest.approx(HOUR, rel=0.02)
    shares = np.bincount(failures.levels.ravel()) / failures.levels.size
    assert shares == pytest.approx([60 / 71, 10 / 71, 1 / 71], rel=0.1)
    alone = drawn(one(shape=shape), events=4000, runs=16, seed=1).gaps
    squared = math.gamma(1 + 2 / shape) / math.gamma(1 + 1 / shape) ** 2
    assert (alone**2).mean() / alone.mean() ** 2 == pytest.approx(squared, rel=0.03)
    assert not np.array_equal(alone[:, 0], alone[:, 1])
    again = drawn(setting, events=4000, runs=16, seed=1)
    assert np.array_equal(failures.gaps, again.gaps)


@pytest.mark.parametrize("setting", [cache(600.0), cache(10 * HOUR), two()])
@pytest.mark.parametrize("factor", [
    1, *(pytest.param(each, marks=pytest.mark.slow) for each in (0.4, 3)),
])  # fmt: skip
def test_the_waste_that_plans_are_made_by_is_the_simulated_one(setting, factor):
    choice = Intervals.planned(setting)
    bottom = max(1, round(choice.every[0] * factor))
    choice = replace(choice, every=tuple(each // choice.every[0] * bottom for each in choice.every))
    steps = {setting.levels[index].name: each for index, each in zip(choice.used, choice.every, strict=True)}
    simulated = choice.waste(setting, drawn(setting, events=4000, runs=24, seed=4)).mean()
    assert waste(setting.levels, steps, setting.step) == pytest.approx(simulated, rel=0.03)


def test_the_setting_of_the_notes_loses_what_they_say():
    # 8.3 % of the time of the steps at saves every 60 s and 35 times as much; 26.5 % with those of 60 s alone
    failures = drawn(two(), events=4000, runs=24, seed=5)
    for choice, percent in ((Intervals((0, 1), (60, 2100)), 8.3), (Intervals((1,), (627,)), 26.5)):
        lost = choice.waste(two(), failures).mean()
        assert 100 * lost / (1 - lost) == pytest.approx(percent, abs=0.3)


def test_the_next_level_up_recovers_what_an_unused_one_would():
    failures = Failures(np.ones((1, 4)), np.array([[0, 1, 2, 3]]))
    assert failures.only((0, 3)).levels.tolist() == [[0, 1, 1, 1]]
    assert failures.only((1, 2, 3)).levels.tolist() == [[0, 0, 1, 2]]
    memory, peer, disk = cache(600.0).levels
    drawn_for_three = drawn(cache(600.0), 200, 4, seed=7)
    merged = FailureSetting((memory, replace(disk, rate=peer.rate + disk.rate)), step=0.5)
    lost = Intervals((0, 2), (17, 170)).waste(cache(600.0), drawn_for_three)
    assert np.array_equal(lost, Intervals((0, 1), (17, 170)).waste(merged, drawn_for_three.only((0, 2))))


def test_the_search_finds_youngs_interval_and_leaves_out_what_does_not_pay():
    rare = one(cost=1.0, mean=5000.0)
    found = optimum(rare, drawn(rare, 800, 16, seed=6), lambda: None, points=5)
    assert found.every[0] == pytest.approx(100, rel=0.3)
    useless = Level("peer", 50.0, 50.0, 1e-5, 30.0)
    both = replace(rare, levels=(useless, *rare.levels))
    assert optimum(both, drawn(both, 300, 8, seed=6), lambda: None, points=5).used == (1,)
    cheap = replace(both, levels=(Level("memory", 0.01, 0.01, 1 / 500, 1.0), *rare.levels))
    assert optimum(cheap, drawn(cheap, 300, 8, seed=6), lambda: None, points=5).used == (0, 1)


def test_the_grid_holds_no_interval_shorter_than_a_checkpoint():
    grid = coarse(cache(600.0), (0, 1, 2))
    assert len(grid) > 50
    assert (grid[:, 0] >= 1).all()
    assert (grid[:, 1] >= 8).all()
    assert (grid[:, 2] >= 60).all()
    assert (grid[:, 1:] % grid[:, :-1] == 0).all()


@pytest.mark.slow
def test_every_row_holds_at_tiny_sizes_and_says_what_was_compared():
    bars = rows(TINY)
    names = ["10h", "10min", "1h", "one-level", "weibull"]
    assert [bar.id for bar in unique(bars, "checkpoint")] == [f"checkpoint.waste-{name}" for name in names]
    for bar in bars:
        found = bar.measure(Deadline())
        assert found.value <= bar.bar if bar.op == "<=" else found.value >= bar.bar, (bar.id, found)
        assert found.value > 0.8
        assert found.note.count("% of all time, at") == 2


def test_intervals_far_off_miss_the_bar():
    setting = cache(HOUR)
    planned = Intervals.planned(setting)
    for bad in (replace(planned, every=tuple(4 * each for each in planned.every)), Intervals((2,), (600,))):
        assert compared(setting, bad, "bad", planned, "ours", TINY).value > 1.1


def test_the_search_ends_at_the_deadline():
    with pytest.raises(OutOfBudget):
        rows(TINY)[0].measure(Deadline(0))
