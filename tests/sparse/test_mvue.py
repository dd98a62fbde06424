"""Estimates of gradients: at most two of four, unbiased, of least variance, and each group by a number of its own."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from shoestring.sparse.mvue import draw_key, mvue, uniforms
from tests import degenerate

GROUPS = arrays.arrays("float64", st.tuples(st.integers(1, 9), st.integers(1, 3)), elements=st.floats(-4, 4, width=16))
DRAWS = 400_000


def key(seed=0, call=0):
    return draw_key(seed, torch.tensor(call))


@given(GROUPS, st.integers(0, 2**40))
def test_at_most_two_of_four_are_left(array, call):
    x = torch.from_numpy(array)
    estimate = mvue(x, key(call=call))
    assert estimate.shape == x.shape
    assert estimate.isfinite().all()
    for group in estimate.split(4):
        assert ((group != 0).sum(0) <= 2).all()
    assert torch.equal(estimate.sign() * x.sign(), estimate.sign().abs())  # no sign turns, and no zero grows


@pytest.mark.parametrize("place", range(4))
def test_small_entries_beside_a_large_one(place):
    """Their sum vanishes from that of all four; beside a gradient of 1, those of 1e-10 share one place."""
    x = torch.full((4, 1), 1e-10)
    x[place], x[place - 1] = 1.0, 2e-10
    draws = mvue(x.expand(4, 65536).contiguous(), key())
    assert ((draws != 0).sum(0) == 2).all()
    assert (draws[place] == 1).all()
    assert draws.mean(1) == pytest.approx(x[:, 0], rel=0.03)


def test_no_draw_keeps_a_third_entry(monkeypatch):
    """At the largest number there is, sums round up to the next whole one."""
    x = torch.randn(4096, 64, generator=torch.Generator().manual_seed(6)).abs()
    largest = torch.full((1024, 64), 1 - 2.0**-24)
    monkeypatch.setattr("shoestring.sparse.mvue.uniforms", lambda *_: largest)
    assert ((mvue(x, key()) != 0).unflatten(0, (-1, 4)).sum(1) <= 2).all()


@given(arrays.arrays("float64", 4, elements=st.floats(0.25, 4, width=16)))
def test_variance_is_the_least_there_is(array):
    """Σ x² / p is least, over probabilities of at most 1 that add up to 2, where |x| / p is one number wherever p < 1,
    and no larger than |x| where p is 1 (the conditions of Karush, Kuhn and Tucker)."""
    x = torch.from_numpy(array)
    kept = mvue(x[:, None].expand(4, 4096).contiguous(), key()).amax(1)  # |x| / p
    assert float((x / kept).sum()) == pytest.approx(2)
    certain = kept <= x * (1 + 1e-9)
    levels = kept[~certain]
    assert levels.tolist() == pytest.approx(levels[:1].tolist() * len(levels))
    assert (x[certain] * (1 + 1e-9) >= levels.amax(0) if len(levels) else torch.tensor(True)).all()


def test_unbiased():
    """|z| < 4 for each of 16 entries over 4e5 draws; a factor 1.01 or a probability of another entry shows."""
    x = torch.randn(16, 1, generator=torch.Generator().manual_seed(1))
    draws = mvue(x.expand(16, DRAWS).contiguous(), key(seed=7)).double()
    spread = draws.std(1) / DRAWS**0.5

    def unbiased(draws):
        return ((draws.mean(1) - x[:, 0].double()).abs() <= 4 * spread + 1e-6).all()

    assert unbiased(draws)
    assert not unbiased(1.01 * draws)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_unbiased_where_entries_are_zero_one_equal_or_tiny(dtype, monkeypatch):
    """The mean over all random numbers, on a grid of them, of every group of such entries; in fp64."""
    x, grid = degenerate.groups().to(dtype), 512
    numbers = (torch.arange(grid) + 0.5) / grid
    monkeypatch.setattr(
        "shoestring.sparse.mvue.uniforms", lambda key, groups, columns, first: numbers[:, None].expand(groups, columns)
    )
    draws = mvue(x.t().repeat(grid, 1), key()).unflatten(0, (grid, 4))
    assert ((draws != 0).sum(1) <= 2).all()
    exact, unit = x.t().double(), x.abs().double().sort(1).values[:, :3].sum(1).clamp_min(torch.finfo(dtype).tiny)
    off = (draws.double().mean(0) - exact).abs()
    assert (off <= 2 * torch.maximum(exact.abs(), unit) / grid).all()  # an entry's two ends lie between two numbers


@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-24])
def test_no_entry_is_kept_twice_at_the_ends_of_the_random_numbers(u, monkeypatch):
    x = degenerate.groups()
    monkeypatch.setattr(
        "shoestring.sparse.mvue.uniforms", lambda key, groups, columns, first: torch.full((groups, columns), u)
    )
    draws, unit = mvue(x.t().contiguous(), key()).t(), x.abs().sort(1).values[:, :3].sum(1, keepdim=True)
    assert (draws.abs() <= torch.maximum(x.abs(), unit.clamp_min(2.0**-126))).all()


def test_relative_variance_of_gaussians():
    """0.4735, the least there is; a sequential draw, as in the reference of T-SR-STE, has 0.502."""
    x = torch.randn(DRAWS, 8, generator=torch.Generator().manual_seed(2))
    relative = (mvue(x, key()) - x).square().sum() / x.square().sum()
    assert float(relative) == pytest.approx(0.4735, abs=3e-3)


def test_no_two_groups_share_a_number():
    """Of 2^20 groups all words differ, which random numbers of 32 bits would not; in the reference, some are equal."""
    numbers = uniforms(key(), 1024, 1024)
    assert len((numbers * 2**24).long().unique()) > 2**20 * 0.96  # of 24 bits, as many as 2^20 draws hit
    assert numbers.double().mean() == pytest.approx(0.5, abs=2e-3)


def test_groups_are_uncorrelated():
    draws = torch.stack([uniforms(key(call=call), 16, 32).flatten() for call in range(2048)]).double()
    correlation = torch.corrcoef(draws.T)
    off = correlation[~torch.eye(len(correlation), dtype=torch.bool)]
    assert float(off.abs().max()) < 6 / 2048**0.5
    assert float(off.std()) == pytest.approx(2048**-0.5, rel=0.02)


def test_calls_and_seeds_are_uncorrelated():
    draws = [uniforms(key(seed, call), 64, 1024).flatten() for seed in range(8) for call in range(8)]
    correlation = torch.corrcoef(torch.stack(draws).double())
    assert float((correlation - torch.eye(64)).abs().max()) < 6 / 65536**0.5


def test_a_key_is_a_function_of_seed_and_call():
    keys = {tuple(key(seed, call).tolist()) for seed in range(64) for call in range(64)}
    assert len(keys) == 4096


@pytest.mark.parametrize("cut", [4, 12])
def test_ranks_draw_what_one_process_draws(cut):
    x = torch.randn(32, 5, generator=torch.Generator().manual_seed(3))
    parts = [mvue(x[:cut], key()), mvue(x[cut:], key(), first=cut // 4)]
    assert torch.equal(torch.cat(parts), mvue(x, key()))
    assert not torch.equal(mvue(x[cut:], key()), parts[1])


def test_scale_does_not_change_a_draw():
    """Gradients are divided by another count on several ranks, or scaled for fp16."""
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(4))
    assert torch.equal(mvue(x * 2**-20, key()), mvue(x, key()) * 2**-20)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_types(dtype):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(5)).to(dtype)
    estimate = mvue(x, key())
    assert estimate.dtype == dtype
    assert torch.equal(estimate != 0, mvue(x.float(), key()) != 0)
