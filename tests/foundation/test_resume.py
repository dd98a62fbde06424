"""Resuming from a checkpoint: bit for bit on equal ranks, with exactly the right samples when their number changes."""

import json
from itertools import chain
from pathlib import Path

import pytest
import scenarios
import toy

from shoestring.core.world import World
from shoestring.data.loader import Loader


@pytest.mark.parametrize(
    ("workers", "accumulate"),
    [(1, 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((0, 1), (0, 2), (1, 1)))],
)
def test_one_rank_resumes_bit_for_bit(tmp_path, workers, accumulate):
    options = {"workers": workers, "accumulate": accumulate}
    through = scenarios.whole(World(), tmp_path / "through", {}, **options)
    again = scenarios.whole(World(), tmp_path / "again", {}, resume=scenarios.save(tmp_path / "through", 4), **options)
    check(json.loads(json.dumps(through)), json.loads(json.dumps(again)))


@pytest.mark.slow
@pytest.mark.parametrize("case", [f"{s} workers={w} accumulate={a}" for s, w, a in scenarios.CASES])
def test_two_ranks_resume_bit_for_bit(two_ranks, case):
    check(**two_ranks["resumes"][case])


def check(through, again):
    assert list(again["losses"]) == ["5", "6", "7", "8", "9", "10"]
    assert again["losses"] == {step: loss for step, loss in through["losses"].items() if int(step) > 4}
    assert again["save"] == through["save"]
    assert len(through["save"]) > 40  # weights and both averages


@pytest.mark.slow
def test_other_ranks_see_exactly_the_samples_that_are_left(two_ranks):
    parts = two_ranks["changing"]
    assert [[len(rank) for rank in part] for part in parts] == [[4, 4], [4, 0], [2, 2]]
    steps = [sorted(chain(*ids)) for part in parts for ids in zip(*[rank for rank in part if rank], strict=True)]
    seen = list(chain(*steps))
    assert [len(step) for step in steps] == [8] * 10
    assert sorted(seen[: toy.SAMPLES]) == list(range(toy.SAMPLES))  # the first epoch: six steps
    assert len(set(seen[toy.SAMPLES :])) == 80 - toy.SAMPLES  # the second: none twice
    through = Loader(toy.samples(), batch=8, seed=3)
    assert steps == [sorted(through.ids(8 * step, 8).tolist()) for step in range(10)]


def test_a_checkpoint_of_another_model_is_refused_by_name(two_ranks):
    said = two_ranks["refused"]
    assert "step-00000004.safetensors` does not fit this run's model" in said and "head.weight" in said


def test_another_learning_rate_is_taken_on_resume(tmp_path):
    scenarios.whole(World(), tmp_path / "first", {})
    rates = {}
    for name, schedule in (("constant", {}), ("scheduled", {"schedule": {"warmup": 2, "shape": "constant"}})):
        area = {"optim": {"adamw": {"lr": 0.001}} | schedule}
        scenarios.whole(World(), tmp_path / name, area, resume=scenarios.save(tmp_path / "first", 4))
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        rates[name] = {row["lr"] for row in rows}
    assert rates == {"constant": {0.001}, "scheduled": {0.001}}


def test_dropout_draws_differ_between_seeds_and_are_repeated_for_one(tmp_path):
    losses = [
        scenarios.whole(World(), tmp_path / str(number), {}, seed=seed)["losses"]
        for number, seed in enumerate((3, 3, 4))
    ]
    assert losses[0] == losses[1] != losses[2]


def test_the_loader_of_a_run_leaves_no_process(tmp_path):
    before = children()
    scenarios.whole(World(), tmp_path / "run", {}, workers=1)
    assert children() == before


def children() -> set[str]:
    tasks = Path("/proc/self/task")
    return set(chain(*((task / "children").read_text().split() for task in tasks.iterdir())))
