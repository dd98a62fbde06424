"""An owner of SHARD that runs the micro-batches of a step itself: here two stages of a model on two ranks."""

from __future__ import annotations

import pipeline_ranks
import pytest

from shoestring.core.errors import ConflictError
from shoestring.core.feature import Seam
from shoestring.core.job import attachments_of
from shoestring.testing import Pool


@pytest.fixture(scope="module")
def pool():
    with Pool(2, timeout=100) as pool:
        yield pool


@pytest.mark.parametrize("accumulate", [1, 4])
def test_two_stages_compute_what_one_process_does(pool, accumulate):
    alone = pipeline_ranks.train(accumulate=accumulate)
    stages = pool.call(pipeline_ranks.train, accumulate=accumulate)
    for stage in stages:
        assert stage["losses"] == pytest.approx(alone["losses"], rel=1e-12)
        assert stage["held_out"] == pytest.approx(alone["held_out"], rel=1e-12)
        assert (stage["tokens"], stage["clipped"]) == (alone["tokens"], 3)
    weights = stages[0]["weights"] | stages[1]["weights"]
    assert weights == pytest.approx(alone["weights"], abs=1e-12) and len(stages[0]["weights"]) < len(weights)


def test_a_stage_without_a_loss_may_stop_all_and_refuses_with_them(pool):
    assert {len(stage["losses"]) for stage in pool.call(pipeline_ranks.train, accumulate=2, stop_at=1)} == {2}
    assert set(pool.call(pipeline_ranks.poisoned)) == {"the loss became nan at step 1; weights as before: True"}


def test_micro_batches_are_run_by_one_owner():
    attachments = attachments_of(pipeline_ranks.build([]))
    attachments.attaching = "a.pipeline", Seam.SHARD
    attachments.shard(over=(), run=lambda micro: None)
    attachments.attaching = "another.one", Seam.SHARD
    with pytest.raises(ConflictError, match=r"`a\.pipeline` and `another\.one` both own how micro-batches are run"):
        attachments.shard(over=(), run=lambda micro: None)
