"""Decisions that all ranks take alike though one alone knows what is wrong; what a lost host needs of the others."""

import pytest
import ranks_apart

from shoestring.testing.pool import Pool


@pytest.fixture(scope="module")
def pool():
    with Pool(2, timeout=60) as ranks:
        yield ranks


@pytest.mark.slow
@pytest.mark.parametrize("at", [100, 5 << 20])  # in the header that one rank tells others of; in a chunk of its own
def test_all_ranks_fall_back_where_one_alone_reads_what_is_damaged(pool, tmp_path, at):
    assert pool.call(ranks_apart.damaged, folder=str(tmp_path), at=at) == [[2, ""]] * 2


def test_the_slot_of_what_the_peers_have_stays_until_they_have_something_newer(pool, tmp_path):
    every = pool.call(ranks_apart.outlived, folder=str(tmp_path))
    assert every == [{"own": [4, 6, 7], "restored": [4, ""]}] * 2


def test_what_is_held_for_others_is_freed_at_the_next_step_when_it_is_called_back(pool, tmp_path):
    every = pool.call(ranks_apart.called_back, folder=str(tmp_path))
    for found in every:
        assert found["before"] == [True, True, 4]
        assert found["after"] == [False, False, 4]  # at a step after which nothing is copied
        assert found["refused"] == [False, False, 4]
        assert any("other processes on this host need the" in line for line in found["said"])


def test_a_copy_that_is_not_what_was_sent_is_no_copy_on_any_rank(pool, tmp_path):
    said = "rank 1 holds a damaged copy of rank 0's state"
    assert pool.call(ranks_apart.copied, folder=str(tmp_path)) == [said] * 2


@pytest.mark.parametrize(
    ("parity", "why"),
    [
        (False, "rank 1 holds a damaged copy of rank 0's state"),
        (True, "data that rank 0 sent to rank 1 arrived damaged"),
    ],
)
def test_checkpoints_to_peers_continue_after_one_that_was_miscopied(pool, tmp_path, parity, why):
    """All ranks drop it, so that none is left in an exchange, and nothing of it is sealed."""
    every = pool.call(ranks_apart.miscopied, folder=str(tmp_path), parity=parity)
    assert [each[:2] for each in every] == [[0, 4]] * 2
    assert every[0][2] == [f"no checkpoints to peers: {why}; earlier ones are intact, and training continues"]


def test_an_exchange_that_a_rank_does_not_come_to_says_what_it_was_for(pool):
    said = pool.call(ranks_apart.abandoned)[0]
    for exchange, error in said.items():
        who = "all ranks" if exchange in ("tell", "least") else "rank 1"
        assert error.startswith(f"waiting for {who}, for writing a checkpoint: ") and "imed out" in error, error
