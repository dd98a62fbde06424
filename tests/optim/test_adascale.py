"""AdaScale: estimates of known covariances, gains at both ends, accumulation as good as ranks, and what is refused."""

import pytest
import torch
from torch import nn

from shoestring import optim
from shoestring.core.compose import compose
from shoestring.core.errors import ConfigError
from shoestring.core.job import Job
from shoestring.core.world import World
from shoestring.optim.adascale import Averages, Gain, estimates


@pytest.mark.parametrize(("count", "scale"), [(4, 4.0), (2, 8.0), (16, 16.0)])
def test_estimates_are_those_of_a_known_covariance(count, scale):
    """Gradients of samples are N(mean, C); each of the `count` is a mean of as many samples as the batch allows."""
    chance = torch.Generator().manual_seed(0)
    mean = torch.randn(50, generator=chance, dtype=torch.float64)
    spread = torch.rand(50, generator=chance, dtype=torch.float64) * 4
    averages = Averages(smoothing=0.9999)
    small = spread.square().sum()  # the variance of a small batch's gradient, which is scale / count of ours
    for _ in range(4000):
        noise = torch.randn(count, 50, generator=chance, dtype=torch.float64) * spread / (scale / count) ** 0.5
        gradients = mean + noise
        squares, whole = float(gradients.square().sum()), float(gradients.mean(0).square().sum())
        averages.add(*estimates(squares, whole, count, scale), scale)
    assert averages.var == pytest.approx(float(small), rel=0.02)
    assert averages.sqr == pytest.approx(float(mean.square().sum()), rel=0.02)
    true = float((small + mean.square().sum()) / (small / scale + mean.square().sum()))
    assert averages.gain == pytest.approx(true, rel=0.02)
    assert averages.noise_scale == pytest.approx(float(small / mean.square().sum()), rel=0.03)


def test_gains_reach_from_one_without_noise_to_the_scale_without_signal():
    for gradients, wanted in ((torch.ones(8, 5), 1.0), (torch.tensor([[1.0], [-1.0]] * 4), 8.0)):
        averages = Averages(-1.0)
        assert averages.gain == 1.0
        averages.add(*estimates(float(gradients.square().sum()), float(gradients.mean(0).square().sum()), 8, 8.0), 8.0)
        assert averages.gain == wanted


def test_averages_are_plain_means_at_first_and_follow_the_small_batch_when_ranks_come_or_go():
    averages = Averages(0.5)
    averages.add(2.0, 1.0, 4.0)
    averages.add(4.0, 3.0, 4.0)
    assert (averages.var, averages.sqr) == (3.0, 2.0)
    averages.add(6.0, 2.0, 8.0)  # as many samples, in small batches of half the size, whose variance is twice
    assert averages.var == 6.0
    assert averages.gain == pytest.approx((6 + 2) / (6 / 8 + 2))


def measured(job):
    """The averages, the newest step included."""
    gain = job.kept["optim.adascale"].state
    assert isinstance(gain, Gain)
    gain.take_in()
    return gain.averages


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5))


def batches(step, count, size=4):
    chance = torch.Generator().manual_seed(step)
    inputs, targets = (
        torch.randn(count * size, 3, generator=chance),
        torch.randint(5, (count * size,), generator=chance),
    )
    return list(zip(inputs.split(size), targets.split(size), strict=True))


def trained(*features, micro=4, steps=6, optimizer=None):
    features = (optimizer or optim.SGD(lr=0.1), *features)
    job = compose(Job(net(), world=World()), features)
    seen = []
    for step in range(steps):
        job.step(*batches(step, micro))
        seen.append((job.numbers["gain"], job.numbers["noise_scale"], job.progress.position))
    return job, seen


def by_hand(steps, micro=4, adam=False):
    """Each step's (var, sqr), from gradients of the same micro-batches one at a time."""
    job = compose(Job(net(), world=World()), [optim.AdamW() if adam else optim.SGD(lr=0.1), optim.AdaScale()])
    found = []
    for step in range(steps):
        gradients = []
        for inputs, targets in batches(step, micro):
            loss = nn.functional.cross_entropy(job.module(inputs), targets)
            grads = torch.autograd.grad(loss, list(job.module.parameters()))
            if adam and step:
                state = job.built_optimizer.state
                scalings = [state[p]["exp_avg_sq"].sqrt() + 1e-8 for p in job.module.parameters()]
                grads = [grad / scaling for grad, scaling in zip(grads, scalings, strict=True)]
            gradients.append(torch.cat([grad.flatten() for grad in grads]))
        rows = torch.stack(gradients).double()
        mean = float(rows.mean(0).square().sum())
        found.append(estimates(float(rows.square().sum()), mean, micro, float(micro)))
        job.step(*batches(step, micro))
    job.close()
    return found


@pytest.mark.parametrize("adam", [False, True])
def test_what_a_job_measures_is_what_its_micro_batches_have(adam):
    averages, wanted = Averages(-1.0), [1.0, 1.0]
    for var, sqr in by_hand(5, adam=adam)[1:]:  # the first step's divisor is not known
        averages.add(var, sqr, 4.0)
        wanted.append(averages.gain)
    job, seen = trained(optim.AdaScale(), optimizer=optim.AdamW() if adam else None)
    job.close()
    assert [gain for gain, _, _ in seen] == pytest.approx(wanted, rel=1e-4)
    assert [position for _, _, position in seen] == pytest.approx([sum(wanted[: n + 1]) for n in range(6)], rel=1e-4)


def test_clipping_after_it_changes_no_estimate():
    still = optim.SGD(lr=1e-12)  # so that clipped steps lead to the same weights
    ends = []
    for more in ((), (optim.Clip(max_norm=0.01),)):
        job, _ = trained(*more, optim.AdaScale(), steps=3, optimizer=still)
        ends.append(measured(job))
        job.close()
    assert ends[0].sqr == pytest.approx(ends[1].sqr, rel=1e-5)
    assert ends[0].var == pytest.approx(ends[1].var, rel=1e-5)


def test_the_rate_is_the_schedules_times_the_gain_and_comes_back():
    rates, gain = [], 1.0
    job = compose(
        Job(net(), world=World()),
        [optim.SGD(lr=0.1), optim.AdaScale(), optim.Schedule(shape="constant", warmup=10)],
    )
    job.built_optimizer.register_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
    for step in range(5):
        before = job.progress.position
        job.step(*batches(step, 4))
        gain = job.numbers["gain"]
        assert rates[-1] == pytest.approx(0.1 * (before + 1) / 10 * gain)
        assert job.built_optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * (before + 1) / 10)
        assert job.progress.position == pytest.approx(before + gain)
    assert gain > 1.5
    job.close()


def test_of_consecutive_steps_half_the_squared_difference_is_the_noise():
    """At a learning rate of almost nothing, gradients differ by their batches alone."""
    job, _ = trained(optim.AdaScale(consecutive=True, scale=4.0), micro=1, steps=200, optimizer=optim.SGD(lr=1e-9))
    averages = measured(job)
    rows = []
    for step in range(200):
        ((inputs, targets),) = batches(step, 1)
        loss = nn.functional.cross_entropy(job.module(inputs), targets)
        grads = torch.autograd.grad(loss, list(job.module.parameters()))
        rows.append(torch.cat([grad.flatten() for grad in grads]))
    found = torch.stack(rows)
    assert averages.var == pytest.approx(4 * float(found.var(0).sum()), rel=0.1)
    job.close()


def test_one_gradient_a_step_is_refused():
    with pytest.raises(ConfigError, match="consecutive = true"):
        trained(optim.AdaScale(), micro=1)
    with pytest.raises(ConfigError, match="needs `scale`"):
        trained(optim.AdaScale(consecutive=True))
    with pytest.raises(ConfigError, match="1 or more"):
        trained(optim.AdaScale(scale=0.5))
    with pytest.raises(ConfigError, match="below 1"):
        trained(optim.AdaScale(smoothing=1.0))


def test_a_model_without_accumulation_gets_back_its_gradients_and_hooks_leave():
    job, _ = trained(optim.AdaScale(), steps=1)
    parameter = next(job.module.parameters())
    assert parameter._backward_hooks
    job.close()
    assert not parameter._backward_hooks
