"""Averages of weights: their formulas, what evaluations see and what training does not, what leaves a run."""

import copy

import pytest
import torch
from torch import nn

from shoestring import optim
from shoestring.core.compose import compose
from shoestring.core.errors import ConfigError
from shoestring.core.feature import export_weights
from shoestring.core.job import Job
from shoestring.core.world import World
from shoestring.optim.schedule_free import ScheduleFreeAdamW


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5))


def batch(step):
    chance = torch.Generator().manual_seed(step)
    return torch.randn(4, 3, generator=chance), torch.randint(5, (4,), generator=chance)


def run(*features, steps=12, optimizer=None):
    """The job, and the weights after each step."""
    job = compose(Job(net(), world=World()), [optimizer or optim.SGD(lr=0.1), *features])
    path = []
    for step in range(steps):
        job.step(batch(step))
        path.append({name: each.detach().clone() for name, each in job.module.named_parameters()})
    return job, path


def evaluated(job):
    with job.evaluating():
        return {name: each.detach().clone() for name, each in job.module.named_parameters()}


def close(ones, others, **how):
    assert ones.keys() == others.keys()
    for name, one in ones.items():
        torch.testing.assert_close(one, others[name], **how)


def moving(path, decay, start):
    average = start
    for step, weights in enumerate(path, 1):
        kept = min(decay, (1 + step) / (10 + step))
        average = {name: kept * average[name] + (1 - kept) * weights[name] for name in weights}
    return average


def latest(path, count, every):
    chosen = [weights for step, weights in enumerate(path, 1) if step % every == 0][-count:]
    return {name: torch.stack([weights[name] for weights in chosen]).mean(0) for name in path[0]}


@pytest.mark.parametrize(
    ("feature", "wanted"),
    [
        (optim.EMA(decay=0.4), lambda path: moving(path, 0.4, {n: p.detach() for n, p in net().named_parameters()})),
        (optim.LAWA(count=3, every=2), lambda path: latest(path, 3, 2)),
        (optim.LAWA(count=9, every=5), lambda path: latest(path, 9, 5)),
    ],
)
def test_evaluations_see_the_average_and_training_does_not(feature, wanted):
    job, path = run(feature)
    close(evaluated(job), wanted(path), rtol=1e-4, atol=1e-5)
    close(dict(job.module.named_parameters()), path[-1], rtol=0, atol=0)
    _, without = run()
    close(path[-1], without[-1], rtol=0, atol=0)
    kept = {name: each.state.state_dict() for name, each in job.kept.items()}
    close(export_weights([feature], job.weights(), kept), evaluated(job), rtol=0, atol=0)
    job.close()


@pytest.mark.parametrize("feature", [optim.EMA(decay=0.4), optim.LAWA(count=3, every=2)])
def test_averages_go_on_where_they_were(feature):
    whole, _ = run(feature, steps=12)
    half, _ = run(feature, steps=7)
    state = {name: copy.deepcopy(each.state.state_dict()) for name, each in half.kept.items()}
    rest = compose(Job(net(), world=World()), [optim.SGD(lr=0.1), feature])
    for name, each in rest.kept.items():
        each.state.load_state_dict(state[name])
    for step in range(7, 12):
        rest.step(batch(step))
    close(evaluated(rest), evaluated(whole), rtol=0, atol=0)
    for job in (whole, half, rest):
        job.close()


def test_schedule_free_is_the_papers_in_float64():
    """x, y and z kept apart, as the paper has them, with a warm-up."""
    chance = torch.Generator().manual_seed(0)
    start = torch.randn(6, 4, generator=chance, dtype=torch.float64)
    target = torch.randn(6, 4, generator=chance, dtype=torch.float64)
    beta1, beta2, decay, eps = 0.9, 0.99, 0.05, 1e-8
    parameter = nn.Parameter(start.clone())
    ours = ScheduleFreeAdamW([parameter], betas=(beta1, beta2), eps=eps, weight_decay=decay)
    x, z, v, sums, largest = start.clone(), start.clone(), torch.zeros_like(start), 0.0, 0.0
    for step in range(1, 101):
        lr = 0.05 * min(step / 10, 1.0)
        y = (1 - beta1) * z + beta1 * x
        torch.testing.assert_close(parameter.detach(), y, rtol=1e-9, atol=1e-9)
        grad = (y - target) * (1 + 0.2 * (step % 3))
        v = beta2 * v + (1 - beta2) * grad**2
        rate = lr * (1 - beta2**step) ** 0.5
        z = z - rate * (grad / (v.sqrt() + eps) + decay * y)
        largest = max(largest, rate)
        sums += largest**2
        x = x + (z - x) * largest**2 / sums
        ours.param_groups[0]["lr"] = lr
        parameter.grad = grad
        ours.step()
    assert (ours.average()[parameter] - x).norm() / x.norm() < 1e-6  # through single precision


def test_schedule_free_evaluates_and_exports_its_average():
    feature = optim.ScheduleFree(lr=0.05)
    job, path = run(optimizer=feature)
    seen = evaluated(job)
    assert any((seen[name] - path[-1][name]).abs().max() > 1e-4 for name in seen)
    close(dict(job.module.named_parameters()), path[-1], rtol=0, atol=0)
    kept = {name: each.state.state_dict() for name, each in job.kept.items()}
    close(export_weights([feature], job.weights(), kept), seen, rtol=1e-6, atol=1e-7)
    job.close()


@pytest.mark.parametrize(
    ("features", "said"),
    [
        ([optim.EMA(decay=1.0)], "decay"),
        ([optim.LAWA(count=0)], "count"),
        ([optim.ScheduleFree(), optim.Schedule(warmup=0)], "replaces the decay"),
        ([optim.ScheduleFree(betas=(0.0, 0.9))], "begin with a positive"),
    ],
)
def test_wrong_settings_are_refused(features, said):
    with pytest.raises(ConfigError, match=said):
        compose(Job(net(), world=World()), features)
