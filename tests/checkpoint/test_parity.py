"""Parity: a lost part comes out again, whatever its length, whoever holds the others."""

import pytest
from parity_ranks import gathers, rebuilds

from shoestring.checkpoint.tiers.peer_copies import _STRIDE
from shoestring.collectives import HEAD
from shoestring.testing.pool import Pool

EACH = {"0": 0, "1": 1, "2": 2, "3": 3}


@pytest.fixture(scope="module")
def pool():
    with Pool(4) as pool:
        yield pool


@pytest.mark.parametrize("lost", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("lengths", [
    [2 * _STRIDE + 5, _STRIDE, 3, 2 * _STRIDE],
    [100, 0, 7, 50],
    pytest.param([3 * _STRIDE] * 4, marks=pytest.mark.slow),
    pytest.param([9 * _STRIDE + 5, 8 * _STRIDE, 3, 9 * _STRIDE], marks=pytest.mark.slow),
])  # fmt: skip
def test_a_lost_part_is_rebuilt_from_the_others(pool, tmp_path, lengths, lost):
    holders = {rank: holder for rank, holder in EACH.items() if holder != lost}
    assert all(pool.call(rebuilds, folder=str(tmp_path), lengths=lengths, lost=lost, holders=holders, builder=lost))


@pytest.mark.parametrize("builder", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_holders_of_several_parts_rebuild_too(pool, tmp_path, builder):
    lengths = [2 * _STRIDE, _STRIDE + 1, _STRIDE, _STRIDE]
    holders = {"0": 0, "2": 3, "3": 0}
    assert all(pool.call(rebuilds, folder=str(tmp_path), lengths=lengths, lost=1, holders=holders, builder=builder))


@pytest.mark.parametrize("lengths", [[0, 0, 0, 0], [HEAD, 0, 7, 1], [HEAD + 1, 0, 7, 1], [3, 9 * HEAD, 5 * HEAD, 1]])
def test_what_is_gathered_is_whole(pool, lengths):
    assert all(pool.call(gathers, lengths=lengths))
