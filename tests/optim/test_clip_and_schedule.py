"""Clipping against float64, schedules against their formulas."""

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from shoestring import optim
from shoestring.core.compose import compose
from shoestring.core.errors import ConfigError
from shoestring.core.job import Job, attachments_of
from shoestring.core.kept import Progress
from shoestring.core.world import World


class Given(nn.Module):
    """Its loss is linear, so that its gradients are what it is given."""

    def __init__(self, gradients):
        super().__init__()
        self.given = gradients
        self.weights = nn.ParameterList(torch.zeros_like(each) for each in gradients)

    def forward(self, _):
        return sum((weight * given).sum() for weight, given in zip(self.weights, self.given, strict=True))


def stepped(gradients, *features):
    """The updates that one step of plain gradient descent at rate 1 makes, and the job."""
    job = Job(Given(gradients), loss=lambda output, batch: (output, torch.tensor(1)), world=World())
    attachments_of(job).build_optimizer = lambda parameters: torch.optim.SGD(parameters, lr=1.0)
    compose(job, features)
    job.step((torch.zeros(1),))
    return [-weight.detach() for weight in attachments_of(job).module.weights], job


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("max_norm", [0.1, 1.0, 1e3, math.inf])
def test_clip_against_float64(scale, max_norm):
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(*shape, generator=generator) * scale for shape in ((30, 20), (7,), (1,))]
    norm = math.sqrt(sum(float((each.double() ** 2).sum()) for each in gradients))
    factor = min(1.0, max_norm / norm)
    clipped, job = stepped(gradients, optim.Clip(max_norm=max_norm))
    assert float(job.numbers["grad_norm"]) == pytest.approx(norm, rel=1e-5)
    for made, given in zip(clipped, gradients, strict=True):
        torch.testing.assert_close(made.double(), given.double() * factor, rtol=2e-5, atol=0)


def factors(total, **settings):
    schedule = optim.Schedule(**settings)
    return [schedule.factor(step, total) for step in range(total)]


def test_warmup_rises_in_a_line_to_one():
    assert factors(8, warmup=4, shape="constant") == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_cosine_falls_from_one_to_the_final_share():
    values = factors(104, warmup=4, final=0.1)
    assert values[4] == 1.0
    assert values[54] == pytest.approx(0.55)
    assert all(later < earlier for earlier, later in pairwise(values[4:]))
    assert optim.Schedule(warmup=4, final=0.1).factor(104, 104) == pytest.approx(0.1)
    assert optim.Schedule(warmup=4, final=0.1).factor(500, 104) == pytest.approx(0.1)


def test_trapezoid_is_level_then_falls_in_a_line():
    values = factors(100, shape="trapezoid", warmup=10, cooldown=0.2, final=0.0)
    assert values[10:81] == [1.0] * 71
    assert values[90] == pytest.approx(0.5) and values[99] == pytest.approx(0.05)


def test_a_total_that_is_not_known_yet_stays_level():
    assert optim.Schedule(warmup=2).factor(50, 0) == 1.0


def test_the_rate_of_a_step_is_set_before_it_and_the_base_is_the_optimizers():
    job = Job(nn.Linear(2, 2), progress=Progress(total=4), world=World())
    compose(job, [optim.SGD(lr=0.5, momentum=0.0, nesterov=False), optim.Schedule(warmup=2, final=0.0)])
    rates = []
    for _ in range(4):
        job.step((torch.ones(1, 2), torch.tensor([0])))
        (rate,) = {group["lr"] for group in job.optimizer.param_groups}
        rates.append(rate)
    assert rates == pytest.approx([0.25, 0.5, 0.5, 0.25])


@pytest.mark.parametrize(
    ("feature", "message"),
    [
        (optim.Schedule(warmup=10), "`optim.schedule.warmup` of 10 steps fills the run of 10 steps"),
        (optim.Schedule(warmup=-1), "`optim.schedule.warmup` must be zero or positive, got -1"),
        (optim.Schedule(final=1.5), "`optim.schedule.final` is a fraction"),
        (optim.Schedule(cooldown=math.nan), "`optim.schedule.cooldown` must be zero or positive, got nan"),
        (optim.Clip(max_norm=0.0), "`optim.clip.max_norm` must be a positive number, got 0.0"),
        (optim.Clip(max_norm=math.nan), "`optim.clip.max_norm` must be a positive number, got nan"),
        (optim.AdamW(lr=0.0), "`optim.adamw.lr` must be a positive number, got 0.0"),
        (optim.AdamW(lr=math.inf), "`optim.adamw.lr` must be a positive number, got inf"),
        (optim.AdamW(betas=(0.9, 1.0)), r"`optim.adamw.betas` must lie in \[0, 1\)"),
        (optim.SGD(momentum=-0.1), "`optim.sgd.momentum` must be zero or positive"),
        (optim.SGD(momentum=0.0), "`optim.sgd.nesterov` needs a momentum above 0"),
        (optim.Muon(momentum=0.0), "`optim.muon.nesterov` needs a momentum above 0"),
        (optim.LARS(momentum=0.0, nesterov=True), "`optim.lars.nesterov` needs a momentum above 0"),
    ],
)
def test_settings_out_of_range_are_refused(feature, message):
    with pytest.raises(ConfigError, match=message):
        compose(Job(nn.Linear(2, 2), progress=Progress(total=10), world=World()), [feature])


def test_decay_is_for_matrices_only():
    job = compose(Job(nn.Linear(3, 2), world=World()), [optim.AdamW(weight_decay=0.3)])
    decays = {group["weight_decay"]: [p.ndim for p in group["params"]] for group in job.optimizer.param_groups}
    assert decays == {0.3: [2], 0.0: [1]}
