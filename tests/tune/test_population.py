"""Populations: who is replaced by a fork of whom, with which settings, and that a fork continues its parent's state."""

import json
import math

import numpy as np
import pytest

from benchmarks.tune import toy_worker
from benchmarks.tune.toy_trial import advance
from shoestring.tune.population import Fork, bandit, next_move, perturb, scores_of
from shoestring.tune.settings import Population
from shoestring.tune.space import Dimension
from shoestring.tune.store import Store, TrialLease, connect

FOUR = Population(size=4, every=10, method="pbt")
SPACE = (
    Dimension("a.f", "float", 0.0, 1.0),
    Dimension("a.i", "int", 1, 9),
    Dimension("a.c", "choice", choices=("x", "y", "z")),
)


def member(number, rung=0, state="paused", x=0.5, **more):
    return TrialLease(number + 1, number, 1, "w", state, {"a.f": x}, rung=rung, **more)


def move_of(trials, values):
    """The next move where each trial has these values at its comparisons."""
    reports = {
        trial.trial: {FOUR.step(trial.forked + at): value for at, value in enumerate(values[trial.number])}
        for trial in trials
    }
    return next_move(trials, scores_of(trials, reports, FOUR, 1), FOUR, np.random.default_rng(0))


def test_the_worst_makes_room_for_a_fork_of_the_best_and_the_others_continue():
    trials = [member(number) for number in range(4)]
    values = {0: [4.0], 1: [1.0], 2: [2.0], 3: [3.0]}
    assert move_of(trials, values) == Fork(trials[0], trials[1])
    assert move_of(trials, values | {0: [1.5]}) == trials[0]
    assert move_of(trials, values | {0: [math.nan]}) == Fork(trials[0], trials[1])


def test_one_that_ended_before_it_could_pause_has_no_checkpoint_to_fork():
    trials = [member(0), member(1, state="done"), member(2), member(3)]
    values = {0: [4.0], 1: [1.0, 1.0], 2: [2.0], 3: [3.0]}
    assert move_of(trials, values) == trials[0]
    trials[1] = member(1, rung=1, state="done")
    assert move_of(trials, values) == Fork(trials[0], trials[1])


def test_the_member_furthest_behind_goes_first():
    trials = [member(0, rung=1), member(1, rung=0), member(2, rung=1), member(3, state="held")]
    values = {0: [1.0, 1.0], 1: [2.0], 2: [3.0, 3.0], 3: []}
    assert move_of(trials, values) == trials[1]


def test_a_member_that_few_others_were_before_continues():
    trials = [member(0), *(member(number, state="held") for number in (1, 2, 3))]
    assert move_of(trials, {0: [9.0], 1: [], 2: [], 3: []}) == trials[0]


def test_a_fork_is_judged_from_its_first_own_comparison():
    trials = [member(number, rung=1) for number in range(3)]
    trials += [member(3, state="pruned"), member(4, rung=1, parent=1, forked=1)]
    values = {0: [4.0, 2.0], 1: [1.0, 1.0], 2: [2.0, 2.0], 3: [9.0], 4: [5.0]}
    assert move_of(trials, values) == trials[0]
    ahead = [member(number, rung=2, state="held") for number in (1, 2)]
    assert move_of([*ahead, trials[4]], values) == Fork(trials[4], ahead[0])


def test_changed_settings_stay_in_the_space():
    chance = np.random.default_rng(0)
    values = {"a.f": 0.9, "a.i": 9, "a.c": "z"}
    seen = [perturb(SPACE, values, FOUR, chance) for _ in range(200)]
    assert all(0.0 <= each["a.f"] <= 1.0 and 1 <= each["a.i"] <= 9 for each in seen)
    assert {each["a.c"] for each in seen} == {"x", "y", "z"}
    assert {type(each["a.i"]) for each in seen} == {int}
    kept = perturb(SPACE, values, Population(size=4, every=1, resample=0.0), chance)
    assert kept["a.f"] in (pytest.approx(0.72), 1.0)


def test_the_bandit_takes_what_has_helped_and_a_running_member_moves_it():
    """The objective falls most for settings near 0.8."""
    chance = np.random.default_rng(0)
    trials = [member(number, x=x) for number, x in enumerate(np.linspace(0, 1, 8))]
    scores = {t.number: {0: 5.0, 1: 4.0 + 4 * (t.parameters["a.f"] - 0.8) ** 2} for t in trials}
    chosen = bandit(SPACE[:1], {"a.f": 0.1}, trials, scores, 1, FOUR, chance)["a.f"]
    assert abs(chosen - 0.8) < 0.2
    running = member(8, state="held", x=chosen)
    again = bandit(SPACE[:1], {"a.f": 0.1}, [*trials, running], scores | {8: {}}, 1, FOUR, chance)["a.f"]
    assert abs(again - chosen) > 1e-3


def test_a_member_is_replaced_once(tmp_path):
    store = Store(connect(f"sqlite:///{tmp_path / 'a.db'}"), "s")
    store.create({})
    for number in range(2):
        store.add(number + 1, number, {}, 2)
        store.give_back(store.take("w", 60.0), state="paused")
    seen, parent = store.trials()
    assert store.fork(seen, parent, 3, 2, {"x": 1})
    assert not store.fork(seen, parent, 4, 3, {"x": 2})
    assert store.promote(seen, "w", 60.0) is None
    ended, _, fork = store.trials()
    assert (ended.state, ended.note) == ("pruned", "replaced by trial 2")
    assert (fork.state, fork.parent, fork.rung, fork.forked) == ("ready", 1, 1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["pbt", "pb2"])
def test_a_population_runs_to_its_end_and_forks_continue_their_parents(tmp_path, method):
    steps, every = 60, 15
    url = f"sqlite:///{tmp_path / 'store.db'}"
    schedule = Population(size=4, every=every, method=method)
    worker = toy_worker.build(url, tmp_path, 4, 20.0, steps, 0.01, schedule=schedule)
    worker.run()
    trials = {trial.number: trial for trial in worker.store.trials()}
    done = [trial for trial in trials.values() if trial.state == "done"]
    forks = [trial for trial in trials.values() if trial.parent >= 0]
    assert len(done) == 4 and forks and len(trials) == 4 + len(forks)
    for trial in done:
        assert trial.value == lineage_value(tmp_path, trials, trial, steps)
    attributes = {each.number: each.user_attrs.get("parent") for each in worker.proposer.study.get_trials()}
    assert all(attributes[fork.number] == fork.parent for fork in forks)


def lineage_value(folder, trials, trial, until):
    """What the recurrence gives with the settings of a trial and of those that it descends from."""
    step, state = 0, 1.0
    if trial.parent >= 0:
        path = toy_worker.kept(folder, trial.parent, trial.forked - 1)
        step = json.loads(path.read_text())[0]
        state = lineage_value(folder, trials, trials[trial.parent], step)
    for at in range(step + 1, until + 1):
        state = advance(state, trial.parameters["toy.x"], at)
    return state


@pytest.mark.slow
def test_nothing_starts_when_the_budget_of_hours_is_used_up_and_the_best_ends(tmp_path):
    url = f"sqlite:///{tmp_path / 'store.db'}"
    worker = toy_worker.build(
        url, tmp_path, 0, 20.0, 30, 0.005, schedule=Population(size=3, every=10), hours=0.2 / 3600
    )
    worker.run()
    trials = worker.store.trials()
    assert [trial.state for trial in trials].count("done") == 1
    assert all(trial.state in ("done", "pruned") for trial in trials)
    assert sum(trial.seconds for trial in trials) >= 0.2
