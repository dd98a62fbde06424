"""Adam's second moment in replicas: against one written by hand, and against that of the mean gradient."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, NAdam, RAdam

sys.path.insert(0, str(Path(__file__).parent))
import merging
from by_hand import Replicas, apart, train

from shoestring import optim
from shoestring.checkpoint import Plain
from shoestring.comm import DiLoCo, LocalSGD
from shoestring.comm.local.second_moment import SecondMoments
from shoestring.core.compose import compose
from shoestring.core.feature import Phase
from shoestring.core.job import Job, attachments_of
from shoestring.core.world import World
from shoestring.parallel import DDP
from shoestring.testing import Pool, jobs

ADAM = optim.AdamW(lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
GLOBAL = LocalSGD(every=3, second_moment="global")


@pytest.mark.slow
def test_it_equals_one_written_by_hand(pool: Pool) -> None:
    results = train(pool, ADAM, optim.Clip(max_norm=0.05), GLOBAL, steps=7)
    replicas, beta = Replicas(2), 1 - 0.05 / 2
    moments = [{name: [torch.zeros_like(w)] * 2 for name, w in weights.items()} for weights in replicas.weights]
    for number in range(7):
        for rank, model in enumerate(replicas.models):
            batch = jobs.batch(number, rank, 2)
            weights = replicas.trained(model)
            loss = F.cross_entropy(model(batch["inputs"]).flatten(0, -2), batch["targets"].flatten())
            gradients = torch.autograd.grad(loss, [*weights.values()])
            norm = torch.stack([g.norm() for g in gradients]).norm()
            for (name, weight), g in zip(weights.items(), gradients, strict=True):
                m, v = moments[rank][name]
                g = g * 0.05 / (norm + 1e-6)
                square = (g**2 + m**2) / 2 if number else g**2  # a first step has no state to change
                m, v = 0.9 * m + 0.1 * g, beta * v + (1 - beta) * square
                divisor = (v / (1 - beta ** (number + 1))).sqrt() + 1e-8
                weight.data -= 0.01 * m / (1 - 0.9 ** (number + 1)) / divisor
                moments[rank][name] = [m, v]
        if number + 1 in (3, 6, 7):
            for each in zip(*(weights.values() for weights in replicas.weights), strict=True):
                mean = torch.stack([weight.detach() for weight in each]).mean(0)
                for weight in each:
                    weight.data.copy_(mean)
        for rank, result in enumerate(results):
            assert apart(result["weights"][number], replicas.flat(rank)) < 1e-9
    own = train(pool, ADAM, optim.Clip(max_norm=0.05), LocalSGD(every=3, second_moment="own"), steps=7)
    assert apart(own[0]["weights"][-1], results[0]["weights"][-1]) > 1e-4


class Noisy:
    """A weight whose gradient is its mean and noise, and the optimizer's second moment of it after many steps."""

    def __init__(self, replicas: int, kind: Any = Adam, **settings: Any) -> None:
        self.replicas, self.weight = replicas, nn.Parameter(torch.zeros(20_000))
        holder = nn.Module()
        holder.weight = self.weight
        self.job = compose(Job(holder, optimizer=kind([self.weight], lr=0.0, **settings), world=World()))
        self.moments = SecondMoments(attachments_of(self.job), replicas)

    def step(self, grad: Tensor, *, averaged: bool = False) -> None:
        self.weight.grad = grad.clone()
        self.moments.before_step(averaged=averaged)
        self.job.optimizer.step()
        self.moments.after_step()

    @property
    def second(self) -> float:
        return float(self.job.optimizer.state[self.weight]["exp_avg_sq"].mean())

    def corrected(self, beta: float) -> float:
        """The second moment that the optimizer divides by."""
        return self.second / (1 - beta ** float(self.job.optimizer.state[self.weight]["step"]))


@pytest.mark.parametrize("mean", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_it_estimates_that_of_the_mean_gradient(mean: float, replicas: int) -> None:
    noise = torch.Generator().manual_seed(0)
    noisy = Noisy(replicas, betas=(0.9, 0.95))
    for _ in range(100 * replicas):
        noisy.step(mean + torch.randn(20_000, generator=noise))
    exact = (mean**2 + 1 / replicas) * (1 - (1 - 0.05 / replicas) ** (100 * replicas))
    # m itself is noisy: of variance (1 - 0.9) / (1 + 0.9)
    assert noisy.second == pytest.approx(exact + (1 - 1 / replicas) * 0.1 / 1.9, rel=0.02)


@pytest.mark.parametrize(("kind", "settings", "sign", "decay"), [
    (Adam, {}, 1, 0.5),
    (Adam, {"maximize": True}, -1, 0.5),
    (Adam, {"decoupled_weight_decay": True}, 1, 0.0),
    (NAdam, {}, 1, 0.5),
    (RAdam, {"maximize": True, "decoupled_weight_decay": True}, -1, 0.0),
    (AdamW, {"maximize": True}, -1, 0.0),
])  # fmt: skip
def test_weight_decay_that_adam_adds_to_the_gradient_is_a_part_of_it(
    kind: Any, settings: dict[str, Any], sign: int, decay: float
) -> None:
    noisy, plain = Noisy(4, kind, weight_decay=0.5, **settings), Noisy(4)
    noise = torch.Generator().manual_seed(0)
    noisy.weight.data.normal_(generator=noise)
    for _ in range(20):
        grad = torch.randn(20_000, generator=noise)
        noisy.step(grad)
        plain.step(sign * grad + decay * noisy.weight.detach())
    one, other = (each.job.optimizer.state[each.weight]["exp_avg_sq"] for each in (noisy, plain))
    assert torch.allclose(one, other, rtol=1e-4) and float(one.min()) > 0


def test_betas_stay_the_programs() -> None:
    noisy = Noisy(4, betas=(0.9, 0.95))
    (group,) = noisy.job.optimizer.param_groups
    noisy.step(torch.ones(20_000))
    assert group["betas"] == (0.9, 0.95)
    noisy.moments.before_step()  # and no step, because of an error
    assert group["betas"] == (0.9, 0.9875)
    noisy.moments.before_step()
    assert group["betas"] == (0.9, 0.9875)
    noisy.moments.after_step()
    assert group["betas"] == (0.9, 0.95)


def test_a_checkpoint_of_the_step_before_may_copy_it_until_the_last_moment() -> None:
    job = compose(Job(jobs.tiny(), optimizer=Adam, world=World()), [DiLoCo(every=9)])
    job.kept["outer"].state.outer.moments = SecondMoments(attachments_of(job), 2)

    def second() -> float:
        return sum(float(state["exp_avg_sq"].sum()) for state in job.optimizer.state.values())

    waiting, captured = list[float](), list[float]()
    attachments_of(job).at(Phase.WAIT, lambda: waiting.append(second()))
    attachments_of(job).at(Phase.CAPTURE, lambda: captured.append(second()))
    with job:
        for number in range(3):
            job.step(jobs.batch(number))
    assert waiting[1:] == captured[:2]


def test_sgd_steps_as_before() -> None:
    def run(replicas: int) -> Tensor:
        noisy = Noisy(replicas, SGD)
        noisy.job.optimizer.param_groups[0]["lr"] = 0.1
        for step in range(3):
            noisy.step(torch.full((20_000,), 1.0 + step))
        return noisy.weight.detach()

    assert torch.equal(run(4), run(1))


def test_moments_of_low_precision_stay_positive() -> None:
    noisy, noise = Noisy(4096), torch.Generator().manual_seed(0)
    noisy.weight.data = noisy.weight.data.bfloat16()
    for size in (1e-3, 1e3, 1.0):
        noisy.step(size * torch.randn(20_000, generator=noise).bfloat16())
    assert float(noisy.job.optimizer.state[noisy.weight]["exp_avg_sq"].min()) > 0


@pytest.mark.parametrize("replicas", [4, 4096])
def test_a_large_gradient_leaves_it_positive(replicas: int) -> None:
    noisy = Noisy(replicas)
    for size in (1e-6, 1e6, 1e-6):
        noisy.step(torch.full((20_000,), size))
        assert float(noisy.job.optimizer.state[noisy.weight]["exp_avg_sq"].min()) > 0


def test_a_step_that_overflowed_leaves_it_alone() -> None:
    noisy = Noisy(4, AdamW, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    noisy.step(torch.ones(20_000))
    before = noisy.second
    noisy.weight.grad = torch.full((20_000,), torch.inf)
    scaler.scale(torch.ones(()))
    optimizer = noisy.job.optimizer
    optimizer.register_step_pre_hook(lambda *_: noisy.moments.before_step())
    optimizer.register_step_post_hook(lambda *_: noisy.moments.after_step())
    scaler.step(optimizer)
    assert noisy.second == before
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)


@pytest.mark.slow
def test_averaged_gradients_of_the_first_steps_are_the_mean_already(pool: Pool) -> None:
    """They are added as they are, over as many steps as the replicas' own later."""
    feature = LocalSGD(every=2, start=3, second_moment="global")
    dense = train(pool, replace(ADAM, betas=(0.9, 1 - 0.05 / 2)), DDP(), steps=3)[0]
    local = train(pool, ADAM, feature, steps=5)
    assert apart(dense["weights"][2], local[0]["weights"][2]) < 1e-12
    own = train(pool, ADAM, LocalSGD(every=2, start=3, second_moment="own"), steps=5)
    assert apart(own[0]["weights"][3], local[0]["weights"][3]) > 1e-6


def test_replicas_go_on_from_averaged_gradients_with_steps_as_long() -> None:
    noise, beta = torch.Generator().manual_seed(0), 1 - 0.001 / 4
    noisy = Noisy(4)
    for _ in range(50):
        noisy.step(torch.randn(20_000, generator=noise) / 2, averaged=True)
    assert noisy.corrected(beta) == pytest.approx(1 / 4, rel=0.02)
    for _ in range(10):
        noisy.step(torch.randn(20_000, generator=noise))
    assert noisy.corrected(beta) == pytest.approx(1 / 4, rel=0.05)


def test_moments_that_were_there_before_become_those_of_the_longer_average() -> None:
    noisy = Noisy(4)
    for replicas in (1, 4, 2):
        noisy.moments = SecondMoments(attachments_of(noisy.job), replicas)
        for _ in range(30):
            noisy.step(torch.ones(20_000))
            assert noisy.corrected(1 - 0.001 / replicas) == pytest.approx(1, rel=0.03)


@pytest.mark.slow
def test_a_run_of_it_resumes_bit_for_bit(pool: Pool, tmp_path: Path) -> None:
    """It began as one of DDP, whose second moments are rescaled, and once only."""
    feature = DiLoCo(every=4, fragments=2, delay=1, codec="4bit", second_moment="global")
    arguments: dict[str, Any] = {"steps": 7, "precise": False, "folder": str(tmp_path)}
    train(pool, Plain(every=1), ADAM, DDP(), **arguments | {"steps": 2})
    through = train(pool, Plain(every=1, keep=9), ADAM, feature, resume=str(tmp_path), **arguments)
    arguments["folder"] = str(tmp_path / "again")
    rest = train(pool, Plain(), ADAM, feature, resume=merging.saves(str(tmp_path))[3], **arguments)
    for one, other in zip(rest, through, strict=True):
        assert one["digests"] == other["digests"][-3:]
