"""Parameter groups by name: rates and decay against hand-made groups, and what is refused."""

import tomllib

import pytest
import torch
from torch import nn

from shoestring import optim
from shoestring.core.compose import compose
from shoestring.core.errors import ConfigError
from shoestring.core.job import Job, attachments_of
from shoestring.core.world import World
from shoestring.optim import Group
from shoestring.run import parse


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 5))


def batch():
    return torch.ones(2, 3), torch.tensor([0, 1])


def trained(*features, steps=3):
    job = compose(Job(net(), world=World()), features)
    for _ in range(steps):
        job.step(batch())
    return job


@pytest.mark.parametrize(
    ("settings", "kind", "defaults"),
    [
        (optim.AdamW, torch.optim.AdamW, {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}),
        (optim.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "fused": True}),
    ],
)
def test_groups_by_name_are_those_that_torch_would_be_given(settings, kind, defaults):
    job = trained(
        settings(groups=(Group(pattern="0.*", lr_scale=0.5, decay_scale=0.5), Group(pattern="*.bias", lr_scale=0)))
    )
    by_hand, lr, decay = net(), defaults["lr"], defaults.get("weight_decay", 0.0)
    named = dict(by_hand.named_parameters())
    groups = [
        {"params": [named["2.weight"]]},
        {"params": [named["1.weight"]], "weight_decay": 0.0},
        {"params": [named["0.weight"]], "lr": lr * 0.5, "weight_decay": decay * 0.5},
        {"params": [named["0.bias"]], "lr": lr * 0.5, "weight_decay": 0.0},
        {"params": [named["1.bias"], named["2.bias"]], "lr": 0.0, "weight_decay": 0.0},
    ]
    optimizer = kind(groups, **defaults | {"weight_decay": decay})
    for _ in range(3):
        inputs, targets = batch()
        nn.functional.cross_entropy(by_hand(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in attachments_of(job).module.named_parameters():
        assert torch.equal(parameter, named[name]), name
    assert torch.equal(attachments_of(job).module[2].bias, net()[2].bias)


@pytest.mark.parametrize("settings", [optim.AdamW, optim.AdamW8bit, optim.Muon])
def test_a_group_may_have_betas_of_its_own(settings):
    job = trained(settings(groups=(Group(pattern="0.*", betas=(0.0, 0.99)),)))
    found = {tuple(group["betas"]) for group in job.optimizer.param_groups if not group.get("muon")}
    assert found == {(0.0, 0.99), (0.9, 0.95)}


def test_betas_by_group_are_those_that_torch_would_be_given():
    job = trained(optim.AdamW(groups=(Group(pattern="0.*", betas=(0.0, 0.9)), Group(pattern="1.*"))))
    by_hand = net()
    named = dict(by_hand.named_parameters())
    groups = [
        {"params": [named[name]], "weight_decay": 0.1 if "weight" in name and name[0] != "1" else 0.0}
        | ({"betas": (0.0, 0.9)} if name[0] == "0" else {})
        for name in named
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)
    for _ in range(3):
        inputs, targets = batch()
        nn.functional.cross_entropy(by_hand(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in attachments_of(job).module.named_parameters():
        assert torch.equal(parameter, named[name]), name


def test_a_schedule_scales_the_rate_of_each_group():
    job = trained(optim.SGD(lr=0.4, groups=(Group(pattern="0.*", lr_scale=0.5),)), optim.Schedule(warmup=4), steps=2)
    assert sorted({group["lr"] for group in job.optimizer.param_groups}) == pytest.approx([0.1, 0.2])


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([Group(pattern="3.*")], r"no trained parameter is in the group `3\.\*`"),
        ([Group(pattern="*"), Group(pattern="0.*")], r"in the group `0\.\*` .*`0.weight` is in an earlier group"),
        ([Group(pattern="*", lr_scale=-1.0)], r"`optim.sgd.groups\[0\].lr_scale` must be zero or positive"),
        ([Group(pattern="*", decay_scale=-1.0)], r"`optim.sgd.groups\[0\].decay_scale` must be zero or positive"),
        ([Group(pattern="*", betas=(0.0, 0.9))], r"`optim.sgd` has no betas per group, but `groups\[0\]` sets them"),
    ],
)
def test_groups_that_cannot_be_are_refused(groups, said):
    with pytest.raises(ConfigError, match=said):
        trained(optim.SGD(groups=tuple(groups)))


@pytest.mark.parametrize("betas", [(0.9,), (0.9, 1.0), (-0.1, 0.9), (0.1, 0.2, 0.3), (float("nan"), 0.9)])
def test_betas_are_two_numbers_below_one(betas):
    with pytest.raises(ConfigError, match=r"`optim.adamw.groups\[0\].betas` must be two numbers in \[0, 1\)"):
        trained(optim.AdamW(groups=(Group(pattern="*", betas=betas),)))
    for settings in (optim.LAMB, optim.ScheduleFree):
        with pytest.raises(ConfigError, match="has no betas per group"):
            trained(settings(groups=(Group(pattern="*", betas=(0.0, 0.9)),)))


def test_groups_are_an_array_of_tables_in_a_run_file():
    document = {"optim": {"adamw": {"groups": [{"pattern": "*.bias", "lr_scale": 2, "betas": [0, 0.9]}]}}}
    run = parse(document)
    assert run.features == (optim.AdamW(groups=(Group(pattern="*.bias", lr_scale=2.0, betas=(0.0, 0.9)),)),)
    assert parse(run.document).features == parse(tomllib.loads(run.toml)).features == run.features
    for wrong, said in (
        ([{"patern": "*"}], r"unknown key `patern` in \[optim.adamw.groups\[0\]\] .*`pattern`"),
        ([{"pattern": "*", "lr_scale": "2"}], r"`optim.adamw.groups\[0\].lr_scale` must be a number"),
        ([{"lr_scale": 2.0}], r"`optim.adamw.groups\[0\].pattern` is missing"),
        ([3], r"`optim.adamw.groups\[0\]` must be a table"),
        ("*", "`optim.adamw.groups` must be a list of tables"),
    ):
        with pytest.raises(ConfigError, match=said):
            parse({"optim": {"adamw": {"groups": wrong}}})


# -- a schedule of the user's own --------------------------------------------------------------------------------------


def halving(step, total):
    return 0.5**step


def negative(step, total):
    return -1.0


def test_a_schedule_may_be_a_function_of_the_user_s_own():
    job = trained(optim.SGD(lr=0.8), optim.Schedule(function=f"{__name__}:halving"), steps=3)
    assert job.optimizer.param_groups[0]["lr"] == pytest.approx(0.2)
    assert attachments_of(job).features[-1].explain(attachments_of(job)) == f"by `{__name__}:halving`"


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (f"{__name__}:negative", "returned -1.0 for the first step"),
        (f"{__name__}:halve", "has no callable `halve` .*`halving`"),
        ("halving", "`optim.schedule.function` is 'halving', not of the form"),
    ],
)
def test_a_function_that_is_no_schedule_is_refused_before_the_first_step(function, said):
    with pytest.raises(ConfigError, match=said):
        trained(optim.Schedule(function=function), steps=0)
