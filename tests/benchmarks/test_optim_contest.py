"""How the contests of optimizers look for settings, on runs whose outcome is known."""

import math
from pathlib import Path

import pytest

from benchmarks.optim import images, text
from shoestring.optim import AdamW, Muon, ScheduleFree
from shoestring.run import parse


class Known(images.Contest):
    """A run gets there in `least` steps at a rate of 0.4, and later at others."""

    target = 0.8
    least = 150

    def run(self, method, lr, batch, length, seed):
        total, apart = images.steps_of(batch, length), abs(math.log2(lr / 0.4))
        needed = self.least * (1 + apart**2)
        looks = range(total // 2, total + 1, images.looks_every(batch, length))
        found = {str(step): 0.8 if step >= needed else 0.7 - apart / 50 + length / 100 for step in looks}
        self.asked.append((lr, batch, length, seed))
        return {"accuracies": found}


@pytest.fixture
def contest():
    made = Known(Path())
    made.asked = []
    return made


@pytest.mark.parametrize("batch", images.BATCHES)
def test_the_best_rate_is_found_and_runs_as_long_as_it_needs(contest, batch):
    rate, length = contest.tuned("nesterov", batch)
    assert rate == pytest.approx(0.4, rel=0.2)
    assert all(steps < 1.1 * contest.least for steps in contest.fresh("nesterov", batch))
    assert images.steps_of(batch, length) < 2 * contest.least or length == images.LENGTHS[0]


def test_every_method_has_as_many_trials_at_a_batch_and_never_on_a_seed_that_counts(contest):
    for batch in images.BATCHES:
        contest.tuned("nesterov", batch)
        trials = {(lr, length) for lr, of, length, seed in contest.asked if of == batch}
        assert len(trials) == images.TRIALS
    assert {seed for *_, seed in contest.asked} == {images.TUNING_SEED}


def test_what_never_gets_there_ends_at_the_longest_run(contest):
    contest.least = 10**6
    assert contest.tuned("nesterov", 1024)[1] == images.LENGTHS[-1]
    assert contest.fresh("nesterov", 1024) == [None] * 3


def test_every_optimizer_of_the_contest_on_text_is_one_of_a_run_file():
    found = [parse(text.run_file(method, 1e-3, 1.0, 1), name="contest") for method in text.METHODS]
    for run, optimizer in zip(found, (AdamW, Muon, ScheduleFree), strict=True):
        assert sum(isinstance(feature, AdamW | Muon | ScheduleFree) for feature in run.features) == 1
        assert any(isinstance(feature, optimizer) for feature in run.features)
