"""How runs of local steps end: all replicas together, equal, and without losing a step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
import merging
from by_hand import Replicas, apart, train

from shoestring.checkpoint import Plain
from shoestring.comm import DiLoCo, LocalSGD, SparseLoCo
from shoestring.core.compose import compose
from shoestring.core.errors import NonFiniteError
from shoestring.core.job import Job
from shoestring.core.task import cross_entropy
from shoestring.core.world import World
from shoestring.testing import Pool, jobs
from shoestring.testing.scenarios import encode

WHOLE = LocalSGD(every=10, delay=8, late_merge="mix", own_weight=1.0)
GROWING = LocalSGD(every=4, final_every=9, fragments=2, delay=3, late_merge="mix", own_weight=1.0)


@pytest.mark.parametrize(("feature", "steps", "stop", "last"), [
    (WHOLE, 17, 0, 17),
    pytest.param(WHOLE, 18, 0, 18, marks=pytest.mark.slow),
    pytest.param(WHOLE, 19, 0, 19, marks=pytest.mark.slow),
    pytest.param(WHOLE, 40, 15, 28, marks=pytest.mark.slow),
    pytest.param(GROWING, 17, 0, 17, marks=pytest.mark.slow),
    (GROWING, 40, 15, 18),  # what is sent after step 15 carries the vote, and arrives three steps later
])  # fmt: skip
def test_no_step_is_lost_at_the_end(pool: Pool, feature: LocalSGD, steps: int, stop: int, last: int) -> None:
    """An exchange that begins after step 10 is merged after step 18: the run ends before that, with it, or after it.

    With `own_weight` 1 a merge leaves replicas as they are, so what remains is the mean of replicas that trained alone.
    """
    results = train(pool, feature, steps=steps, stops={"1": stop} if stop else None)
    assert [result["step"] for result in results] == [last, last]
    replicas = Replicas(2)
    for number in range(last):
        replicas.step(number)
    mean = torch.tensor([replicas.flat(rank) for rank in range(2)], dtype=torch.float64).mean(0).tolist()
    assert all(apart(result["weights"][-1], mean) < 1e-12 for result in results)


@pytest.mark.parametrize(("feature", "last"), [
    (DiLoCo(every=3), 3),
    (DiLoCo(every=4, fragments=2), 2),
    (DiLoCo(every=4, fragments=2, delay=1), 3),
])  # fmt: skip
def test_one_vote_stops_all_at_a_merge_and_what_is_left_is_equal(pool: Pool, feature: Any, last: int) -> None:
    one, other = train(pool, feature, steps=12, stops={"1": 2})
    assert one["step"] == other["step"] == last
    assert one["digests"][-1] == other["digests"][-1]


@pytest.mark.slow
def test_a_loss_that_is_nan_on_one_replica_ends_all_of_them_together(pool: Pool, tmp_path: Path) -> None:
    """Also where something else makes the ranks meet in between: a checkpoint after every step."""
    arguments: dict[str, Any] = {"steps": 9, "poison": {"1": 2}, "folder": str(tmp_path)}
    one, other = train(pool, Plain(every=1, keep=9), DiLoCo(every=4), **arguments)
    assert other["said"].startswith("the loss became nan at step 2 (hint")
    assert one["said"].startswith("rank 1 had no finite loss at step 2 (hint")
    assert one["step"] == other["step"] == 3
    assert len(merging.saves(str(tmp_path))) == 3  # none has what is not finite
    rest = train(pool, Plain(every=1), DiLoCo(every=4), steps=9, folder=str(tmp_path), resume=str(tmp_path))
    assert rest[0]["digests"][-1] == rest[1]["digests"][-1] and not rest[0]["said"]


def test_a_replica_alone_ends_at_once() -> None:
    def poisoned(output: Any, batch: Any) -> tuple[Tensor, Tensor]:
        total, count = cross_entropy(output, batch)
        return total * torch.nan, count

    job = Job(jobs.tiny(), loss=poisoned, optimizer=jobs.sgd(), world=World())
    with compose(job, [DiLoCo(every=3)]), pytest.raises(NonFiniteError, match="the loss became nan at step 1"):
        job.step(jobs.batch(0))


def test_weights_that_are_nan_in_a_loop_of_ones_own_end_all(pool: Pool) -> None:
    for result in pool.call(merging.foreign, features=[encode(SparseLoCo(every=3))], steps=6, poison=2):
        assert result["said"].startswith("the weights or buffers of rank 1 are not finite")
