"""AdaScale: estimates of known covariances, gains at both ends, accumulation as good as ranks, and what is refused."""

import pytest
import statistics_ranks
import torch
from torch import nn

from shoestring import comm, memory, optim, parallel
from shoestring.core.compose import compose
from shoestring.core.errors import ConfigError
from shoestring.core.job import Job, attachments_of
from shoestring.core.world import World
from shoestring.optim.adascale import Averages, Gain, estimates
from shoestring.testing.scenarios import encode
from shoestring.testing.suite import shared


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
            loss = nn.functional.cross_entropy(attachments_of(job).module(inputs), targets)
            grads = torch.autograd.grad(loss, list(attachments_of(job).module.parameters()))
            if adam and step:
                state = job.optimizer.state
                scalings = [state[p]["exp_avg_sq"].sqrt() + 1e-8 for p in attachments_of(job).module.parameters()]
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


@pytest.mark.parametrize("consecutive", [False, True])
@pytest.mark.parametrize(
    ("optimizer", "rule", "root"),
    [
        (optim.SGD(lr=0.1), "auto", False),
        (optim.SGD(lr=0.1), "adam", True),
        (optim.AdamW(lr=0.1), "auto", True),
        (optim.AdamW(lr=0.1), "sgd", False),
        (optim.AdamW8bit(lr=0.1), "auto", True),
    ],
    ids=["sgd", "sgd as adam", "adamw", "adamw as sgd", "adamw of 8 bits"],
)
def test_the_factor_is_the_gain_or_its_root_as_the_rule_says(optimizer, rule, root, consecutive):
    """The steps of the optimizer themselves are as long as its rate says: they are made again by hand."""
    settings = optim.AdaScale(rule=rule, consecutive=consecutive, scale=4.0 if consecutive else 0.0)
    job, rates = compose(Job(net(), world=World()), [optimizer, settings]), []
    job.optimizer.register_step_pre_hook(lambda built, *_: rates.append(built.param_groups[0]["lr"]))
    with job:
        gains = []
        for step in range(6):
            job.step(*batches(step, 4))
            gains.append(job.numbers["gain"])
            assert rates[-1] == pytest.approx(0.1 * (gains[-1] ** 0.5 if root else gains[-1]))
        assert max(gains) > 1.2


def test_the_rate_is_the_schedules_times_the_gain_and_comes_back():
    rates, gain = [], 1.0
    job = compose(
        Job(net(), world=World()),
        [optim.SGD(lr=0.1), optim.AdaScale(), optim.Schedule(shape="constant", warmup=10)],
    )
    job.optimizer.register_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
    for step in range(5):
        before = job.progress.position
        job.step(*batches(step, 4))
        gain = job.numbers["gain"]
        assert rates[-1] == pytest.approx(0.1 * (before + 1) / 10 * gain)
        assert job.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * (before + 1) / 10)
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
        loss = nn.functional.cross_entropy(attachments_of(job).module(inputs), targets)
        grads = torch.autograd.grad(loss, list(attachments_of(job).module.parameters()))
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
        trained(optim.AdaScale(decay=1.0))


def test_a_model_without_accumulation_gets_back_its_gradients_and_hooks_leave():
    job, _ = trained(optim.AdaScale(), steps=1)
    parameter = next(attachments_of(job).module.parameters())
    assert parameter._backward_hooks
    job.close()
    assert not parameter._backward_hooks


INEXACT = (
    comm.BF16(), comm.PowerSGD(), comm.Quantize(), comm.Sign(), comm.TernGrad(), comm.TopK(),
    comm.RandomK(), comm.DGC(), comm.Selective(codec="sign"), comm.Auto(allow=("bf16",)),
    comm.Dense(transport=comm.Transport(kb_per_step=4.0)),
    comm.Dense(transport=comm.Transport(kb_per_step=4.0, select="per-node")),
    comm.BF16(transport=comm.Transport(kb_per_step=1e6, select="uniform")),
)  # fmt: skip


@pytest.mark.parametrize("exchange", INEXACT, ids=lambda each: each.name)
def test_what_an_exchange_loses_would_count_as_noise_and_is_refused(exchange):
    job = Job(nn.Linear(3, 2))
    for spread in ((), (parallel.DDP(),), (parallel.FSDP(hosts="leave"),)):
        for consecutive in (False, True):
            feature = optim.AdaScale(scale=2.0, consecutive=consecutive)
            attachments_of(job).features = (*spread, exchange, feature)
            if consecutive and exchange.inexact == "numbers":  # averages that are rounded are compared with each other
                feature.check(attachments_of(job))
                continue
            with pytest.raises(ConfigError, match=exchange.name):
                feature.check(attachments_of(job))


def test_exact_exchanges_are_taken_and_hooks_of_ddp_are_not(monkeypatch):
    job, feature = Job(nn.Linear(3, 2)), optim.AdaScale()
    attachments_of(job).features = (parallel.DDP(), comm.Dense(), comm.Selective(codec="dense"), feature)
    feature.check(attachments_of(job))
    monkeypatch.setattr("shoestring._torch.has_hook", lambda model: True)
    with pytest.raises(ConfigError, match="communication hook"):
        feature.check(attachments_of(job))


def test_ranks_that_train_apart_would_have_gains_of_their_own_and_are_refused():
    job, feature = Job(nn.Linear(3, 2), world=World(size=2, local_size=2)), optim.AdaScale(scale=2.0, consecutive=True)
    attachments_of(job).features = (comm.LocalSGD(replica="rank"), feature)
    with pytest.raises(ConfigError, match=r"comm\.localsgd"):
        feature.check(attachments_of(job))


@pytest.mark.parametrize("optimizer", [(), (optim.AdamW(),), (optim.LAMB(),)], ids=["default", "adamw", "lamb"])
@pytest.mark.parametrize("divides", [memory.Zero(), memory.Zero(stage=1), memory.Offload()], ids=lambda each: f"{each}")
def test_gradients_as_adam_scales_them_are_refused_where_ranks_divide_its_averages(divides, optimizer):
    job, feature = Job(nn.Linear(3, 2)), optim.AdaScale()
    attachments_of(job).features = (divides, *optimizer, feature)
    with pytest.raises(ConfigError, match="divides"):
        feature.check(attachments_of(job))
    for allowed in (optim.AdaScale(rule="sgd"), optim.AdaScale(scale=2.0, consecutive=True)):
        allowed.check(attachments_of(job))


def test_a_step_that_overflowed_enters_no_average():
    job = Job(nn.Linear(3, 2), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), world=World())
    with compose(job, [optim.AdaScale()]) as job:
        gain = job.kept["optim.adascale"].state
        gain.pending = [torch.tensor(float("inf")), torch.tensor(1.0)], 2, None
        before = dict(vars(measured(job)))
        assert before == dict(vars(Averages(-1.0)))


EXACT = [
    (parallel.DDP(),),
    (parallel.DDP(), comm.Dense()),
    (comm.Dense(transport=comm.Transport(parts=2)),),
    (memory.Zero(),),
]
LOSSY = [
    comm.RandomK(density=0.5),
    comm.PowerSGD(rank=1),
    comm.Dense(transport=comm.Transport(kb_per_step=1.0)),
    comm.Quantize(),
    comm.BF16(),
]


@pytest.mark.slow
@pytest.mark.parametrize("exchange", EXACT, ids=lambda each: "-".join(feature.name for feature in each))
def test_the_same_batch_on_both_ranks_gains_nothing(exchange, request):
    """What both ranks see alike is no noise, whatever sends it: the gain is 1, but for the rounding of a quotient."""
    pool = shared(request.config)["pool"]
    features = [encode(each) for each in (*exchange, optim.SGD(lr=0.1), optim.AdaScale(decay=0.5))]
    for gains in pool.call(statistics_ranks.gains, features=features, alike=True):
        assert gains == pytest.approx([1.0] * 5, abs=1e-15)
    (one, other) = pool.call(statistics_ranks.gains, features=features, alike=False)
    assert one == other and max(one) > 1.1


@pytest.mark.slow
@pytest.mark.parametrize("exchange", LOSSY, ids=lambda each: f"{each.name}-{each.transport.kb_per_step:g}")
def test_what_an_exchange_loses_is_not_taken_for_noise(exchange, request):
    pool = shared(request.config)["pool"]
    features = [encode(each) for each in (parallel.DDP(), exchange, optim.SGD(lr=0.1), optim.AdaScale(decay=0.5))]
    message = f"`optim.adascale` would measure the errors of `{exchange.name}` as gradient noise"
    assert all(message in error for error in pool.call(statistics_ranks.gains, features=features, alike=True))
