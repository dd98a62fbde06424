"""Deep Gradient Compression against the paper's algorithm in fp64 and against SGD with momentum."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import sparse_ranks as contract
import torch
from sparse_ranks import RANKS, SHAPES, gradients, mean

from shoestring.comm.codecs.dgc import DGCCodec
from shoestring.comm.codecs.lockstep import run_lockstep

VARIANTS = [
    partial(DGCCodec, 0.05),
    partial(DGCCodec, 0.02, nesterov=True, clip=3.0, selection="sampled", wire="int8", warmup=3),
    partial(DGCCodec, 0.02, per_layer=True, selection="mstopk", masking=False, wire="bf16"),
]
WITHOUT_MOMENTUM = [partial(make, momentum=0.0, clip=None) for make in VARIANTS]


@pytest.mark.parametrize("make", VARIANTS)
class TestContract(contract.Contract):
    @pytest.mark.parametrize(("name", "at"), [("matrix", 39), ("bias", 3)])
    def test_shows_what_is_not_finite(self, make, name, at):
        contract.assert_exposes(make, name, at)


@pytest.mark.parametrize("make", WITHOUT_MOMENTUM)
class TestWithoutMomentum(contract.ConservingContract):
    """It is top-k, of matrices."""


def momentum_sgd(steps: int, momentum: float, nesterov: bool, clip: float | None) -> list[dict[str, np.ndarray]]:
    """The updates of SGD with momentum on averages of locally clipped gradients, in fp64."""
    velocity = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    updates = []
    for step in range(steps):
        ranks = [{name: grad.double().numpy() for name, grad in grads.items()} for grads in gradients(step)]
        for grads in ranks:
            norm = np.sqrt(sum((grad**2).sum() for grad in grads.values()))
            scale = 1 if clip is None else min(1, clip / np.sqrt(RANKS) / norm)
            grads.update({name: scale * grad for name, grad in grads.items()})
        average = {name: sum(grads[name] for grads in ranks) / RANKS for name in SHAPES}
        velocity = {name: momentum * velocity[name] + average[name] for name in SHAPES}
        ahead = {name: average[name] + momentum * velocity[name] for name in SHAPES}
        updates.append(ahead if nesterov else velocity)
    return updates


@pytest.mark.parametrize("clip", [None, 5.0])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(("density", "masking"), [(1.0, True), (1 - 1e-9, False)])
def test_at_density_one_it_is_sgd_with_momentum(density, masking, nesterov, clip):
    """Both where all travels whole, and where all entries are selected and none of the velocity is masked."""
    codecs = [DGCCodec(density, nesterov=nesterov, masking=masking, clip=clip) for _ in range(RANKS)]
    for step, expected in enumerate(momentum_sgd(8, 0.9, nesterov, clip)):
        grads = gradients(step)
        traffic = run_lockstep(codecs, grads, step)
        for name in SHAPES:
            np.testing.assert_allclose(grads[0][name].double().numpy(), expected[name], rtol=1e-5, atol=5e-6)
    assert bool(traffic.total("all-gather")) == (density < 1)


def test_the_reference_is_torchs_optimizer():
    for nesterov in (False, True):
        parameter = torch.nn.Parameter(torch.zeros(SHAPES["matrix"], dtype=torch.float64))
        optimizer = torch.optim.SGD([parameter], lr=1, momentum=0.9, nesterov=nesterov)
        for step, expected in enumerate(momentum_sgd(4, 0.9, nesterov, None)):
            before = parameter.detach().clone()
            parameter.grad = mean(gradients(step))["matrix"]
            optimizer.step()
            torch.testing.assert_close((before - parameter.detach()).numpy(), expected["matrix"])


@pytest.mark.parametrize("nesterov", [False, True])
def test_is_the_algorithm_of_the_paper(nesterov):
    """Momentum correction and factor masking (algorithm 4), rank by rank in fp64, on one matrix."""
    k, m = 30, 0.9
    u, v = np.zeros((RANKS, 37 * 40)), np.zeros((RANKS, 37 * 40))
    codecs = [DGCCodec(k / u.shape[1], momentum=m, nesterov=nesterov) for _ in range(RANKS)]
    for step in range(8):
        grads = [{"matrix": grads["matrix"]} for grads in gradients(step)]
        g = np.stack([each["matrix"].double().numpy().ravel() for each in grads])
        u = m * (u + g) if nesterov else m * u + g
        v = v + u + g if nesterov else v + u
        average = np.zeros(u.shape[1])
        for rank in range(RANKS):
            sent = np.argsort(-np.abs(v[rank]))[:k]
            average[sent] += v[rank, sent] / RANKS
            u[rank, sent] = v[rank, sent] = 0
        run_lockstep(codecs, grads, step)
        for mine, expected in (
            (grads[0]["matrix"], average),
            (codecs[1].state["velocity"]["matrix"], u[1]),
            (codecs[1].state["residual"]["matrix"], v[1]),
        ):
            np.testing.assert_allclose(mine.double().numpy().ravel(), expected, rtol=1e-5, atol=1e-4)


def test_velocity_is_conserved_without_masking():
    """Everything that is sent, and what is left, is what SGD with momentum would have done."""
    codecs = [DGCCodec(0.03, masking=False) for _ in range(RANKS)]
    sent, total = 0, 0
    for step, expected in enumerate(momentum_sgd(10, 0.9, False, None)):
        grads = gradients(step)
        run_lockstep(codecs, grads, step)
        sent, total = sent + grads[0]["matrix"].double(), total + torch.from_numpy(expected["matrix"])
    left = contract.mean_state(codecs, "residual", "matrix")
    assert left.abs().max() > 1e-2
    torch.testing.assert_close(sent + left, total, rtol=1e-5, atol=1e-4)


def test_the_warm_up_is_the_papers():
    codec = DGCCodec(0.001, warmup=50)
    found = [codec.density_at(step) for step in (0, 9, 10, 20, 30, 40, 50, 1000)]
    assert found == pytest.approx([0.2512, 0.2512, 0.0631, 0.01585, 0.00398, 0.001, 0.001, 0.001], rel=1e-2)
    assert DGCCodec(0.001).density_at(0) == 0.001


def test_what_travels():
    """Vectors whole, by one mean; of the matrices k entries."""
    traffic = run_lockstep([DGCCodec(0.01) for _ in range(RANKS)], gradients(0))
    whole = sum(torch.Size(shape).numel() for shape in SHAPES.values() if len(shape) < 2)
    entries = round(0.01 * (37 * 40 + 6 * 4 * 9))
    assert len(traffic.stages) == DGCCodec.stages
    assert traffic.total("all-reduce") == 4 * whole
    assert 4 * entries < traffic.total("all-gather") < (4 + 2) * entries
