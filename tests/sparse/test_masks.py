"""Masks keep what an enumeration keeps, and have two of four in every row (and column)."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from oracles import best_row_energy, best_tile_scores, greedy_tile, tiles

from shoestring.core.errors import ConfigError
from shoestring.sparse import masks
from tests import degenerate

WEIGHTS = arrays.arrays(
    "float32",
    st.tuples(st.integers(1, 3).map(lambda n: 4 * n), st.integers(1, 3).map(lambda n: 4 * n)),
    elements=st.floats(-4, 4, width=16),  # of 16 bits, so that many are equal
)


def gaussian(rows=256, columns=256, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@given(WEIGHTS)
def test_row_masks_keep_the_two_largest_of_four(array):
    weight = torch.from_numpy(array)
    mask = masks.row_mask(weight)
    assert mask.dtype == torch.bool
    assert (mask.reshape(-1, 4).sum(1) == 2).all()
    assert torch.equal((weight.double().square() * mask).reshape(-1, 4).sum(1), best_row_energy(weight))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_row_masks_of_any_type_and_number_of_dimensions(dtype):
    weight = gaussian(8, 64).to(dtype)
    mask = masks.row_mask(weight)
    assert torch.equal(masks.row_mask(weight.view(2, 4, 64)).view(8, 64), mask)
    assert torch.equal((weight.double().square() * mask).reshape(-1, 4).sum(1), best_row_energy(weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_two_of_four_are_kept_whatever_they_are_and_nan_first(dtype):
    nan, inf = float("nan"), float("inf")
    groups = degenerate.groups((0.0, -0.0, 1.0, -inf, nan)).to(dtype)
    kept = masks.row_mask(groups)
    assert (kept.sum(1) == 2).all()
    assert (kept & groups.isnan()).sum(1).eq(groups.isnan().sum(1).clamp_max(2)).all()
    ranks = groups.abs().nan_to_num(nan=4, posinf=3)
    assert (torch.where(kept, ranks, 9).amin(1) >= torch.where(kept, -1, ranks).amax(1)).all()
    tile = groups[:400].view(-1, 4)
    for mask in (masks.transposable_mask(tile), masks.transposable_mask(tile, norm="l2")):
        tiles = mask.view(-1, 4, 4)
        assert (tiles.sum(1) == 2).all() and (tiles.sum(2) == 2).all()


def test_of_equal_entries_the_first_are_kept():
    mask = masks.row_mask(torch.tensor([[1.0, -1, 1, 1, 0, 0, 0, 0, 0, 2, -2, 2]]))
    assert mask.int().tolist() == [[1, 1, 0, 0, 1, 1, 0, 0, 0, 1, 1, 0]]


def test_there_are_ninety_patterns():
    patterns = masks.patterns()
    assert patterns.shape == (90, 4, 4)
    assert len({tuple(pattern.flatten().tolist()) for pattern in patterns}) == 90
    assert (patterns.sum(1) == 2).all()
    assert (patterns.sum(2) == 2).all()


@pytest.mark.slow
@given(WEIGHTS, st.sampled_from(["l1", "l2"]))
def test_transposable_masks_keep_most(array, norm):
    weight = torch.from_numpy(array)
    mask = masks.transposable_mask(weight, norm=norm)
    assert (tiles(mask).sum(1) == 2).all()
    assert (tiles(mask).sum(2) == 2).all()
    scores = tiles(weight).abs() if norm == "l1" else tiles(weight).square()
    torch.testing.assert_close((scores * tiles(mask)).sum((1, 2)), best_tile_scores(scores), rtol=1e-6, atol=0)


@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_a_hundred_thousand_gaussian_tiles(norm):
    """More tiles than a block; the benchmark has 10^6."""
    weight = gaussian(1280, 1280).double()
    mask = masks.transposable_mask(weight, norm=norm)
    scores = tiles(weight).abs() if norm == "l1" else tiles(weight).square()
    torch.testing.assert_close((scores * tiles(mask)).sum((1, 2)), best_tile_scores(scores), rtol=1e-12, atol=0)


def test_of_equal_patterns_the_lowest_code_is_taken():
    assert masks.tile_codes(torch.zeros(8, 4)).tolist() == [[0], [0]]
    assert masks.tile_codes(torch.full((4, 4), float("nan"))).tolist() == [[89]]  # and never a code that is none


def test_codes_are_masks():
    codes = torch.arange(90, dtype=torch.uint8).view(9, 10)
    mask = masks.mask_of(codes)
    assert mask.shape == (36, 40)
    assert torch.equal(tiles(mask).bool(), masks.patterns())


def test_the_transpose_of_a_transposable_mask_is_one():
    weight = gaussian(64, 32)
    mask = masks.transposable_mask(weight)
    assert torch.equal((weight * masks.transposable_mask(weight.t()).t()).abs().sum(), (weight * mask).abs().sum())
    masks.require_2_4(masks.prune(weight, mask).t())


@pytest.mark.slow
@given(WEIGHTS)
def test_greedy_masks(array):
    weight = torch.from_numpy(array) + 1e-3 * torch.rand(array.shape, generator=torch.Generator().manual_seed(0))
    for mask, order in ((masks.greedy_mask(weight), weight.abs()), (masks.torch_default_mask(weight), weight)):
        expected = torch.tensor([greedy_tile(tile.tolist()) for tile in tiles(order)])
        assert torch.equal(tiles(mask).bool(), expected)


def test_what_gaussian_weights_keep():
    """The figures that the methods' authors and torch's code imply; the signed default is what must not be used."""
    weight = gaussian(1024, 1024)
    kept = {
        each.__name__: float(masks.kept_energy(weight, each(weight)))
        for each in (masks.row_mask, masks.transposable_mask, masks.greedy_mask, masks.torch_default_mask)
    }
    expected = {"row_mask": 0.868, "transposable_mask": 0.819, "greedy_mask": 0.820, "torch_default_mask": 0.566}
    assert kept == pytest.approx(expected, abs=2e-3)
    crowded = tiles(masks.greedy_mask(weight)).sum((1, 2)) < 8
    assert float(crowded.float().mean()) == pytest.approx(0.156, abs=5e-3)


def test_the_signed_default_drops_large_negative_weights():
    weight = torch.tensor([[-9.0, -8, 1, 2]]).expand(4, 4).contiguous()
    assert masks.prune(weight, masks.row_mask(weight))[0].tolist() == [-9, -8, 0, 0]
    assert masks.prune(weight, masks.torch_default_mask(weight))[0].tolist() == [0, 0, 1, 2]


def test_flip_rate():
    mask = masks.row_mask(gaussian())
    assert float(masks.flip_rate(mask, mask)) == 0
    other = mask.clone()
    other[0, :4] = ~other[0, :4]
    assert float(masks.flip_rate(mask, other)) == pytest.approx(4 / mask.numel())


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float32])
def test_masks_of_numbers_are_refused(dtype):
    """In AST's code for GPT-2, `~mask` of int32 is -1 and -2, and the decay grows all weights."""
    weight = gaussian(4, 4)
    mask = masks.row_mask(weight)
    for use in (masks.prune, masks.kept_energy, lambda _, mask: masks.flip_rate(mask, mask)):
        use(weight, mask)
        with pytest.raises(ConfigError, match="give a bool mask"):
            use(weight, mask.to(dtype))


def test_a_weight_that_is_not_2_4_is_refused():
    """torch packs it into garbage without a word."""
    weight = gaussian(4, 8)
    masks.require_2_4(masks.prune(weight, masks.row_mask(weight)))
    with pytest.raises(ConfigError, match="8 of 8 groups of four weights have more than two"):
        masks.require_2_4(weight)


@pytest.mark.parametrize("make", [masks.row_mask, masks.transposable_mask, masks.greedy_mask, masks.require_2_4])
def test_sizes_that_are_no_multiple_of_four_are_refused(make):
    with pytest.raises(ConfigError, match="a weight of 6 x 6 does not divide into groups of four"):
        make(torch.zeros(6, 6))


def test_tiles_are_of_matrices():
    with pytest.raises(ConfigError, match="has no 4×4 tiles"):
        masks.tile_codes(torch.zeros(4, 4, 4))
