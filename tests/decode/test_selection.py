"""The running threshold against the exact quantile, and its independence of how a batch is divided."""

import math

import pytest
import torch

from shoestring.decode import selection
from shoestring.decode.selection import RunningThreshold

CPU = torch.device("cpu")


def scores(seed: int, count: int = 20_000) -> torch.Tensor:
    """Of all sizes and both signs, as divergences are."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator) * torch.randn(count, generator=generator).exp() ** 2


def after(threshold, *parts, counted=None):
    for part in parts:
        threshold.select(part, torch.ones(len(part), dtype=torch.bool) if counted is None else counted)
    threshold.settle(None)
    return threshold


@pytest.mark.parametrize("fraction", [0.05, 0.4, 0.9])
def test_the_threshold_is_the_quantile_of_the_step_before(fraction):
    chosen = after(RunningThreshold(fraction, CPU), scores(1))
    exact = float(scores(1).quantile(1 - fraction))
    assert float(chosen.threshold) == pytest.approx(exact, rel=0.02, abs=1e-4)
    share = chosen.select(scores(2), torch.ones(20_000, dtype=torch.bool)).float().mean()
    assert float(share) == pytest.approx(fraction, abs=0.015)


def test_all_tokens_count_in_the_first_step_and_where_the_fraction_is_1():
    whole = torch.ones(9, dtype=torch.bool)
    everything = after(RunningThreshold(1.0, CPU), scores(1))
    for threshold in (RunningThreshold(0.1, CPU), everything):
        assert threshold.select(torch.arange(-4.0, 5), whole).all()


def test_micro_batches_give_the_bits_of_one_batch():
    one = after(RunningThreshold(0.3, CPU), scores(1))
    several = after(RunningThreshold(0.3, CPU), *scores(1).flip(0).split([1, 7000, 12999]))
    assert torch.equal(one.threshold, several.threshold) and torch.equal(one.running, several.running)


def test_tokens_that_do_not_count_are_neither_noted_nor_selected():
    counted = torch.arange(20_000) % 2 == 0
    high = torch.where(counted, scores(1), 500.0)
    masked = after(RunningThreshold(0.5, CPU), high, counted=counted)
    alone = after(RunningThreshold(0.5, CPU), scores(1)[counted])
    assert torch.equal(masked.threshold, alone.threshold)
    assert not masked.select(high, counted)[~counted].any()


def test_it_follows_scores_that_fall():
    threshold = RunningThreshold(0.4, CPU)
    for step in range(30):
        after(threshold, scores(step).abs() * 0.8**step)
    share = threshold.select(scores(30).abs() * 0.8**30, torch.ones(20_000, dtype=torch.bool)).float().mean()
    assert 0.3 < float(share) < 0.4


def test_bins_and_their_edges_are_inverse():
    numbers = torch.arange(1, selection.BINS)
    edges = selection._edge(numbers)
    inside = selection._bin(edges + (edges.abs() + selection.UNIT) * 1e-4)
    assert torch.equal(inside, numbers)
    assert (edges.diff() > 0).all() and edges[selection.BINS // 2 - 1] == 0
    extreme = selection._bin(torch.tensor([-math.inf, -1e9, 1e9, math.inf]))
    assert extreme.tolist() == [0, 0, selection.BINS - 1, selection.BINS - 1]


def test_its_state_continues_it():
    threshold, other = after(RunningThreshold(0.3, CPU), scores(1)), RunningThreshold(0.3, CPU)
    other.load_state_dict({name: tensor.clone() for name, tensor in threshold.state_dict().items()})
    assert torch.equal(after(threshold, scores(2)).threshold, after(other, scores(2)).threshold)
