"""Random-k: what is drawn is the same everywhere and fair, and nothing is lost."""

from __future__ import annotations

from functools import partial

import pytest
import sparse_ranks as contract
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_ranks import RANKS, SHAPES, gradients, mean

from shoestring.comm.codecs.lockstep import run_lockstep
from shoestring.comm.codecs.randomk import RandomKCodec

CPU = torch.device("cpu")
VARIANTS = [
    partial(RandomKCodec, 0.05),
    partial(RandomKCodec, 0.3, block=1),
    partial(RandomKCodec, 0.1, block=64, seed=3),
]


@pytest.mark.parametrize("make", VARIANTS)
class TestContract(contract.Contract, contract.ConservingContract):
    @pytest.mark.parametrize("at", [0, 39, 700])
    def test_shows_what_is_not_finite(self, make, at):
        contract.assert_exposes(make, "matrix", at)


@given(n=st.integers(1, 3000), density=st.floats(0, 1), block=st.sampled_from([1, 7, 16]), seed=st.integers(0, 2**32))
@settings(max_examples=100)
def test_draws_distinct_entries_in_whole_blocks(n, density, block, seed):
    found = RandomKCodec(density, block=block).draw(n, seed, CPU)
    assert len(found.unique()) == len(found) <= max(density * n + block, block)
    assert found.min() >= 0
    assert found.max() < n
    rows = found.view(-1, min(block, n))
    assert torch.equal((rows.diff(dim=1)) % n, torch.ones_like(rows[:, 1:]) % n)


@pytest.mark.parametrize(("n", "density", "block"), [(103, 0.3, 4), (50, 0.1, 1), (64, 0.6, 16)])
def test_every_entry_is_as_likely(n, density, block):
    """Counts of 4000 draws, within 5 standard deviations of a binomial."""
    codec, trials, counts = RandomKCodec(density, block=block), 4000, torch.zeros(n)
    for seed in range(trials):
        counts[codec.draw(n, seed, CPU)] += 1
    p = len(codec.draw(n, 0, CPU)) / n
    assert (counts - trials * p).abs().max() < 5 * (trials * p * (1 - p)) ** 0.5


@pytest.mark.slow
def test_without_feedback_it_is_unbiased():
    """The mean of many exchanges of the same gradients, each entry within 5 of its standard errors; no state."""
    codecs, trials = [RandomKCodec(0.25, feedback=False) for _ in range(RANKS)], 600
    truth = mean(gradients(0))["matrix"]
    first, second = torch.zeros_like(truth), torch.zeros_like(truth)
    for step in range(trials):
        grads = gradients(0)
        run_lockstep(codecs, grads, step)
        error = grads[0]["matrix"].double() - truth
        first += error / trials
        second += error**2 / trials
    z = first / ((second - first**2) / trials).sqrt().clamp(min=1e-9)
    assert z.abs().max() < 5
    assert not codecs[0].state


def test_draws_anew_at_every_step_and_for_every_cohort():
    def sent(step: int, seed: int, name: str) -> torch.Tensor:
        grads = [{name: torch.ones(500)}]
        run_lockstep([RandomKCodec(0.1, seed=seed)], grads, step)
        return grads[0][name]

    assert torch.equal(sent(0, 0, "a"), sent(0, 0, "a"))
    for other in (sent(1, 0, "a"), sent(0, 1, "a"), sent(0, 0, "b")):
        assert not torch.equal(sent(0, 0, "a"), other)


def test_the_residual_keeps_a_ranks_rounding():
    codecs = [RandomKCodec(0.2, dtype=torch.bfloat16)]
    grads = gradients(0, ranks=1)
    total = mean(grads)
    run_lockstep(codecs, grads)
    for name in SHAPES:
        left = codecs[0].state["residual"][name]
        torch.testing.assert_close(grads[0][name] + left, total[name].float())


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_bytes(dtype, width):
    """Values alone, by one all-reduce."""
    traffic = run_lockstep(
        [RandomKCodec(0.01, dtype=dtype) for _ in range(2)], [{"w": torch.randn(64_000)} for _ in range(2)]
    )
    assert traffic.stages == [{"all-reduce": 640 * width}]
