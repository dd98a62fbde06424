"""Ranks killed under torchrun, whose agent starts them again; and what the judge of such runs notices."""

import json
import random
from dataclasses import replace

import pytest

from tests.rigs.checkpointing.torchrun_kills import run, went_back
from tests.rigs.checkpointing.trainee import FaultyRun, finished, fresh, say


def test_a_start_that_goes_back_before_what_was_safe_is_noticed(tmp_path):
    task = FaultyRun(folder=str(fresh(tmp_path / "task")))
    for rank, line in ((0, [6, 4, 0]), (1, [6, 5, 0]), (0, [7, 9, 1])):  # what the start says itself comes after
        say(task, rank, "safe", json.dumps(line))
    for line in ([0, 0], [1, 4]):
        say(task, 0, "starts", json.dumps(line))
    assert list(went_back(task)) == ["start 1 resumed from step 4, step 5 was safe"]


@pytest.mark.slow
@pytest.mark.parametrize(("under", "local"), [("ddp", 2), pytest.param("fsdp", 1, marks=pytest.mark.all_cases)])
def test_a_run_killed_under_torchrun_ends_as_if_nothing_had_been(tmp_path, under, local):
    task = FaultyRun(folder=str(tmp_path / "task"), under=under, local=local, mass=16 << 20, steps=60)
    assert run(task, 0, random.Random(0)) == (0, [])
    expected = finished(task).digests
    kills, wrong = run(task, 2, random.Random(1))
    assert kills > 0 and wrong == [] and finished(task).digests == expected


@pytest.mark.slow
def test_a_run_does_not_end_before_it_was_struck(tmp_path):
    task = FaultyRun(folder=str(tmp_path / "task"), steps=2)

    class Late(random.Random):
        """Its kills wait for the run to train, and then for longer than it does."""

        def random(self):
            return 0.0

        def uniform(self, a, b):
            return 1.5

    assert run(task, 1, Late(0)) == (1, [])


@pytest.mark.slow
def test_a_start_that_fails_by_itself_is_noticed(tmp_path):
    failing = replace(FaultyRun(folder=str(tmp_path / "task")), victim=1, point="after forward", count=3)
    kills, (first, second) = run(failing, 0, random.Random(0))
    assert first == "2 starts after 0 kills: one failed by itself" and second.startswith("torchrun ended with 1: ")
    assert kills == 0
