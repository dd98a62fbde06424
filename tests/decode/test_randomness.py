"""Random numbers by key: their distribution, their independence, and the race that draws a token."""

import math
from functools import cache

import pytest
import torch

from shoestring.decode.randomness import Purpose, as_tensor, exponentials, key, race, race_of_tensors, uniform

CPU = torch.device("cpu")
P = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625], dtype=torch.float64)


def g_statistic(counts, p):
    """Twice the log-likelihood ratio of `counts` against p: chi-squared of V - 1 degrees of freedom under p."""
    expected = p * counts.sum()
    return float(2 * (counts * (counts / expected).clamp(min=1e-300).log()).sum())


@cache
def draws(p, seed=0):
    keys = [key(seed, Purpose.TEXT, position) for position in range(100_000)]
    return torch.tensor(race(p.expand(len(keys), -1), keys))


@pytest.mark.slow
def test_a_race_draws_from_the_distribution_and_a_small_fault_would_show():
    """99.99% quantile of chi-squared with 4 degrees of freedom: 23.5."""
    counts = torch.bincount(draws(P), minlength=5).double()
    assert g_statistic(counts, P) < 23.5
    fault = (P**0.96) / (P**0.96).sum()  # a temperature that is 4% off
    assert g_statistic(torch.bincount(draws(fault), minlength=5).double(), P) > 23.5


@pytest.mark.slow
def test_tokens_of_neighbouring_positions_and_seeds_are_independent():
    one, other = draws(P), draws(P, seed=1)
    both = P[:, None] * P
    for first, second in ((one[:-1], one[1:]), (one, other)):
        counts = torch.bincount(first * 5 + second, minlength=25).double()
        assert g_statistic(counts, both.flatten()) < 60.1  # 99.99% quantile, 24 degrees of freedom


def test_numbers_are_exponential_and_do_not_depend_on_which_tokens_are_asked_for():
    keys = as_tensor([key(3, Purpose.TEXT, 7)], CPU)
    numbers = exponentials(keys, torch.arange(100_000))
    assert float(numbers.mean()) == pytest.approx(1, abs=0.015)
    assert float((numbers > 2).double().mean()) == pytest.approx(math.exp(-2), abs=0.005)
    assert torch.equal(exponentials(keys, torch.tensor([99_999, 5])), numbers[:, [99_999, 5]])


def test_few_possible_tokens_are_the_same_race_as_the_whole_vocabulary():
    p = torch.zeros(50, 1000, dtype=torch.float64)
    p[:, 100:110] = 0.1
    keys = [key(0, Purpose.TEXT, position) for position in range(50)]
    whole = (p / exponentials(as_tensor(keys, CPU), torch.arange(1000))).argmax(-1)
    assert race(p, keys) == whole.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_native_race_is_the_one_of_torch(dtype):
    generator = torch.Generator().manual_seed(0)
    for scale in (0.1, 1.0, 8.0):  # nearly uniform to nearly certain
        logits = scale * torch.randn(2000, 257, generator=generator, dtype=dtype)
        p = logits.masked_fill(logits < -scale, -math.inf).softmax(-1)
        keys = [key(int(scale * 10), Purpose.DRAFT, position) for position in range(len(p))]
        assert race(p, keys) == race_of_tensors(p, keys)
        assert race(p, keys) != race_of_tensors(p, keys[::-1])


def test_an_impossible_token_never_wins():
    p = torch.tensor([0.0, 1e-30, 0.0]).expand(1000, -1)
    assert set(race(p, [key(0, Purpose.TEXT, position) for position in range(1000)])) == {1}


@pytest.mark.slow
def test_two_distributions_that_share_numbers_often_agree():
    other = torch.tensor([0.4, 0.2, 0.2, 0.1, 0.1], dtype=torch.float64)
    distance = float((P - other).abs().sum() / 2)
    agree = float((draws(P) == draws(other)).double().mean())
    assert (1 - distance) / (1 + distance) - 0.01 <= agree <= 1 - distance + 0.01


def test_every_part_of_a_key_matters():
    keys = {
        key(seed, purpose, position, start)
        for seed in (0, 1, 2**62)
        for purpose in Purpose
        for position in range(10)
        for start in range(10)
    }
    assert len(keys) == 3 * 4 * 10 * 10
    assert 0 < uniform(0, Purpose.ACCEPTANCE, 0) < 1
