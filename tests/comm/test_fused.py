"""Selection and error feedback in one pass: the same as in many, and the kernel does what torch's operations do."""

from __future__ import annotations

from functools import partial

import fused_kernel_checks
import pytest
import sparse_ranks as contract
import torch
from sparse_ranks import RANKS, gradients

from shoestring.comm.codecs import fused
from shoestring.comm.codecs.dgc import DGCCodec
from shoestring.comm.codecs.fused import WeightedSum, keep_largest
from shoestring.comm.codecs.lockstep import run_lockstep
from shoestring.comm.codecs.topk import TopKCodec, select_entries

VARIANTS = [
    partial(TopKCodec, 0.05),
    partial(TopKCodec, 0.05, selection="sampled", wire="bf16"),
    partial(TopKCodec, 0.02, selection="sampled", wire="int4", per_layer=True),
    partial(DGCCodec, 0.05, nesterov=True),
    partial(DGCCodec, 0.01, selection="sampled", warmup=10, wire="bf16"),
]


@pytest.fixture
def fusing(monkeypatch) -> list[int]:
    """By the fused path, with what the kernel must do in its place; the numbers of entries that it took."""
    counts = []

    def take(terms: WeightedSum, threshold: torch.Tensor, room: int) -> fused.Taken:
        taken = fused_kernel_checks.take_by_torch(terms, threshold, room)
        counts.append(len(taken.indices))
        return taken

    monkeypatch.setattr(fused, "is_available", lambda device: True)
    monkeypatch.setattr(fused, "take_entries", take)
    return counts


@pytest.mark.parametrize("make", VARIANTS)
def test_both_ways_select_deliver_and_owe_the_same(make, request):
    """Over steps in which a layer's entries are all equal, or zero: no threshold is below the right number of them."""

    def run() -> list[torch.Tensor]:
        codecs, found = [make() for _ in range(RANKS)], []
        for step in range(8):
            grads = gradients(step)
            for each in grads:
                each["long"].fill_(step - 3.0)
            run_lockstep(codecs, grads, step)
            found += [each.clone() for each in grads[0].values()]
        return [*found, *(tensor for of_kind in codecs[1].state.values() for tensor in of_kind.values())]

    plain = run()
    counts = request.getfixturevalue("fusing")
    for one, other in zip(plain, run(), strict=True):
        assert torch.equal(one, other)
    assert max(counts) > 0


@pytest.mark.parametrize("make", VARIANTS)
def test_the_fused_path_keeps_the_contract(make, fusing):
    contract.assert_untouched_when_given_up(make)
    contract.assert_exposes(make, "matrix", 39)
    assert fusing


@pytest.mark.parametrize(("n", "k", "levels"), [(20_000, 200, 8), (100_000, 2000, 10**6), (2**20, 105, 10**6)])
def test_exact_selection_hardly_ever_takes_too_few(n, k, levels, fusing):
    """Of values of few bits, as gradients in bf16 are: many are equal to the threshold. And by a small sample."""
    for seed in range(40):
        g = torch.randn(n, generator=torch.Generator().manual_seed(seed)).mul(levels).round().div(levels)
        expected = keep_largest(g, k)
        indices, _ = select_entries(WeightedSum(g, torch.zeros_like(g)), k, "exact")
        assert torch.equal(indices, expected)
    assert min(fusing) >= k


@pytest.mark.parametrize("threshold", [0.0, 5.0])
def test_a_threshold_that_lets_too_many_or_too_few_through_is_not_used(threshold, fusing):
    g, e, _ = fused_kernel_checks.drawn(1000, "cpu")
    M = g + e
    assert fused.pick_entries(WeightedSum(g, e), 20, torch.tensor(threshold), largest=False) is None
    assert torch.equal(g, M)
