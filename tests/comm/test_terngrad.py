"""TernGrad."""

from __future__ import annotations

import math

import pytest
import torch

from shoestring.comm.codecs.codec import ExchangeContext, Grads, advance
from shoestring.comm.codecs.lockstep import run_lockstep
from shoestring.comm.codecs.terngrad import TernGradCodec

SHAPES = {"matrix": (37, 40), "bias": (7,), "one": ()}
RANKS = 3


def gradients(seed: int, ranks: int = RANKS, dtype: torch.dtype = torch.float32) -> list[Grads]:
    """Uniform, so that nothing lies beyond 2.5 standard deviations."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {name: (torch.rand(shape, generator=generator) - 0.5).to(dtype) for name, shape in SHAPES.items()}
        for _ in range(ranks)
    ]


def mean(grads: list[Grads], name: str) -> torch.Tensor:
    return torch.stack([each[name] for each in grads]).mean(0)


@pytest.mark.parametrize("owners", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_is_unbiased(owners):
    """The mean of many exchanges of the same gradients, each entry within 5 of its standard errors."""
    trials, name = 300, "matrix"
    truth, scale = mean(gradients(0), name), max(float(each[name].abs().max()) for each in gradients(0))
    total = torch.zeros_like(truth)
    codecs = [TernGradCodec(reduce_scatter=owners) for _ in range(RANKS)]
    for step in range(trials):
        grads = gradients(0)
        run_lockstep(codecs, grads, step)
        total += grads[0][name] / trials
    # A level s b has variance |g| s - g²; the mean over the ranks has a third of their mean.
    variance = torch.stack([each[name].abs() * scale - each[name] ** 2 for each in gradients(0)]).mean(0) / RANKS
    z = (total - truth) / (variance / trials).sqrt().clamp(min=1e-6)
    assert z.abs().max() < 5
    assert abs(float(z.mean())) < 5 / z.numel() ** 0.5
    assert 0.85 < float((z**2).mean()) < 1.15  # the variance is the paper's, too


def test_ranks_draw_apart_and_steps_draw_apart():
    same = [{"x": torch.full((4000,), 0.5)} for _ in range(RANKS)]
    for each in same:
        each["x"][0] = 1.0
    codecs, levels = [TernGradCodec() for _ in range(RANKS)], []
    for step in range(2):
        grads = [{"x": each["x"].clone()} for each in same]
        run_lockstep(codecs, grads, step)
        levels.append(grads[0]["x"])
    assert len(levels[0].unique()) == RANKS + 1  # were the draws the same, only 0 and s
    assert not torch.equal(*levels)


@pytest.mark.parametrize("owners", [False, True])
def test_levels_are_multiples_of_the_shared_scale(owners):
    grads = gradients(2)
    grads[1]["matrix"][0, 0] = 1e3  # far beyond 2.5 standard deviations of that rank
    sigma = max(float(each["matrix"].norm() / each["matrix"].numel() ** 0.5) for each in grads)
    run_lockstep([TernGradCodec(reduce_scatter=owners) for _ in range(RANKS)], grads)
    steps = grads[0]["matrix"] / (2.5 * sigma / RANKS)
    torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-4)
    assert steps[0, 0].round() == 1  # one rank at its largest level


def test_one_entry_and_zeros_come_back_exactly():
    grads = [{"one": torch.tensor(-3.0), "none": torch.zeros(9)} for _ in range(RANKS)]
    run_lockstep([TernGradCodec() for _ in range(RANKS)], grads)
    assert grads[0]["one"] == -3
    assert not grads[0]["none"].any()


@pytest.mark.parametrize("owners", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replicas_are_equal_bit_by_bit(owners, dtype):
    codecs = [TernGradCodec(reduce_scatter=owners) for _ in range(RANKS)]
    for step in range(50):
        grads = gradients(step, dtype=dtype)
        run_lockstep(codecs, grads, step)
        for name in SHAPES:
            assert all(torch.equal(grads[0][name], each[name]) for each in grads)


@pytest.mark.parametrize("ranks", [1, 2, 5, 8])
def test_sums_at_owners_are_the_sums_everywhere(ranks):
    here, there = ([{"bias": each["bias"]} for each in gradients(3, ranks)] for _ in range(2))
    run_lockstep([TernGradCodec() for _ in range(ranks)], here)
    run_lockstep([TernGradCodec(reduce_scatter=True) for _ in range(ranks)], there)
    assert torch.equal(here[0]["bias"], there[0]["bias"])


def test_sums_of_many_ranks_do_not_overflow():
    """130 ranks that all send their largest level: the sum is 260."""
    grads = [{"x": torch.ones(7)} for _ in range(130)]
    run_lockstep([TernGradCodec(reduce_scatter=True) for _ in grads], grads)
    torch.testing.assert_close(grads[0]["x"], torch.ones(7))


@pytest.mark.parametrize(("ranks", "owners", "bits"), [(4, False, None), (4, True, 4), (8, True, 5)])
def test_bytes(ranks, owners, bits):
    n = ranks * 1024
    codecs = [TernGradCodec(reduce_scatter=owners) for _ in range(ranks)]
    traffic = run_lockstep(codecs, [{"w": torch.randn(n)} for _ in range(ranks)])
    scales = (ranks - 1) * 4
    if owners:
        assert traffic.sent(ranks) == scales + (ranks - 1) / ranks * (n * 2 / 8 + n * bits / 8)
    else:
        assert traffic.sent(ranks) == scales + (ranks - 1) * n * 2 / 8
    assert len(traffic.stages) == codecs[0].stages


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_shows_in_the_first_stage(value):
    grads = gradients(0)[0]
    grads["bias"][3] = value
    (request,) = advance(TernGradCodec().code(grads, ExchangeContext(0, RANKS, 0)))
    assert not request.tensor.isfinite().all()
    assert TernGradCodec().state == {}
