"""Intervals: Daly's own figures, the exact model, all plans there are, and estimates that find the true rates."""

import ast
import itertools
import json
import math
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.checkpoint.tiers import interval
from shoestring.checkpoint.tiers.interval import PRIORS, Level, Rate, Rates, plan, waste
from shoestring.core.errors import ConfigError

MINUTE, HOUR = 60.0, 3600.0


def level(name="disk", cost=1.0, every=HOUR, duration=0.0, restart=0.0):
    """A level there for failures that come `every` so many seconds."""
    return Level(name, cost, duration, 1 / every, restart)


def named(*levels):
    return [replace(each, name=str(number)) for number, each in enumerate(levels)]


# -- rates ------------------------------------------------------------------------------------------------------------


def test_a_rate_is_the_guess_at_first_and_what_was_seen_soon():
    assert {name: 1 / rate.mean / HOUR for name, rate in PRIORS.items()} == pytest.approx(
        {"process": 4, "host": 24, "all": 240}
    )
    for rate in PRIORS.values():
        for factor in (10, 0.1):  # that much more often and more seldom than guessed
            true = rate.mean * factor
            assert 1 / 2 < rate.after(5, 5 / true).mean / true < 2
    assert Rate(2.0, 30.0).after(3, 20.0) == Rate(5.0, 50.0)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1000)), max_size=6), st.randoms())
def test_the_order_in_which_failures_are_seen_does_not_matter(seen, shuffled):
    other = shuffled.sample(seen, len(seen))
    one, another = Rate(0.5, 100.0), Rate(0.5, 100.0)
    for (a, b), (c, d) in zip(seen, other, strict=True):
        one, another = one.after(a, b), another.after(c, d)
    assert one == another == Rate(0.5, 100.0).after(sum(k for k, _ in seen), sum(t for _, t in seen))


def test_time_without_failures_counts_for_all_classes_and_a_failure_for_its_own():
    rates = Rates({"process": Rate(1.0, 10.0), "host": Rate(1.0, 100.0)})
    rates.observe(30.0, process=3)
    rates.observe(60.0)
    assert (rates["process"], rates["host"]) == (4 / 100, 1 / 190)


def test_rates_are_kept_exactly_and_a_new_class_keeps_its_guess():
    rates = Rates()
    rates.observe(1234.5, process=2, all=1)
    state = json.loads(json.dumps(rates.state_dict()))
    fresh = Rates({**PRIORS, "rack": Rate(0.5, 1e6)})
    fresh.load_state_dict(state)
    assert fresh.state_dict() == {**rates.state_dict(), "rack": [0.5, 1e6]}
    rates.observe(1.0)
    assert fresh["process"] == PRIORS["process"].after(2, 1234.5).mean  # the state is a copy


def test_rates_refuse_what_cannot_be():
    with pytest.raises(ConfigError, match="no class of failures `rack`"):
        Rates().observe(1.0, rack=1)
    for failures, seconds in ((-1, 1.0), (0, -1.0), (0, math.nan)):
        with pytest.raises(ConfigError, match="cannot have seen"):
            Rate(0.5, 1.0).after(failures, seconds)
    for a, b in ((0.0, 1.0), (1.0, 0.0), (math.nan, 1.0), (1.0, math.inf)):
        with pytest.raises(ConfigError, match="positive"):
            Rate(a, b)
    with pytest.raises(ConfigError, match="positive"):
        Rates().load_state_dict({"process": [-1.0, 5.0]})


COSTS = {"process": (0.05, 0.2, 5.0), "host": (0.3, 4.0, 20.0), "all": (2.0, 30.0, 60.0)}


def excess(rates, true):
    """How much more than at the best plan is lost with failures at the `true` rates where `rates` are believed."""

    def levels(believed):
        return [Level(name, cost, late, believed[name], restart) for name, (cost, late, restart) in COSTS.items()]

    best, taken = (plan(levels(each), 0.5) for each in (true, rates))
    return waste(levels(true), taken, 0.5) / waste(levels(true), best, 0.5) - 1


@pytest.mark.parametrize("factor", [12, 1 / 12])
def test_planning_while_failures_come_in_approaches_the_plan_at_the_true_rates(factor):
    true = {name: rate.mean * factor for name, rate in PRIORS.items()}
    found = {0: [], 5: [], 20: [], 160: []}
    for seed in range(20):
        draw, rates = random.Random(seed), Rates()
        for seen in range(161):
            if seen in found:
                found[seen].append(excess(rates, true))
            wait, first = min((draw.expovariate(rate), name) for name, rate in true.items())
            rates.observe(wait, **{first: 1})
    means = [fmean(each) for each in found.values()]
    assert means[0] > 0.5  # far off at first
    assert means[1] < 0.6 * means[0]
    assert means[2] < 0.4 * means[0]
    assert means[3] < 0.05
    assert max(found[160]) < 0.1


# -- one level --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mean_hours", "minutes"), [(24, 117), (6, 57), (0.25, 9.1)])
def test_one_level_has_the_interval_of_dalys_figures(mean_hours, minutes):
    # Figures 3 to 5 of Daly 2006: checkpoints of 5 minutes, restarts of 10
    one = level(cost=5 * MINUTE, every=mean_hours * HOUR, restart=10 * MINUTE)
    assert one.young_daly / MINUTE == pytest.approx(minutes, abs=0.5 if minutes > 10 else 0.05)
    assert plan([one], 1.0)["disk"] / MINUTE == pytest.approx(minutes, rel=0.04)


def test_without_end_of_means_between_failures_young_is_right():
    one = level(cost=1.0, every=1e8)
    assert one.young_daly == pytest.approx(math.sqrt(2 * 1e8), rel=1e-3)
    assert plan([one], 1.0)["disk"] == pytest.approx(math.sqrt(2 * 1e8), rel=0.02)


def test_a_checkpoint_that_takes_longer_than_the_time_between_failures_is_made_once_in_that_time():
    assert level(cost=250.0, every=100.0).young_daly == 100.0
    near = [level(cost=cost, every=100.0).young_daly for cost in (199.999, 200.001)]
    assert near == pytest.approx([100.0, 100.0], rel=0.12)


@pytest.mark.parametrize("every", [10 * MINUTE, HOUR, 100 * HOUR])
def test_the_waste_of_one_level_is_dalys_model(every):
    one = level(cost=8.0, every=every, duration=8.0, restart=25.0)
    for steps in (20, 100, 300):
        expected = every * math.exp(25 / every) * math.expm1((steps + 8) / every)
        assert waste([one], {"disk": steps}, 1.0) == pytest.approx(1 - steps / expected, rel=1e-3)


# -- several levels ---------------------------------------------------------------------------------------------------


def test_where_failures_are_rare_the_waste_is_the_first_order_formula():
    levels = named(
        level(cost=0.1, every=1e5, duration=0.3, restart=4.0),
        level(cost=0.7, every=9e5, duration=5.0, restart=15.0),
        level(cost=6.0, every=8e6, duration=60.0, restart=90.0),
    )
    work = {"0": 80.0, "1": 800.0, "2": 8000.0}
    steps = {name: round(seconds / 0.5) for name, seconds in work.items()}
    first = sum(
        each.cost / work[each.name] + each.rate * (work[each.name] / 2 + each.restart + each.duration - each.cost)
        for each in levels
    )
    assert waste(levels, steps, 0.5) == pytest.approx(first, rel=0.01)


def test_the_setting_of_the_notes():
    # checkpoints of 0.5 and 60 s, failures every 1 and 10 h, restarts of 5 and 120 s: 60 s and 35 times it, 7.7 % lost
    levels = [level("memory", 0.5, HOUR, restart=5.0), level("disk", 60.0, 10 * HOUR, 60.0, restart=120.0)]
    steps = plan(levels, 1.0)
    assert steps["memory"] == pytest.approx(60, rel=0.05)
    assert steps["disk"] / steps["memory"] == pytest.approx(35, rel=0.05)
    assert waste(levels, steps, 1.0) == pytest.approx(0.083 / 1.083, rel=0.03)
    assert waste(levels, {"disk": 627}, 1.0) == pytest.approx(0.265 / 1.265, rel=0.03)


def random_levels(draw, number):
    """Levels whose best intervals are a few steps of one second, in all proportions and with binding durations."""
    for name in range(number):
        cost = math.exp(draw.uniform(math.log(0.02), math.log(5))) * draw.choice([1, 4**name])
        interval = math.exp(draw.uniform(math.log(0.8), math.log(14))) * draw.choice([1, 1.5, 2.5]) ** name
        duration, restart = draw.choice([0.0, cost, 3 * cost, draw.uniform(0, 10)]), draw.uniform(0, 50)
        yield Level(str(name), cost, duration, min(0.02, 2 * cost / interval**2), restart)


def nests(levels, step, longest):
    """All intervals in steps at which each level's is a multiple of the one below and no checkpoint meets the next."""
    if not levels:
        yield {}
        return
    *lower, top = levels
    for below in nests(lower, step, longest):
        unit = max(below.values(), default=1)
        for steps in range(unit, longest + 1, unit):
            if steps * step >= top.duration:
                yield {**below, top.name: steps}


def least(levels, step, longest):
    """The waste of the best plan of all, and its longest interval."""
    *lower, top = levels
    chosen = itertools.chain.from_iterable(itertools.combinations(lower, number) for number in range(len(levels)))
    return min(
        (waste(levels, steps, step), max(steps.values()))
        for below in chosen
        for steps in nests([*below, top], step, longest)
    )


@pytest.mark.slow
def test_no_plan_is_better():
    draw, compared = random.Random(0), []
    for _ in range(150):
        levels = list(random_levels(draw, draw.choice([1, 2, 3])))
        if levels[-1].duration > 40:
            continue
        found, longest = least(levels, 1.0, 60)
        if longest < 45:  # else the best one may be longer than those compared
            steps = plan(levels, 1.0)
            assert waste(levels, steps, 1.0) <= found * (1 + 1e-3), levels
            compared.append(tuple(steps))
    assert len(compared) > 100
    assert len(set(compared)) == 7  # every selection of up to three levels was the best one somewhere


times = st.floats(0, 100)
anything = st.lists(st.builds(level, st.just(""), times, st.floats(200, 1e7), times, times), min_size=1, max_size=4)


@settings(max_examples=60)
@given(anything, st.floats(0.01, 100))
def test_a_plan_is_nested_allowed_and_no_worse_than_its_neighbours(levels, step):
    levels = named(*levels)
    steps = plan(levels, step)
    order = [each for each in levels if each.name in steps]
    assert list(steps) == [each.name for each in order]
    assert order[-1] == levels[-1]
    assert all(type(each) is int and each >= 1 for each in steps.values())
    assert all(longer % shorter == 0 for shorter, longer in itertools.pairwise(steps.values()))
    assert all(steps[each.name] * step >= each.duration * (1 - 1e-6) for each in order)
    lost = waste(levels, steps, step)
    assert 0 <= lost <= 1
    for each in order[:-1]:
        assert lost <= waste(levels, {name: count for name, count in steps.items() if name != each.name}, step) * (
            1 + 1e-3
        )
    for factor in (2, 3):
        assert lost <= waste(levels, {name: factor * count for name, count in steps.items()}, step) * (1 + 1e-3)


def test_a_level_that_does_not_pay_is_left_out_and_its_failures_fall_to_the_next():
    memory, disk = level("memory", 0.05, HOUR, restart=5.0), level("disk", 10.0, 50 * HOUR, restart=5.0)
    dear = level("peer", 9.0, 10 * HOUR, restart=5.0)
    assert set(plan([memory, dear, disk], 1.0)) == {"memory", "disk"}
    both = replace(disk, rate=disk.rate + dear.rate)
    assert plan([memory, dear, disk], 1.0) == plan([memory, both], 1.0)
    steps = {"memory": 20, "disk": 600}
    assert waste([memory, dear, disk], steps, 1.0) == waste([memory, both], steps, 1.0)
    assert set(plan([memory, replace(dear, cost=0.5), disk], 1.0)) == {"memory", "peer", "disk"}


def test_the_highest_level_stays_where_it_pays_least():
    dear = level("disk", 1000.0, 1000 * HOUR, restart=500.0)
    steps = plan([level("memory", 0.01, HOUR), dear], 1.0)
    assert set(steps) == {"memory", "disk"}
    assert steps["disk"] > 10_000


def test_a_slow_level_is_saved_no_faster_than_it_takes_and_others_follow():
    fast = level("memory", 0.01, 10 * MINUTE)
    slow = level("disk", 0.01, 10 * MINUTE, duration=500.0)
    assert plan([slow], 0.3)["disk"] == 1667
    steps = plan([fast, slow], 0.3)
    assert steps["disk"] * 0.3 >= 500
    assert steps["memory"] < 30
    assert plan([level(cost=0.0, duration=2.1)], 0.3)["disk"] == 7  # and not 8: 2.1 / 0.3 is 7.000000000000001


def test_work_done_while_a_checkpoint_is_under_way_counts_as_lost():
    slow, at_once = level(cost=1.0, duration=61.0), level(cost=1.0, duration=1.0)
    steps = {"disk": 200}
    assert waste([slow], steps, 1.0) - waste([at_once], steps, 1.0) == pytest.approx(60 / HOUR, rel=0.1)


def test_hopeless_levels_have_a_plan_too():
    steps = plan(named(level(cost=1e4, every=1.0), level(cost=1e6, every=1.0, restart=1e6)), 1e3)
    assert all(each >= 1 for each in steps.values())
    assert waste(named(level(cost=1e4, every=1.0)), {"0": 1}, 1e3) == pytest.approx(1.0)


def test_what_cannot_be_planned_is_refused():
    good = level("disk")
    for levels, step in (([], 1.0), ([good, good], 1.0), ([good], 0.0), ([good], math.nan), ([good], math.inf)):
        with pytest.raises(ConfigError, match="cannot plan"):
            plan(levels, step)
    for name in ("cost", "duration", "restart", "rate"):
        for value in (-1.0, math.nan, math.inf):
            with pytest.raises(ConfigError, match="finite"):
                replace(good, **{name: value})
    with pytest.raises(ConfigError, match="positive rate"):
        replace(good, rate=0.0)


def test_the_waste_of_what_is_no_plan_is_refused():
    levels = [level("memory"), level("disk")]
    for steps, what in (
        ({"memory": 5}, "must contain `disk`"),
        ({"disk": 5, "peer": 1}, "and only levels from"),
        ({"memory": 5, "disk": 12}, "12 steps are not a multiple of 5"),
        ({"memory": 5, "disk": 0}, "0 steps"),
        ({"memory": 0, "disk": 5}, "0 steps"),
    ):
        with pytest.raises(ConfigError, match=what):
            waste(levels, steps, 1.0)


# -- everywhere the same ----------------------------------------------------------------------------------------------


def test_only_arithmetic_that_rounds_alike_everywhere_decides():
    # e^x and powers come from the C library, in whose versions their last bit differs
    tree = ast.parse(Path(interval.__file__).read_text())
    used = {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "math"
    }
    assert used <= {"sqrt", "ceil", "inf"}
    assert not any(isinstance(node, ast.Pow) for node in ast.walk(tree))


def test_intervals_need_no_torch():
    told = "import shoestring.checkpoint.tiers.interval, sys; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_a_level_that_is_not_used_is_paid_by_those_whose_checkpoints_go_through_it():
    memory, disk = level("memory", cost=2.0, every=HOUR), level("disk", cost=0.0, every=100 * HOUR)
    free, paid = [memory, disk], [replace(memory, through=True), disk]
    alone = {"disk": 5}
    assert waste(free, alone, 1.0) < waste(paid, alone, 1.0)
    both = level("disk", cost=2.0, every=HOUR / (1 + 1 / 100))
    assert waste(paid, alone, 1.0) == pytest.approx(waste([both], alone, 1.0))
    assert plan(free, 1.0) == {"disk": 1}  # as if a checkpoint to disk took no copy
    assert plan(paid, 1.0)["disk"] > 30
