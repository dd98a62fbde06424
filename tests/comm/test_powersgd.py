"""PowerSGD against the formulas of the paper in fp64, and what must hold of any codec."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from sparse_ranks import totals

from shoestring.comm.codecs.codec import Grads, advance
from shoestring.comm.codecs.lockstep import run_lockstep
from shoestring.comm.codecs.powersgd import PowerSGDCodec, orthogonalise
from shoestring.comm.codecs.randomk import RandomKCodec
from shoestring.comm.codecs.sign import SignCodec
from shoestring.comm.codecs.topk import TopKCodec

SHAPES = {"a": (24, 16), "b": (24, 16), "c": (10, 40), "bias": (16,), "conv": (12, 4, 3, 3)}
RANKS = 3


def gradients(seed: int, shapes=SHAPES) -> list[Grads]:
    generator = torch.Generator().manual_seed(seed)
    return [{name: torch.randn(shape, generator=generator) for name, shape in shapes.items()} for _ in range(RANKS)]


def mean(grads: list[Grads]) -> Grads:
    return {name: torch.stack([each[name] for each in grads]).mean(0) for name in grads[0]}


def copies(grads: list[Grads]) -> list[Grads]:
    return [{name: grad.clone() for name, grad in each.items()} for each in grads]


def residuals(codecs: list[PowerSGDCodec], name: str) -> torch.Tensor:
    return torch.stack([codec.state["residual"][name] for codec in codecs]).mean(0)


def test_a_resumed_run_may_stop_to_alternate():
    codecs = [PowerSGDCodec(2, alternate=True, least=1) for _ in range(RANKS)]
    for step in range(3):  # the newest basis is P
        run_lockstep(codecs, gradients(step), step)
    assert "a" in codecs[0].state["P"]
    others = [PowerSGDCodec(2, least=1) for _ in range(RANKS)]
    for codec, other in zip(codecs, others, strict=True):
        other.load_state_dict(codec.state_dict())
    grads, before = gradients(3), residuals(codecs, "a")
    total = mean(grads)["a"] + before
    run_lockstep(others, grads, 3)
    torch.testing.assert_close(grads[0]["a"] + residuals(others, "a"), total, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("alternate", [False, True])
def test_conserves_what_it_does_not_send(alternate):
    codecs = [PowerSGDCodec(2, alternate=alternate, least=1) for _ in range(RANKS)]
    sent, total = totals(codecs, gradients, steps=6)
    for name, shape in SHAPES.items():
        left = residuals(codecs, name).view(shape) if len(shape) > 1 else 0
        torch.testing.assert_close(sent[name] + left, total[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("alternate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replicas_are_equal_bit_by_bit(alternate, dtype):
    codecs = [PowerSGDCodec(2, alternate=alternate, dtype=dtype, least=1) for _ in range(RANKS)]
    for step in range(5):
        grads = gradients(step)
        run_lockstep(codecs, grads, step)
        for name in SHAPES:
            assert all(torch.equal(grads[0][name], each[name]) for each in grads)


def test_full_rank_is_the_average():
    codecs = [PowerSGDCodec(16, least=0.1) for _ in range(RANKS)]
    for step in range(3):
        grads = gradients(step)
        expected = mean(grads)
        run_lockstep(codecs, grads, step)
        for name in ("a", "bias"):
            torch.testing.assert_close(grads[0][name], expected[name], rtol=1e-4, atol=1e-4)


def test_is_the_iteration_of_the_paper():
    """One matrix, fp64, with the projection residual: P = orth(mean(M Q)), Q = mean(Mᵀ P), e = M - P (Mᵀ P)ᵀ."""
    shapes, rank = {"a": (24, 16)}, 2
    codecs = [PowerSGDCodec(rank, least=1) for _ in range(RANKS)]
    Q, e = None, [torch.zeros(24, 16, dtype=torch.float64)] * RANKS
    for step in range(4):
        grads = gradients(step, shapes)
        M = [each["a"].double() + residual for each, residual in zip(grads, e, strict=True)]
        if Q is None:
            Q = codecs[0]._matrix("a", grads[0]["a"]).basis.T.double()
        P = torch.linalg.qr(torch.stack([each @ Q for each in M]).mean(0))[0]
        e = [each - P @ (each.T @ P).T for each in M]
        Q = torch.stack([each.T @ P for each in M]).mean(0)
        run_lockstep(codecs, grads, step)
        torch.testing.assert_close(grads[0]["a"].double(), P @ Q.T, rtol=1e-4, atol=1e-4)


def test_alternating_halves_are_those_of_the_formulas():
    """One matrix, fp64: P = mean(M Q), e = M - M Q Qᵀ of this rank's own M; then the same of Mᵀ with P's columns."""
    shapes = {"a": (24, 16)}
    codecs = [PowerSGDCodec(2, least=1, alternate=True) for _ in range(RANKS)]
    first = codecs[0]._matrix("a", torch.zeros(24, 16)).basis
    basis, e = first.T.double(), [torch.zeros(24, 16, dtype=torch.float64)] * RANKS
    for step in range(4):
        grads = gradients(step, shapes)
        M = [each["a"].double() + residual for each, residual in zip(grads, e, strict=True)]
        M = M if step % 2 == 0 else [each.T for each in M]
        basis = torch.linalg.qr(basis)[0]
        own = [each @ basis for each in M]
        left = [each - product @ basis.T for each, product in zip(M, own, strict=True)]
        mean_ = torch.stack(own).mean(0)
        average, e = mean_ @ basis.T, left
        if step % 2:
            average, e = average.T, [each.T for each in left]
        basis = mean_
        run_lockstep(codecs, grads, step)
        torch.testing.assert_close(grads[0]["a"].double(), average, rtol=1e-4, atol=1e-4)
        for codec, expected in zip(codecs, e, strict=True):
            torch.testing.assert_close(codec.state["residual"]["a"].double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("alternate", [False, True])
def test_finds_the_low_rank_that_is_there(alternate):
    """Of gradients whose mean has rank 2, nothing is left after a few equal steps."""
    generator = torch.Generator().manual_seed(0)
    low = torch.randn(24, 2, generator=generator) @ torch.randn(2, 16, generator=generator)
    codecs = [PowerSGDCodec(2, alternate=alternate, least=1) for _ in range(RANKS)]
    for step in range(8):
        grads = [{"a": low.clone()} for _ in range(RANKS)]
        run_lockstep(codecs, grads, step)
    assert residuals(codecs, "a").norm() < 1e-3 * low.norm()


@pytest.mark.parametrize("alternate", [False, True])
def test_giving_up_leaves_what_was(alternate):
    from shoestring.comm.codecs.codec import ExchangeContext

    codecs = [PowerSGDCodec(2, alternate=alternate, least=1) for _ in range(RANKS)]
    for step in range(3):
        run_lockstep(codecs, gradients(step), step)
    before = codecs[1].state_dict()
    before = {kind: {name: tensor.clone() for name, tensor in of.items()} for kind, of in before.items()}
    coding = codecs[1].code(gradients(9)[1], ExchangeContext(1, RANKS, 3))
    advance(coding)
    coding.close()
    for kind, of_kind in before.items():
        assert of_kind.keys() == codecs[1].state[kind].keys()
        for name, tensor in of_kind.items():
            torch.testing.assert_close(codecs[1].state[kind][name], tensor, rtol=1e-5, atol=1e-5)


def test_bytes_are_those_of_the_factors():
    codecs = [PowerSGDCodec(2, least=1) for _ in range(RANKS)]
    traffic = run_lockstep(codecs, gradients(0))
    low = 2 * sum(n + m for n, m in ((24, 16), (24, 16), (10, 40), (12, 36)))
    assert traffic.total("all-reduce") == 4 * (low + 16)
    assert len(traffic.stages) == 2
    assert len(run_lockstep([PowerSGDCodec(2, alternate=True) for _ in range(RANKS)], gradients(0)).stages) == 1


def test_orthogonalise_takes_matrices_of_lower_rank():
    generator = torch.Generator().manual_seed(0)
    good, flat, zero = torch.randn(9, 3, generator=generator), torch.ones(9, 3), torch.zeros(9, 3)
    orthogonalise([good[None], flat[None], zero[None]])
    torch.testing.assert_close(good.T @ good, torch.eye(3), rtol=1e-5, atol=1e-5)
    assert flat.isfinite().all()
    assert zero.isfinite().all()
    torch.testing.assert_close(flat[:, 0].norm(), torch.tensor(1.0))


@pytest.mark.parametrize("others", [SignCodec, partial(TopKCodec, 0.1), partial(RandomKCodec, 0.1)])
def test_a_resumed_run_may_have_been_of_another_codec_or_become_one(others):
    """A residual is a matrix here, and in the shape of the parameter elsewhere."""
    conv, state = {"conv": SHAPES["conv"]}, None
    for step, make in enumerate((others, partial(PowerSGDCodec, 2, least=1), others)):
        codecs = [make() for _ in range(RANKS)]
        grads = gradients(step, conv)
        total = mean(grads)["conv"]
        if state is not None:
            for codec, own in zip(codecs, state, strict=True):
                codec.load_state_dict(own)
            total = total + residuals(codecs, "conv").view_as(total)
        run_lockstep(codecs, grads, step)
        torch.testing.assert_close(
            grads[0]["conv"] + residuals(codecs, "conv").view_as(total), total, rtol=1e-4, atol=1e-4
        )
        state = [codec.state_dict() for codec in codecs]


def test_merging_conserves_the_mean_residual():
    codecs = [PowerSGDCodec(2, least=1) for _ in range(RANKS)]
    for step in range(3):
        run_lockstep(codecs, gradients(step), step)
    merged = codecs[0].merge_states([codec.state_dict() for codec in codecs])
    torch.testing.assert_close(merged["residual"]["a"], residuals(codecs, "a"))
    assert torch.equal(merged["Qt"]["a"], codecs[2].state["Qt"]["a"])


@pytest.mark.parametrize("alternate", [False, True])
@pytest.mark.parametrize("rank", [1, 2, 5])
def test_a_resumed_run_may_have_another_rank(alternate, rank):
    """What is left of the basis is kept: matrices of the newly chosen rank travel, and nothing is lost."""
    codecs = [PowerSGDCodec(2, alternate=alternate, least=1) for _ in range(RANKS)]
    for step in range(3):
        run_lockstep(codecs, gradients(step), step)
    others = [PowerSGDCodec(rank, alternate=alternate, least=1) for _ in range(RANKS)]
    for codec, other in zip(codecs, others, strict=True):
        other.load_state_dict(codec.state_dict())
    grads, before = gradients(3), residuals(codecs, "a")
    total = mean(grads)["a"] + before
    run_lockstep(others, grads, 3)
    assert (
        min(
            others[0].state[kind]["a"].shape[axis]
            for kind, axis in (("Qt", 0), ("P", 1))
            if "a" in others[0].state.get(kind, {})
        )
        == rank
    )
    torch.testing.assert_close(grads[0]["a"] + residuals(others, "a"), total, rtol=1e-4, atol=1e-4)
