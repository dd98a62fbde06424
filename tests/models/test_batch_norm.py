"""Batch norms under several ranks and under accumulation: each micro-batch is normalised by itself, whoever has it."""

import batch_norm_ranks
import pytest
import torch
from pytest import approx

from shoestring.testing.suite import shared


@pytest.fixture(scope="module")
def ranks(request):
    one = [batch_norm_ranks.trained()]
    return {1: one, 2: shared(request.config)["pool"].call(batch_norm_ranks.trained)}


@pytest.mark.parametrize("count", [1, 2])
def test_micro_batches_are_normalised_one_by_one_and_the_first_rank_s_statistics_count(ranks, count):
    weights, running, held_out = batch_norm_ranks.by_hand(count)
    for rank in ranks[count]:
        for found, wanted in zip(rank["weights"], weights, strict=True):
            torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), wanted.detach())
        for found, wanted in zip(rank["running"], running, strict=True):
            torch.testing.assert_close(torch.tensor(found).double(), wanted.double(), atol=1e-6, rtol=1e-6)
        assert rank["held_out"] == approx(held_out, rel=1e-9)


def test_weights_are_the_same_whether_ranks_or_accumulation_make_up_the_batch(ranks):
    for one, two in zip(ranks[1][0]["weights"], ranks[2][0]["weights"], strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(two), atol=1e-6, rtol=1e-6)


def test_an_evaluation_brings_other_ranks_to_the_first_one_s_statistics(ranks):
    first, second = ranks[2]
    assert first["before"] != second["before"]
    assert first["running"] == second["running"] == first["before"]
