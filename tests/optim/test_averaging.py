"""Averages of weights: their formulas, what evaluations see and what training does not, what leaves a run."""

import copy

import pytest
import statistics_ranks
import torch
from torch import nn

from shoestring import optim
from shoestring.checkpoint import Plain
from shoestring.core.compose import compose
from shoestring.core.errors import ConfigError
from shoestring.core.feature import export_weights
from shoestring.core.job import Job, attachments_of
from shoestring.core.world import World
from shoestring.optim.schedule_free import ScheduleFreeAdamW
from shoestring.testing.suite import shared


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
        path.append({name: each.detach().clone() for name, each in attachments_of(job).module.named_parameters()})
    return job, path


def evaluated(job):
    with attachments_of(job).evaluating():
        return {name: each.detach().clone() for name, each in attachments_of(job).module.named_parameters()}


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
    close(dict(attachments_of(job).module.named_parameters()), path[-1], rtol=0, atol=0)
    _, without = run()
    close(path[-1], without[-1], rtol=0, atol=0)
    kept = {name: each.state.state_dict() for name, each in job.kept.items()}
    close(export_weights([feature], attachments_of(job).weights(), kept), evaluated(job), rtol=0, atol=0)
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
    close(dict(attachments_of(job).module.named_parameters()), path[-1], rtol=0, atol=0)
    kept = {name: each.state.state_dict() for name, each in job.kept.items()}
    close(export_weights([feature], attachments_of(job).weights(), kept), seen, rtol=1e-6, atol=1e-7)
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


# -- what follows from the weights -------------------------------------------------------------------------------------


class Normed(nn.Module):
    """Two batch norms, on inputs whose mean and scale the layers before them decide."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        norms = [nn.BatchNorm1d(16) for _ in range(2)]
        self.layers = nn.Sequential(nn.Linear(8, 16), norms[0], nn.ReLU(), nn.Linear(16, 16), norms[1], nn.ReLU())
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        return self.head(self.layers(x["x"]))


def drawn(step, count=64):
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(step)) * 2 + 1
    return {"x": x, "y": torch.sin(x).sum(1, keepdim=True) * x[:, :1]}


def normed(feature, folder=None, model=None):
    features = [feature] if isinstance(feature, optim.ScheduleFree) else [feature, optim.AdamW(lr=0.02)]
    features += [Plain(folder=str(folder), every=10)] if folder else []
    loss = lambda y, x: ((y - x["y"]).square().sum(), torch.tensor(len(y)))  # noqa: E731
    return compose(Job(model or Normed(), forward=lambda m, x: m(x), loss=loss, world=World()), features)


def running(module):
    return {name: each.clone() for name, each in module.named_buffers() if "running" in name}


AVERAGES = [optim.EMA(decay=0.95), optim.LAWA(count=5, every=8), optim.ScheduleFree(lr=0.02)]


@pytest.mark.parametrize("feature", AVERAGES, ids=lambda feature: feature.name)
def test_an_average_is_evaluated_and_exported_with_statistics_of_its_own(feature):
    """The loss is that with statistics of all data, within 2%; with those of the newest weights it is 4 to 15% off."""
    with normed(feature) as job:
        for step in range(200):
            job.step(drawn(step))
        newest, held_out = running(attachments_of(job).module), drawn(10**6, 4096)
        total, count = job.evaluate([held_out])
        with attachments_of(job).evaluating():
            inside = {name: each.clone() for name, each in attachments_of(job).module.state_dict().items()}
        assert all(torch.equal(running(attachments_of(job).module)[name], each) for name, each in newest.items())
        kept = {name: each.state.state_dict() for name, each in job.kept.items()}
        leaving = export_weights([feature], attachments_of(job).weights(), kept)
        for name, each in inside.items():
            torch.testing.assert_close(leaving[name], each)
        anew = Normed()
        anew.load_state_dict(inside)
        for norm in anew.modules():
            if isinstance(norm, nn.BatchNorm1d):
                norm.reset_running_stats()
                norm.momentum = None
        with torch.no_grad():
            for step in range(184, 200):
                anew(drawn(step))
            right = float((anew.eval()(held_out) - held_out["y"]).square().mean())
            anew.load_state_dict(inside | newest)
            mixed = float((anew(held_out) - held_out["y"]).square().mean())
    assert total / count == pytest.approx(right, rel=0.02)
    assert abs(mixed / right - 1) > 2 * abs(total / count / right - 1)


@pytest.mark.parametrize("feature", AVERAGES, ids=lambda feature: feature.name)
def test_statistics_go_on_from_a_checkpoint(feature, tmp_path):
    def ends(job):
        total, count = job.evaluate([drawn(10**6)])
        with attachments_of(job).evaluating():
            return total / count, running(attachments_of(job).module)

    with normed(feature, tmp_path / "whole") as job:
        for step in range(30):
            job.step(drawn(step))
            if step == 19:
                early = ends(job)
        whole = ends(job)
    with normed(feature, tmp_path / "parts") as job:
        for step in range(20):
            job.step(drawn(step))
    with normed(feature, tmp_path / "parts") as job:
        assert job.restore("auto") == 20
        assert ends(job)[0] == early[0]
        for step in range(20, 30):
            job.step(drawn(step))
        rest = ends(job)
    assert rest[0] == whole[0]
    assert all(torch.equal(whole[1][name], each) for name, each in rest[1].items())


@pytest.mark.parametrize("feature", [optim.EMA(decay=0.5), optim.LAWA(count=2, every=2)], ids=lambda each: each.name)
def test_a_layer_that_is_unfrozen_and_frozen_again_is_averaged(feature):
    model = net()
    model[0].requires_grad_(False)
    optimizer = lambda parameters: torch.optim.SGD(model.parameters(), lr=0.1)  # noqa: E731
    with compose(Job(model, optimizer=optimizer, world=World()), [feature]) as job:
        for step in range(24):
            model[0].requires_grad_(8 <= step < 16)
            job.step(batch(step))
            if step == 15:
                frozen = model[0].weight.detach().clone()
                assert (evaluated(job)["0.weight"] - frozen).norm() > 1e-3
        seen = evaluated(job)
        torch.testing.assert_close(seen["0.weight"], frozen, rtol=0.02, atol=1e-3)
        assert (seen["2.weight"] - model[2].weight).norm() > 1e-3


@pytest.mark.parametrize("shard", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_ranks_have_the_same_statistics_as_one_process_with_all_micro_batches(request, shard):
    pool = shared(request.config)["pool"]
    (first, second), alone = pool.call(statistics_ranks.evaluated, shard=shard), statistics_ranks.evaluated("")
    assert first == second
    for found, wanted in zip(first["statistics"], alone["statistics"], strict=True):
        assert found == pytest.approx(wanted, rel=1e-9)
