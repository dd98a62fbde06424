"""Each parameter has its own steps: what one does depends on no other of its group, whichever have gradients."""

import pytest
import torch
from torch import nn

from shoestring import optim
from shoestring.core.compose import compose
from shoestring.core.job import Job, attachments_of
from shoestring.core.world import World
from shoestring.optim.schedule_free import ScheduleFreeAdamW
from shoestring.sparse import STEP

STEPS = 24
FEATURES = [
    optim.AdamW(lr=0.01),
    optim.AdamW8bit(lr=0.01),
    optim.SGD(lr=0.01, momentum=0.9),
    optim.LARS(lr=0.5, vector_lr=0.01),
    optim.LAMB(lr=0.01),
    optim.Muon(lr=0.01),
    optim.ScheduleFree(lr=0.01),
]


class Two(nn.Module):
    """Two layers with inputs of their own; either may have none."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, batch):
        return sum(layer(batch[name]).square().sum() for name, layer in self.named_children() if name in batch)


def batch(step, names):
    """Inputs of layers: the same for a layer's n-th batch, whenever that is."""
    return {
        name: torch.randn(8, 4, generator=torch.Generator().manual_seed(1000 * ord(name) + number))
        for name, number in zip("ab", step, strict=True)
        if name in names
    }


def trained(feature, layers_of):
    """The layers after `STEPS` steps in each of which those that `layers_of` gives take part; and their averages."""
    model = Two().double() if isinstance(feature, optim.LARS | optim.LAMB) else Two()
    made = {"a": 0, "b": 0}
    job = compose(
        Job(model, forward=lambda m, x: m(x), loss=lambda y, x: (y, torch.tensor(8)), world=World()), [feature]
    )
    with job:
        for number in range(STEPS):
            names = layers_of(number)
            found = batch(tuple(made.values()), names)
            job.step({name: x.to(next(model.parameters()).dtype) for name, x in found.items()})
            for name in names:
                made[name] += 1
        with attachments_of(job).evaluating():
            averages = {name: each.detach().clone() for name, each in model.named_parameters()}
        return {name: each.detach().clone() for name, each in model.named_parameters()} | {
            f"average {name}": each for name, each in averages.items()
        }, made


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
@pytest.mark.parametrize(
    "with_a", [lambda n: n >= 20, pytest.param(lambda n: n % 2, marks=pytest.mark.slow)], ids=["late", "every other"]
)
def test_a_parameter_steps_as_if_it_were_alone(feature, with_a):
    together, made = trained(feature, lambda n: "ab" if with_a(n) else "b")
    for name in "ab":
        alone, _ = trained(feature, lambda n, name=name: name if n < made[name] else "ab".replace(name, ""))
        for key, found in together.items():
            if f"{name}." in key:
                torch.testing.assert_close(found, alone[key], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("order", ["ab", "ba"])
@pytest.mark.parametrize("has_gradient", [lambda step: step >= 20, lambda step: step % 2], ids=["late", "every other"])
def test_schedule_free_is_its_formula_for_each_parameter(order, has_gradient):
    """With a warm-up and in fp64; x, y and z are kept apart, as the paper has them."""
    beta1, beta2, decay, eps = 0.9, 0.99, 0.05, 1e-8
    draw = torch.Generator().manual_seed(0)
    start = {name: torch.randn(5, dtype=torch.float64, generator=draw) for name in "ab"}
    tensors = {name: nn.Parameter(each.clone()) for name, each in start.items()}
    ours = ScheduleFreeAdamW([tensors[name] for name in order], betas=(beta1, beta2), eps=eps, weight_decay=decay)
    z, x = ({name: each.clone() for name, each in start.items()} for _ in range(2))
    v, steps, sums, largest = (dict.fromkeys("ab", 0.0) for _ in range(4))
    for step in range(40):
        ours.param_groups[0]["lr"] = lr = 0.05 * min((step + 1) / 10, 1)
        for name in "ab":
            gradient = torch.randn(5, dtype=torch.float64, generator=draw) + 1
            tensors[name].grad = gradient if name == "b" or has_gradient(step) else None
            if tensors[name].grad is None:
                continue
            y = (1 - beta1) * z[name] + beta1 * x[name]
            torch.testing.assert_close(tensors[name].detach(), y, rtol=1e-9, atol=1e-9)
            steps[name] += 1
            v[name] = beta2 * v[name] + (1 - beta2) * gradient**2
            rate = lr * (1 - beta2 ** steps[name]) ** 0.5
            z[name] = z[name] - rate * (gradient / (v[name].sqrt() + eps) + decay * y)
            largest[name] = max(largest[name], rate)
            sums[name] += largest[name] ** 2
            x[name] = x[name] + (z[name] - x[name]) * largest[name] ** 2 / sums[name]
        ours.step()
    for name in "ab":
        assert (ours.average()[tensors[name]] - x[name]).norm() / x[name].norm() < 1e-6  # through single precision


def test_held_moments_count_the_steps_of_each_weight():
    """After the switch `a` steps every other time, and its first moment is corrected for as many steps as it made."""
    job = compose(
        Job(Two(), forward=lambda m, x: m(x), loss=lambda y, x: (y, torch.tensor(8)), total=40, world=World()),
        [optim.AdamW(lr=0.01), STEP(layers=("a", "b"), earliest=0.1, latest=0.1)],
    )
    with job:
        for number in range(10):
            job.step(batch((number, number), "ab" if number < 4 or number % 2 else "b"))
        held = job.kept["sparse.step"].state.method.held
    assert {name: steps for name, steps in held.items() if name.endswith("weight")} == {"a.weight": 3, "b.weight": 6}


def test_a_resumed_run_averages_a_parameter_that_had_no_gradient_yet():
    """Its `z` begins where its weights are, and not where the new start of the run had drawn them."""
    ends = []
    for stop in (0, 6):
        torch.manual_seed(stop)
        model = Two()
        job = compose(
            Job(model, forward=lambda m, x: m(x), loss=lambda y, x: (y, torch.tensor(8)), world=World()),
            [optim.ScheduleFree(lr=0.05)],
        )
        with job:
            for number in range(12):
                if number and number == stop:
                    saved = {name: each.state.state_dict() for name, each in job.kept.items()}
                    other = Two()
                    nn.init.normal_(other.a.weight)
                    job = compose(
                        Job(other, forward=lambda m, x: m(x), loss=lambda y, x: (y, torch.tensor(8)), world=World()),
                        [optim.ScheduleFree(lr=0.05)],
                    )
                    for name in ("optimizer", "model", "progress"):
                        job.kept[name].state.load_state_dict(saved[name])
                    with attachments_of(job).evaluating():
                        torch.testing.assert_close(attachments_of(job).module.a.weight, model.a.weight)
                job.step(batch((number, number), "ab" if number >= 8 else "b"))
            with attachments_of(job).evaluating():
                ends.append([each.detach().clone() for each in attachments_of(job).module.parameters()])
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other)
