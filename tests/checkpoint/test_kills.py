"""Ranks killed with SIGKILL, at named points and at random moments, and started again."""

import random
from dataclasses import replace

import pytest

from tests.rigs.checkpointing import kills
from tests.rigs.checkpointing.trainee import REPLAYED, FaultyRun, finished, run
from tests.shares import share

pytestmark = pytest.mark.slow
POINTS, RANDOM = share(15, 6), share(10, 5)  # of each of the two tests; benchmarks/checkpoint kills thousands


@pytest.fixture(params=["ddp", pytest.param("fsdp", marks=pytest.mark.all_cases), REPLAYED])
def task(request, tmp_path):
    return FaultyRun(folder=str(tmp_path / "task"), under=request.param)


def test_a_killed_run_resumes_bitwise_from_what_was_safe(task):
    draw = random.Random(task.under)
    expected = kills.undisturbed(task)
    assert len(expected.points) >= 40
    assert kills.forgotten(task.place) == []  # a run that has ended leaves nothing in memory
    outcome = kills.at_points(task, draw.sample(sorted(expected.points), POINTS), expected, draw)
    assert outcome.wrong == () and outcome.kills >= 0.7 * POINTS  # some points are passed once, and asked for thrice
    outcome = kills.at_random(task, RANDOM, expected, draw)
    assert outcome.wrong == () and outcome.kills == RANDOM


def test_another_end_is_noticed(task):
    """The fault that the comparison is for: a run that does not resume from where it was."""
    expected = kills.undisturbed(task)
    shorter = replace(task, steps=task.steps - 1)
    assert run(replace(shorter, folder=str(kills.fresh(task.place))))
    assert finished(shorter).digests != expected.digests
