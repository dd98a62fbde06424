"""Top-k: what is selected, what is kept, and what travels."""

from __future__ import annotations

import math
from functools import partial

import pytest
import sparse_ranks as contract
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_ranks import gradients, mean

from shoestring.comm.codecs.flat import count_entries
from shoestring.comm.codecs.fused import keep_largest
from shoestring.comm.codecs.lockstep import run_lockstep
from shoestring.comm.codecs.topk import (
    TopKCodec,
    decode_values,
    encode_values,
    select_exact,
    select_mstopk,
    select_sampled,
)

VARIANTS = [
    partial(TopKCodec, 0.05),
    partial(TopKCodec, 0.05, selection="sampled", wire="bf16"),
    partial(TopKCodec, 0.05, selection="mstopk", wire="int8"),
    partial(TopKCodec, 0.02, wire="int4", per_layer=True),
    partial(TopKCodec, 0.3, selection="mstopk", wire="int2"),
    partial(TopKCodec, 0.0),
]


@pytest.mark.parametrize("make", VARIANTS)
class TestContract(contract.Contract, contract.ConservingContract):
    pass


def vector(seed: int, n: int, kind: str) -> torch.Tensor:
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed))
    return {"normal": x, "heavy": x**5, "ties": x.round(), "few": x * (x > 2), "zeros": 0 * x}[kind]


KINDS = st.sampled_from(["normal", "heavy", "ties", "few", "zeros"])


@given(seed=st.integers(0, 2**20), n=st.integers(1, 9000), density=st.floats(0, 1), kind=KINDS)
@settings(max_examples=60)
def test_exact_is_the_largest_magnitudes(seed, n, density, kind):
    x, k = vector(seed, n, kind), count_entries(n, density**3)
    found = select_exact(x, k)
    assert torch.equal(found, found.unique())
    assert torch.equal(x[found].abs().sort().values, x.abs().sort().values[n - k :])


@given(seed=st.integers(0, 2**20), n=st.integers(1, 300), density=st.floats(0, 1), kind=KINDS)
@settings(max_examples=60)
def test_of_equal_magnitudes_the_first_are_kept(seed, n, density, kind):
    x, k = vector(seed, n, kind), count_entries(n, density)
    assert torch.equal(keep_largest(x, k), x.abs().sort(descending=True, stable=True).indices[:k].sort().values)


def test_what_is_not_finite_is_kept_first():
    x = torch.tensor([1.0, math.nan, 3, -math.inf, math.inf, 2])
    assert [keep_largest(x, k).tolist() for k in (2, 3, 4)] == [[1, 3], [1, 3, 4], [1, 2, 3, 4]]


@pytest.mark.parametrize("select", [select_sampled, select_mstopk])
@given(seed=st.integers(0, 2**20), n=st.integers(1, 9000), density=st.floats(0, 1), kind=KINDS)
@settings(max_examples=60)
def test_thresholds_select_as_many_and_nearly_as_much(select, seed, n, density, kind):
    """k distinct entries, none below those that 1.3 k exact ones would leave out (for mstopk, the k-th largest)."""
    x, k = vector(seed, n, kind), count_entries(n, density**3)
    found = select(x, k)
    assert torch.equal(found, found.unique())
    assert len(found) == k
    kept = min(n, int(1.3 * k)) if select is select_sampled else k
    assert x[found].abs().min() >= x.abs().sort(descending=True).values[kept - 1] * (1 - 1e-4)


@pytest.mark.parametrize(("select", "part"), [(select_sampled, 0.85), (select_mstopk, 0.999)])
@pytest.mark.parametrize("kind", ["normal", "heavy"])
def test_thresholds_agree_with_exact_in_mass(select, part, kind):
    x, k = vector(0, 1_000_000, kind), 5000
    assert x[select(x, k)].abs().sum() >= part * x[select_exact(x, k)].abs().sum()


@pytest.mark.parametrize("k", [300, 5000])
def test_sampling_prefers_no_part_of_the_model(k):
    """Of entries that are alike everywhere, each tenth has about as many selected, within 5 standard deviations."""
    counts = torch.zeros(10)
    for seed in range(8):
        x = torch.rand(200_000, generator=torch.Generator().manual_seed(seed)) - 0.5
        counts += select_sampled(x, k).mul(10).div(len(x), rounding_mode="floor").bincount(minlength=10)
    assert (counts - 0.8 * k).abs().max() < 5 * (0.8 * k) ** 0.5


@given(seed=st.integers(0, 2**20), density=st.floats(0.001, 1), scale=st.sampled_from([1e-20, 1.0, 1e15]))
@settings(max_examples=40)
def test_contracts(seed, density, scale):
    """‖x - C(x)‖² <= (1 - k / n) ‖x‖² (Stich et al., lemma A.1)."""
    x = vector(seed, 700, "heavy") * scale
    grads = {"x": x.clone()}
    run_lockstep([TopKCodec(density)], [grads])
    left, whole = ((x.double() - grads["x"]) ** 2).sum(), (x.double() ** 2).sum()
    assert left <= (1 - count_entries(700, density) / 700) * whole * (1 + 1e-9)


@given(seed=st.integers(0, 2**20), k=st.integers(1, 1200), scale=st.sampled_from([1e-12, 1.0, 1e15]))
@settings(max_examples=40)
@pytest.mark.parametrize("form", ["bf16", "int8", "int4", "int2"])
def test_rounding_never_takes_more_than_there_is(form, seed, k, scale):
    values = vector(seed, k, "heavy") * scale
    values += 0.1 * scale * values.sign()
    read = decode_values([each[None] for each in encode_values(values, form)], form, k)[0]
    assert ((values - read).abs() <= values.abs() * (1 + 1e-5)).all()
    assert (read.sign() == values.sign()).all()
    bound = {"bf16": 2**-8, "int8": 0.5 / 127, "int4": 0.5 / 7, "int2": 0.5}[form]
    assert (values - read).abs().max() <= bound * values.abs().max() * (1 + 1e-5)


def test_zeros_stay_zeros():
    grads = [{"w": torch.zeros(100)} for _ in range(2)]
    run_lockstep([TopKCodec(0.1, wire="int4") for _ in range(2)], grads)
    assert not grads[0]["w"].any()


def test_per_layer_sends_of_every_layer():
    grads = gradients(0)
    run_lockstep([TopKCodec(0.01, per_layer=True) for _ in grads], grads)
    assert all(grad.any() for grad in grads[0].values() if grad.numel())
    together = gradients(0)
    run_lockstep([TopKCodec(0.01) for _ in together], together)
    assert not together[0]["bias"].any()


def test_the_average_is_of_what_each_rank_selected():
    """By hand: two ranks, one entry each."""
    grads = [{"w": torch.tensor([1.0, -5, 2])}, {"w": torch.tensor([3.0, 1, -2])}]
    codecs = [TopKCodec(0.34), TopKCodec(0.34)]
    run_lockstep(codecs, grads)
    assert grads[0]["w"].tolist() == [1.5, -2.5, 0]
    assert codecs[0].state["residual"]["w"].tolist() == [1, 0, 2]


def test_at_density_one_it_is_the_average():
    grads = gradients(0)
    expected = mean(grads)
    run_lockstep([TopKCodec(1.0) for _ in grads], grads)
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad.double(), expected[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("wire", "bits"), [("fp32", 32), ("bf16", 16), ("int8", 8.125), ("int4", 4.125)])
@pytest.mark.parametrize("density", [0.01, 0.001])
def test_bytes(wire, bits, density):
    """Bits of a value (with two fp32 numbers for each 512 of them), and 2 + log2(n / k) bits of an index at most."""
    n = 2_000_000
    k = int(density * n)
    grads = [{"w": torch.randn(n, generator=torch.Generator().manual_seed(rank))} for rank in range(2)]
    sent = run_lockstep([TopKCodec(density, wire=wire) for _ in grads], grads).sent(2)
    assert k * bits / 8 < sent - k * math.log2(n / k) / 8 <= k * (bits + 2) / 8 + 16
