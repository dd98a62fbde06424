"""Ok-Topk: what owners sum, what is kept, and how little travels."""

from __future__ import annotations

from functools import partial

import pytest
import sparse_ranks as contract
import torch
from hypothesis import given
from hypothesis import strategies as st
from sparse_ranks import gradients, mean

from shoestring.comm.codecs.lockstep import run_lockstep
from shoestring.comm.codecs.oktopk import OkTopKCodec, _spread, balance_regions
from shoestring.comm.codecs.topk import TopKCodec, select_exact, select_of_few

VARIANTS = [
    partial(OkTopKCodec, 0.05),
    partial(OkTopKCodec, 0.02, wire="bf16"),
    partial(OkTopKCodec, 0.5, slack=1.0),
    partial(OkTopKCodec, 0.0),
]


@pytest.mark.parametrize("make", VARIANTS)
class TestContract(contract.Contract, contract.ConservingContract):
    pass


def test_by_hand():
    """Two ranks, regions of two entries, one entry a rank and region."""
    grads = [{"w": torch.tensor([5.0, 1, 0, 4])}, {"w": torch.tensor([-4.0, 7, 2, 3])}]
    codecs = [OkTopKCodec(0.5, slack=1.0), OkTopKCodec(0.5, slack=1.0)]
    run_lockstep(codecs, grads)
    assert grads[0]["w"].tolist() == grads[1]["w"].tolist() == [0, 3.5, 0, 2]
    assert codecs[0].state["residual"]["w"].tolist() == [5, 1, 0, 0]  # 5 was sent, and not among the largest sums
    assert codecs[1].state["residual"]["w"].tolist() == [-4, 0, 2, 3]


def test_one_rank_is_top_k():
    mine, other = gradients(0, ranks=1), gradients(0, ranks=1)
    run_lockstep([OkTopKCodec(0.05)], mine)
    run_lockstep([TopKCodec(0.05)], other)
    assert all(torch.equal(mine[0][name], other[0][name]) for name in mine[0])


def test_at_density_one_it_is_the_average():
    grads = gradients(0)
    expected = mean(grads)
    run_lockstep([OkTopKCodec(1.0) for _ in grads], grads)
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad.double(), expected[name], rtol=1e-6, atol=1e-5)


@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=8).filter(any),
    ranks=st.integers(1, 9),
    data=st.data(),
)
def test_boundaries_are_a_partition(sizes, ranks, data):
    hits = data.draw(st.lists(st.integers(0, 10**6), min_size=len(sizes), max_size=len(sizes)))
    bounds = balance_regions([hit if size else 0 for hit, size in zip(hits, sizes, strict=True)], sizes, ranks)
    assert len(bounds) == ranks + 1
    assert bounds[0] == 0
    assert bounds[-1] == sum(sizes)
    assert bounds == sorted(bounds)


def test_boundaries_share_the_hits():
    assert balance_regions([0, 0], [600, 600], 3) == [0, 400, 800, 1200]
    bounds = balance_regions([3200, 0], [1000, 9000], 2)
    assert 500 < bounds[1] < 560  # half of what is in the first parameter, and a little for all the others


def test_regions_adapt_to_layers_of_different_size():
    """Nearly all large entries are in a small layer: at first only its owner's share gets through."""
    codecs, through = [OkTopKCodec(0.02) for _ in range(4)], []
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        grads = [
            {"low": torch.randn(9000, generator=generator), "high": 50 * torch.randn(1000, generator=generator)}
            for _ in codecs
        ]
        run_lockstep(codecs, grads, step)
        through.append(int((grads[0]["high"] != 0).sum()))
    assert through[0] <= 50  # k / P
    assert min(through[2:]) > 150  # of k = 200


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_bytes(ranks):
    """Less than the paper's 6 k (P - 1) / P words, and nearly independent of the ranks."""
    n, k = 400_000, 4000
    grads = [{"w": torch.randn(n, generator=torch.Generator().manual_seed(rank))} for rank in range(ranks)]
    traffic = run_lockstep([OkTopKCodec(k / n) for _ in range(ranks)], grads)
    assert len(traffic.stages) == OkTopKCodec.stages
    sent = traffic.sent(ranks)
    assert sent < 0.6 * 4 * 6 * k * (ranks - 1) / ranks
    values = 4 * 2.25 * k * (ranks - 1) / ranks
    assert values < sent < values * 1.5


def test_what_a_message_has_no_room_for_is_the_least():
    """All three selected entries are in the first region, and room is for two."""
    grads = [{"w": torch.tensor([5.0, 7, 6, 0, 0, 1])} for _ in range(2)]
    codecs = [OkTopKCodec(0.5, slack=1.0) for _ in grads]
    run_lockstep(codecs, grads)
    assert grads[0]["w"].tolist() == [0, 7, 6, 0, 0, 0]
    assert codecs[0].state["residual"]["w"].tolist() == [5, 0, 0, 0, 0, 1]


def test_padding_is_never_added_twice_at_one_place():
    """Which a GPU would do one after the other; nothing is added there, and what is sent stays where it was."""
    indices, values = torch.tensor([[3, 5, 9, 9, 9], [11, 12, 19, 19, 19]]), torch.tensor([[1.0, 2, 0, 0, 0]] * 2)
    spread = _spread(indices, values, 20)
    assert torch.equal(spread[values != 0], indices[values != 0])
    assert spread[values == 0].unique().numel() == 6
    assert _spread(indices, values, 4)[values == 0].max() < 4


@pytest.mark.parametrize("k", [1, 90, 100, 130, 1000])
def test_the_largest_of_few_are_the_largest(k):
    x = torch.zeros(1000)
    x[torch.randperm(1000, generator=torch.Generator().manual_seed(k))[:100]] = torch.arange(100) - 50.5
    found = select_of_few(x, k)
    assert torch.equal(found, found.unique()) and len(found) == k
    assert torch.equal(x[found].abs().sort().values, x[select_exact(x, k)].abs().sort().values)


def test_hits_are_counted_by_parameter():
    """A parameter's hits are its entries in the last sums, and half of those before."""
    codecs, counts = [OkTopKCodec(0.05) for _ in range(3)], dict.fromkeys(contract.SHAPES, 0.0)
    for step in range(5):
        grads = gradients(step)
        run_lockstep(codecs, grads, step)
        counts = {name: counts[name] // 2 + int((grads[0][name] != 0).sum()) for name in counts}
        assert {name: float(hits) for name, hits in codecs[2].state["hits"].items()} == counts
