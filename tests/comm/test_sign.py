"""Signs with error feedback."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_ranks import totals

from shoestring.comm.codecs.codec import Grads
from shoestring.comm.codecs.lockstep import run_lockstep
from shoestring.comm.codecs.sign import SignCodec

SHAPES = {"matrix": (37, 40), "bias": (7,), "long": (1030,)}
RANKS = 3


def gradients(seed: int) -> list[Grads]:
    generator = torch.Generator().manual_seed(seed)
    return [{name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()} for _ in range(RANKS)]


def mean(tensors) -> torch.Tensor:
    return torch.stack(list(tensors)).mean(0)


def test_one_rank_sends_the_scaled_sign():
    """A rank alone compresses its exact average once: (‖x‖₁ / n) sign(x) of each bucket, padding not counted."""
    x = torch.randn(70)
    grads = {"x": x.clone()}
    run_lockstep([SignCodec(bucket=64)], [grads])
    expected = torch.cat([part.abs().mean() * part.sign() for part in (x[:64], x[64:])])
    torch.testing.assert_close(grads["x"], expected)


def test_padding_does_not_count_in_an_average():
    """The others' signs of padding are not zero: a bias of 3 entries in a bucket of 64 came out as ten times itself."""
    several = [{"x": torch.tensor([2.0, -2.0, 2.0])} for _ in range(RANKS)]
    run_lockstep([SignCodec(bucket=64) for _ in range(RANKS)], several)
    assert several[0]["x"].tolist() == [2.0, -2.0, 2.0]


@given(seed=st.integers(0, 2**20), scale=st.sampled_from([1e-20, 1.0, 1e15]), count=st.integers(1, 300))
@settings(max_examples=40)
def test_contracts(seed, scale, count):
    """‖x - C(x)‖² = ‖x‖² - ‖x‖₁² / n in each bucket (the paper's Lemma 8)."""
    x = torch.randn(count, generator=torch.Generator().manual_seed(seed)) ** 3 * scale
    grads = {"x": x.clone()}
    run_lockstep([SignCodec(bucket=64)], [grads])
    left = ((x.double() - grads["x"].double()) ** 2).sum()
    expected = sum((b**2).sum() - b.abs().sum() ** 2 / len(b) for b in x.double().split(64))
    torch.testing.assert_close(left, torch.as_tensor(expected), rtol=1e-4, atol=1e-6 * float((x.double() ** 2).sum()))


def test_conserves_what_it_does_not_send():
    codecs = [SignCodec(bucket=32) for _ in range(RANKS)]
    sent, total = totals(codecs, gradients, steps=8)
    for name in SHAPES:
        left = mean(codec.state["residual"][name] for codec in codecs)
        torch.testing.assert_close(sent[name] + left, total[name], rtol=1e-5, atol=1e-4)


def test_entries_without_a_gradient_do_not_diverge():
    """sign(0) is +: alone in its bucket a zero is sent as the scale, and taken back. A bucket of zeros stays zero."""
    codecs, moved, scales = [SignCodec(bucket=64) for _ in range(RANKS)], torch.zeros(128), []
    for step in range(100):
        generator = torch.Generator().manual_seed(step)
        grads = [{"x": torch.randn(128, generator=generator)} for _ in range(RANKS)]
        for each in grads:
            each["x"][10:20] = 0
            each["x"][64:] = 0
        run_lockstep(codecs, grads, step)
        moved += grads[0]["x"]
        scales.append(float(grads[0]["x"].abs().max()))
        assert not grads[0]["x"][64:].any()
        assert moved[10:20].abs().max() < 3 * max(scales)


def test_the_residual_stays_bounded():
    codecs, norms = [SignCodec(bucket=64) for _ in range(RANKS)], []
    for step in range(120):
        run_lockstep(codecs, gradients(step), step)
        norms.append(max(codec.norm("residual") for codec in codecs))
    assert max(norms[80:]) < 1.2 * max(norms[40:80])


def test_replicas_are_equal_bit_by_bit():
    codecs = [SignCodec(bucket=64) for _ in range(RANKS)]
    for step in range(50):
        grads = gradients(step)
        run_lockstep(codecs, grads, step)
        for name in SHAPES:
            assert all(torch.equal(grads[0][name], each[name]) for each in grads)


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes(ranks):
    """A bit each, and one fp32 scale for each bucket of 512, both ways round a ring; one number for each pair."""
    n = ranks * 4096
    traffic = run_lockstep([SignCodec() for _ in range(ranks)], [{"w": torch.randn(n)} for _ in range(ranks)])
    assert traffic.sent(ranks) == 2 * (ranks - 1) / ranks * (n / 8 + n / 512 * 4) + (ranks - 1) * 4
