"""LARS and LAMB against references in float64; what bounds trust ratios; norms of whole tensors."""

import copy

import pytest
import torch
from torch import nn

from benchmarks.optim import references
from benchmarks.optim.references import STEPS, furthest, grouped, lambed, larsed, problem, train
from shoestring import optim
from shoestring.core.compose import compose
from shoestring.core.errors import ConfigError
from shoestring.core.job import Job, attachments_of
from shoestring.core.world import World
from shoestring.optim import layerwise
from shoestring.optim.layerwise import Lamb, Lars
from shoestring.optim.trust import BLOCK, DynamicBound


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("clip", ["none", "larc"])
def test_lars_is_the_papers_in_float64_and_native_in_float32(inside, nesterov, clip):
    how = {"momentum": 0.9, "nesterov": nesterov, "trust": 0.02}
    lrs = [2.0, 0.05]
    for dtype, native, steps, most in (
        (torch.float64, False, STEPS, 1e-12),
        (torch.float32, True, 15, 1e-5),  # rounding grows with the steps
        (torch.float32, False, 15, 1e-5),
    ):
        with pytest.MonkeyPatch.context() as patch:
            if not native:
                patch.setattr(layerwise, "_lars", lambda: None)
            weights, gradients = problem()
            wanted = larsed(weights, gradients, lrs, decay=0.01, inside=inside, larc=clip == "larc", steps=steps, **how)
            weights, gradients = problem(dtype)
            optimizer = Lars(grouped(weights), weight_decay=0.01, rate_in_velocity=inside, clip=clip, **how)
            assert furthest(train(optimizer, weights, gradients, lrs, steps), wanted) < most


def test_the_two_forms_agree_at_a_constant_rate_and_differ_in_a_warm_up(monkeypatch):
    def both():
        ends = []
        for inside in (True, False):
            weights, gradients = problem()
            optimizer = Lars(grouped(weights), trust=0.02, rate_in_velocity=inside)
            ends.append(train(optimizer, weights, gradients, [1.0, 0.05]))
        return furthest(*ends)

    assert both() > 1e-3
    monkeypatch.setattr(references, "rate", lambda step: 1.0)
    assert both() < 1e-12


@pytest.mark.parametrize("most", [1.0, 10.0])
def test_lamb_is_the_papers_in_float64(most):
    weights, gradients = problem()
    wanted = lambed(weights, gradients, 0.02, decay=0.01, most=most)
    optimizer = Lamb(grouped(weights), betas=(0.9, 0.999), weight_decay=0.01, max_ratio=most)
    assert furthest(train(optimizer, weights, gradients, [0.02, 0.02]), wanted) < 1e-12
    wanted = lambed(*problem(), 0.02, decay=0.01, most=most, steps=15)
    weights, gradients = problem(torch.float32)
    optimizer = Lamb(grouped(weights), betas=(0.9, 0.999), weight_decay=0.01, max_ratio=most)
    assert furthest(train(optimizer, weights, gradients, [0.02, 0.02], steps=15), wanted) < 1e-5


def test_gradients_are_left_as_they_are():
    for kind in (Lars, Lamb):
        weights, gradients = problem(torch.float32)
        optimizer = kind(grouped(weights))
        grads = [each.float() for each in gradients(weights, 0)]
        for each, grad in zip(weights, grads, strict=True):
            each.grad = grad.clone()
        optimizer.step()
        found = [each.grad for each in weights if each.grad is not None]
        assert all(map(torch.equal, found, grads))


@pytest.mark.parametrize("kind", [Lars, Lamb])
def test_native_steps_are_torchs_whatever_the_sizes_and_do_not_depend_on_threads(kind, monkeypatch):
    """Of more tensors than a wave has, smaller and larger than a block and than a wave."""
    sizes = [1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 70 * BLOCK, 3, *[2 * BLOCK] * 40]

    def run(threads=1):
        chance = torch.Generator().manual_seed(0)
        weights = [nn.Parameter(torch.randn(size, generator=chance)) for size in sizes]
        optimizer = kind([{"params": weights[::2]}, {"params": weights[1::2], "adapts": False}], lr=0.1)
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(threads)
            for _ in range(3):
                for each in weights:
                    each.grad = torch.randn(each.shape, generator=chance)
                optimizer.step()
        finally:
            torch.set_num_threads(before)
        return weights, optimizer.numbers

    weights, numbers = run()
    assert all(map(torch.equal, weights, run(3)[0]))
    monkeypatch.setattr(layerwise, "_lars", lambda: None)
    monkeypatch.setattr(layerwise, "_lamb", lambda: None)
    others, theirs = run()
    for each, other in zip(weights, others, strict=True):
        torch.testing.assert_close(each, other, rtol=1e-5, atol=1e-5)
    assert float(numbers["trust_ratio"]) == pytest.approx(float(theirs["trust_ratio"]), rel=1e-5)


def value(bound):
    found = bound.bound()
    assert found is not None
    return float(found)


def test_the_dynamic_bound_follows_a_quantile_and_opens_with_time():
    bound, ratios = DynamicBound(0.5, 5.0, 10), torch.tensor([1.0, 2.0, 3.0, 40.0, 0.5])
    assert bound.bound() is None
    found = []
    for _ in range(12):
        bound.see(ratios)
        found.append(value(bound))
        bound.step += 1
    assert found[0] == 2.0
    assert found == sorted(found)
    assert found[-1] == pytest.approx(10.0)
    other = DynamicBound(0.5, 5.0, 10)
    other.load_state_dict(bound.state_dict())
    assert value(other) == value(bound)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("resumed_at", [0, 7])
def test_a_run_bounds_ratios_by_the_mean_over_about_ten_steps_of_their_quantile(native, resumed_at, monkeypatch):
    """By the setting, in fp64: the newest quantile counts a tenth, and `bound_warmup` opens the bound."""
    if not native:
        monkeypatch.setattr(layerwise, "_lars", lambda: None)
    how = {"lr": 1.0, "vector_lr": 0.1, "trust_coefficient": 0.02, "momentum": 0.9, "weight_decay": 0.01}
    feature = optim.LARS(**how, ratio_clip="dynamic", quantile=0.4, bound=3.0, bound_warmup=8)

    def built():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5))
        return compose(Job(model, world=World()), [feature])

    def batch(step):
        draw = torch.Generator().manual_seed(step)
        return torch.randn(16, 6, generator=draw) * 3.0 ** (step % 4), torch.randint(5, (16,), generator=draw)

    job, running = built(), None
    model = copy.deepcopy(attachments_of(job).module).double()
    velocities = [torch.zeros_like(each) for each in model.parameters()]
    for step in range(16):
        if step and step == resumed_at:
            saved, job = {name: copy.deepcopy(each.state.state_dict()) for name, each in job.kept.items()}, built()
            for name, each in job.kept.items():
                each.state.load_state_dict(saved[name])
        job.step(batch(step))
        x, y = batch(step)
        weights = list(model.parameters())
        grads = torch.autograd.grad(nn.functional.cross_entropy(model(x.double()), y), weights)
        free = [
            0.02 * w.norm() / (g.norm() + 0.01 * w.norm() + 1e-8) if w.ndim > 1 else torch.tensor(1.0)
            for w, g in zip(weights, grads, strict=True)
        ]
        ratios = torch.stack([each.detach() for each, w in zip(free, weights, strict=True) if w.ndim > 1]).double()
        now = float(torch.quantile(ratios, 0.4))
        first, running = running is None, now if running is None else running
        bound = running * (1 + 2 * min(step / 8, 1))
        for w, g, v, ratio in zip(weights, grads, velocities, free, strict=True):
            matrix = w.ndim > 1
            v.mul_(0.9).add_((1.0 * min(float(ratio), bound) if matrix else 0.1) * (g + (0.01 if matrix else 0) * w))
            w.data -= v
        running = running if first else 0.9 * running + 0.1 * now
        for w, other in zip(weights, attachments_of(job).module.parameters(), strict=True):
            torch.testing.assert_close(other.double(), w.detach(), rtol=2e-4, atol=2e-5)
    assert job.kept["optim.lars"].state.running == pytest.approx(running, rel=1e-3)


def test_dynamic_clipping_is_the_same_natively_and_by_torch(monkeypatch):
    def run():
        weights, gradients = problem(torch.float32)
        bound = DynamicBound(0.5, 3.0, 5)
        optimizer = Lars(grouped(weights), trust=0.02, clip=bound)
        shares, ends = [], []
        for step in range(8):
            for each, grad in zip(weights, gradients(weights, step), strict=True):
                each.grad = grad.float()
            optimizer.step()
            shares.append(float(optimizer.numbers["clipped_tensors"]))
            ends.append([each.detach().clone() for each in weights])
        assert bound.step == 8
        return shares, ends

    shares, ends = run()
    assert shares[0] == 0.5  # of four ratios, the upper two are above the median, with which the bound begins
    monkeypatch.setattr(layerwise, "_lars", lambda: None)
    others, theirs = run()
    assert shares == others
    for one, other in zip(ends, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 5))


def test_shares_of_clipped_tensors_are_published():
    settings = optim.LARS(vector_lr=0.1, ratio_clip="dynamic", quantile=0.4, bound=1.0, bound_warmup=0)
    job = compose(Job(net(), world=World()), [settings])
    job.step((torch.randn(4, 3), torch.tensor([0, 1, 2, 3])))
    assert float(job.numbers["clipped_tensors"]) == 0.5
    assert float(job.numbers["trust_ratio"]) > 0
    job.close()


def test_vectors_have_a_rate_of_their_own_in_each_group():
    group = optim.Group(pattern="2.*", lr_scale=0.5)
    job = compose(Job(net(), world=World()), [optim.LARS(lr=4.0, vector_lr=0.1, groups=(group,))])
    rates = {(each["adapts"], each["lr"], each["weight_decay"]) for each in job.optimizer.param_groups}
    assert rates == {(True, 4.0, 1e-4), (False, 0.1, 0.0), (True, 2.0, 1e-4), (False, 0.05, 0.0)}
    job.close()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (optim.LARS(), "vector_lr"),
        (optim.LARS(vector_lr=0.1, trust_coefficient=0.0), "trust"),
        (optim.LARS(vector_lr=0.1, ratio_clip="dynamic", quantile=1.0), "quantile"),
        (optim.LARS(vector_lr=0.1, bound_warmup=-1), "bound_warmup"),
        (optim.LAMB(max_ratio=0.0), "max_ratio"),
        (optim.LAMB(betas=(0.9, 1.0)), "betas"),
    ],
)
def test_wrong_settings_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        compose(Job(net(), world=World()), [settings])
