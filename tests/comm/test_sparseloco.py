"""The codec of SparseLoCo: what is sent and what is kept add up, in how many bytes, and equal on all ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shoestring.comm.codecs.codec import AllGather, ExchangeContext, Grads, advance
from shoestring.comm.codecs.lockstep import run_lockstep
from shoestring.comm.codecs.sparseloco import CHUNK, SparseLoCoCodec, dequantize, quantize

SHAPES = {"matrix": (96, 100), "bias": (33,), "scalar": (), "empty": (0, 4), "exact": (64, 64)}


def drawn(ranks: int, seed: int = 0) -> list[Grads]:
    generator = torch.Generator().manual_seed(seed)
    return [{name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()} for _ in range(ranks)]


def mean(of: list[Grads]) -> Grads:
    return {name: torch.stack([each[name] for each in of]).mean(0) for name in of[0]}


def residuals(codecs: list[SparseLoCoCodec]) -> Grads:
    return mean([codec.state["residual"] for codec in codecs])


def close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("beta", [1.0, 0.9])
def test_what_is_sent_and_what_is_kept_add_up(beta: float) -> None:
    codecs = [SparseLoCoCodec(k=64, beta=beta) for _ in range(3)]
    kept = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(4):
        grads = drawn(3, seed=step)
        residual = {name: each + beta * kept[name] for name, each in mean(grads).items()}
        run_lockstep(codecs, grads, step)
        kept = {"empty": kept["empty"], **residuals(codecs)}
        for name, each in residual.items():
            assert close(grads[0][name] + kept[name], each), (step, name)
            assert all(torch.equal(grads[0][name], other[name]) for other in grads)
    assert kept["matrix"].abs().max() > 0.1


def test_the_largest_of_each_chunk_are_sent_with_their_signs() -> None:
    codec, (grads,) = SparseLoCoCodec(k=64), drawn(1)
    before = {name: each.clone() for name, each in grads.items()}
    run_lockstep([codec], [grads])
    for chunk, now in zip(before["matrix"].flatten().split(CHUNK), grads["matrix"].flatten().split(CHUNK), strict=True):
        sent = now.nonzero()[:, 0]
        assert sorted(sent.tolist()) == sorted(chunk.abs().topk(64).indices.tolist())
        assert torch.equal(now[sent].sign(), chunk[sent].sign())
        assert len(now[sent].abs().unique()) == 2
    assert (grads["bias"] != 0).all()  # a small tensor is sent whole


def test_the_bytes_are_those_that_the_documentation_says() -> None:
    grads = [{"weight": torch.randn(10 * CHUNK)} for _ in range(2)]
    traffic = run_lockstep([SparseLoCoCodec(), SparseLoCoCodec()], grads)
    assert traffic.total("all-gather") == 10 * 84  # 64 for 64 indices, 16 for 64 x 2 bits, 4 for two magnitudes
    assert len(traffic.stages) == SparseLoCoCodec.stages


def test_padding_weighs_nothing() -> None:
    small = torch.tensor([1.0, -1.0, 4.0, 4.0, -1.0])
    grads = {"small": small.clone()}
    run_lockstep([SparseLoCoCodec(k=64)], [grads])
    assert torch.equal(grads["small"], small)


def test_where_nothing_happened_nothing_is_sent() -> None:
    grads = {"weight": torch.zeros(2 * CHUNK)}
    grads["weight"][CHUNK:] = torch.randn(CHUNK)
    run_lockstep([SparseLoCoCodec(k=64)], [grads])
    assert not grads["weight"][:CHUNK].any() and grads["weight"][CHUNK:].any()


def test_two_magnitudes_halve_the_error_of_one_and_keep_the_sum() -> None:
    values = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).abs() + 0.5
    back = dequantize(*quantize(values, torch.ones_like(values, dtype=torch.bool)))
    one = values.mean(1, keepdim=True)
    assert (values - back).square().sum() < 0.5 * (values - one).square().sum()
    assert torch.allclose(back.sum(1), values.sum(1), rtol=1e-2)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_in_the_first_answers(value: float) -> None:
    (grads,) = drawn(1)
    grads["matrix"][3, 7] = value
    codec = SparseLoCoCodec(k=8)
    coding = codec.code(grads, ExchangeContext(0, 1, 0))
    requests = advance(coding)
    assert not all(
        r.tensor.isfinite().all() for r in requests if isinstance(r, AllGather) and r.tensor.is_floating_point()
    )
    coding.close()
    assert not codec.state["residual"]["matrix"].any()


def test_error_feedback_brings_everything_over_in_time() -> None:
    """With beta = 1 and the same gradient again and again, the mean of what arrives approaches it."""
    gradient = torch.randn(CHUNK, generator=torch.Generator().manual_seed(1))
    codec, total = SparseLoCoCodec(k=128, beta=1.0), torch.zeros(CHUNK)
    for step in range(1, 257):
        grads = {"weight": gradient.clone()}
        run_lockstep([codec], [grads], step)
        total += grads["weight"]
    assert (total / 256 - gradient).norm() < 0.15 * gradient.norm()
