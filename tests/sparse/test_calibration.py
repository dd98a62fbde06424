"""The search for a decay factor: cohorts of rows, their flips, and the factor between those that were tried."""

import logging

import pytest
import torch

from shoestring.sparse.calibration import AIM, Search, interpolated
from shoestring.sparse.product import pack, unpack

FACTORS = [1e-4, 1e-3, 1e-2]


def test_the_factor_lies_where_the_ratio_is_the_aim():
    factor, ratio = interpolated(FACTORS, [1.0, 0.9, 0.7])
    assert (factor, ratio) == (pytest.approx(10**-2.5), AIM)


def test_a_ratio_that_rises_again_counts_as_its_predecessor():
    assert interpolated(FACTORS, [1.0, 0.6, 0.9])[0] == pytest.approx(10**-3.5)


@pytest.mark.parametrize(("ratios", "expected"), [([0.5, 0.4, 0.3], (1e-4, 0.5)), ([1.2, 1.1, 0.99], (1e-2, 0.99))])
def test_beyond_what_was_tried_the_last_one_is_taken(ratios, expected):
    assert interpolated(FACTORS, ratios) == pytest.approx(expected)


def test_cohorts_are_rows_of_tiles_in_turn():
    search = Search(16, 1e-3)
    cohorts = search.cohorts(80, torch.device("cpu"))
    assert cohorts[:12].tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert torch.bincount(cohorts[:72]).tolist() == [8] * 9
    factors = search.factors_of_rows(80, torch.device("cpu"))
    assert factors[0] == 0 and factors[16] == pytest.approx(1e-3)


def simulated(search, flip_rates, steps):
    """Masks of 72 rows whose bits flip at a rate that differs between cohorts."""
    generator = torch.Generator().manual_seed(0)
    rates = torch.tensor(flip_rates, dtype=torch.float64)[search.cohorts(72, torch.device("cpu"))]
    mask = torch.zeros(72, 2048, dtype=torch.bool)
    for step in range(steps):
        mask = mask ^ (torch.rand(72, 2048, generator=generator, dtype=torch.float64) < rates[:, None])
        used = search.see("layer", pack(mask), step)
    return mask, used


def test_ratios_are_flip_rates_over_those_of_dense_rows(caplog):
    search = Search(16, 1e-3)
    expected = [1.1, 1.0, 0.95, 0.9, 0.7, 0.5, 0.3, 0.1]
    mask, used = simulated(search, [0.05, *(0.05 * each for each in expected)], 16)
    assert search.ratios() == pytest.approx(expected, rel=0.1)
    with caplog.at_level(logging.INFO, "shoestring"):
        assert 1e-3 < search.found() < 10**-2.5
    assert "masks flip 0.80 times as often as in dense training" in caplog.text
    dense = search.cohorts(72, torch.device("cpu")) == 0
    assert torch.equal(unpack(used, 2048)[~dense], mask[~dense])
    assert unpack(used, 2048)[dense].all()


def test_without_flips_the_given_factor_stays(caplog):
    search = Search(16, 1e-3)
    simulated(search, [0.0] * 9, 16)
    assert search.found() == 1e-3
    assert "no mask changed" in caplog.text


def test_there_is_no_search_without_an_end_or_a_factor():
    assert Search.over(0, 0.05, 1e-3) is None
    assert Search.over(100, 0.0, 1e-3) is None
    assert Search.over(100, 0.05, 0.0) is None
    assert Search.over(101, 0.05, 1e-3).steps == 6


def test_a_search_that_resumes_ends_as_one_that_did_not():
    whole, first, second = Search(16, 1e-3), Search(16, 1e-3), Search(16, 1e-3)
    masks = [pack(torch.rand(72, 64, generator=torch.Generator().manual_seed(step)) < 0.5) for step in range(16)]
    for step, mask in enumerate(masks):
        whole.see("layer", mask, step)
        (first if step < 9 else second).see("layer", mask, step)
        if step == 8:
            second.load_state_dict(first.state_dict())
    assert second.ratios() == whole.ratios()
