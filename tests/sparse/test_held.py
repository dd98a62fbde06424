"""STEP: dense Adam at first, then exactly Adam's update with the second moments that it had."""

import copy

import pytest
import torch
from torch import nn

import shoestring as ss
from shoestring.core.errors import ConfigError, ConflictError
from shoestring.core.job import attachments_of
from shoestring.sparse import STEP, masks

BETAS, EPS, RATE, DECAY = (0.8, 0.9), 1e-8, 0.05, 0.1


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)).double()


def batch(number=0):
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def job(feature, total=10, kind=torch.optim.AdamW, **options):
    made = ss.Job(
        net(), forward=lambda model, x: model(x), loss=lambda y, x: ((y - x).square().sum(), torch.tensor(8.0))
    )
    attachments_of(made).build_optimizer = lambda parameters: kind(parameters, **({"lr": RATE} | options))
    made.progress.total = total
    return ss.compose(made, [feature])


def method(made):
    return made.kept["sparse.step"].state.method


def by_hand(kind, latest, steps, total):
    """The same in plain loops: torch's optimizer while dense, then Adam's formulas with a v that stays."""
    model = net()
    optimizer = kind(model.parameters(), lr=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY)
    for number in range(steps):
        x, sparse = batch(number), number >= latest * total
        dense = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        if sparse:
            for layer in (model[0], model[2]):
                layer.weight.data = masks.prune(layer.weight.data, masks.row_mask(layer.weight.data))
        loss = (model(x) - x).square().sum() / 8
        grads = torch.autograd.grad(loss, list(model.parameters()))
        for (name, weight), grad in zip(model.named_parameters(), grads, strict=True):
            weight.data.copy_(dense[name])
            weight.grad = grad
        if not sparse:
            optimizer.step()
            continue
        for weight in model.parameters():
            state, t0, grad = optimizer.state[weight], latest * total, weight.grad
            if kind is torch.optim.AdamW:
                weight.data *= 1 - RATE * DECAY
            else:
                grad = grad + DECAY * weight.data
            state["exp_avg"] = BETAS[0] * state["exp_avg"] + (1 - BETAS[0]) * grad
            m = state["exp_avg"] / (1 - BETAS[0] ** (number + 1))
            v = state["exp_avg_sq"] / (1 - BETAS[1] ** t0)
            weight.data -= RATE * m / (v.sqrt() + EPS)
    return model


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_steps_after_the_switch_are_adam_with_held_second_moments(kind):
    feature = STEP(layers=("0", "2"), earliest=0.4, latest=0.4)
    with job(feature, kind=kind, betas=BETAS, eps=EPS, weight_decay=DECAY) as made:
        for number in range(9):
            made.step(batch(number))
        wanted = by_hand(kind, 0.4, 9, 10).state_dict()
        torch.testing.assert_close(attachments_of(made).module.state_dict(), wanted, rtol=1e-9, atol=1e-12)
        assert not method(made).dense


def test_masks_begin_when_second_moments_are_stable_and_not_before():
    with job(STEP(layers=("0",), earliest=0.1, latest=0.9), total=200, betas=(0.9, 0.5), eps=1.0) as made:
        dense = []
        for number in range(40):
            made.step(batch(number))
            dense.append(method(made).dense)
    # Any mean change is below an epsilon of 1; it is looked at every 25 steps, from step 20 on.
    assert dense.index(False) == 25
    with job(STEP(layers=("0",), earliest=0.1, latest=0.9), total=200, betas=(0.9, 0.5), eps=1e-30) as made:
        for number in range(40):
            made.step(batch(number))
        assert method(made).dense


def test_the_change_that_is_watched_is_that_of_adams_second_moments():
    with job(STEP(layers=("0",), earliest=0.5, latest=0.5), total=100, betas=(0.9, 0.75)) as made:
        for number in range(3):
            made.step(batch(number))
        before = [made.optimizer.state[w]["exp_avg_sq"].clone() for w in attachments_of(made).module.parameters()]
        made.step(batch(3))
        after = [made.optimizer.state[w]["exp_avg_sq"] for w in attachments_of(made).module.parameters()]
        changes = torch.cat([(a - b).abs().flatten() for a, b in zip(after, before, strict=True)])
        torch.testing.assert_close(float(method(made).changes[3]), float(changes.mean()), rtol=1e-5, atol=0)


def test_what_it_cannot_hold_is_refused():
    with pytest.raises(ConflictError, match="freezes the second moments of Adam, and the optimizer is RMSprop"):
        job(STEP(layers=("0",)), kind=torch.optim.RMSprop)
    with pytest.raises(ConflictError, match="amsgrad"):
        job(STEP(layers=("0",)), amsgrad=True)
    with pytest.raises(ConfigError, match="0 <= earliest <= latest < 1"):
        job(STEP(layers=("0",), earliest=0.6))


@pytest.mark.parametrize("stop", [2, 6])
def test_it_goes_on_from_its_state_on_either_side_of_the_switch(stop):
    feature = STEP(layers=("0", "2"), earliest=0.4, latest=0.4)
    with job(feature) as straight, job(feature) as resumed:
        for number in range(stop):
            straight.step(batch(number))
        for mine, theirs in (
            (attachments_of(resumed).module, attachments_of(straight).module),
            (resumed.optimizer, straight.optimizer),
            (method(resumed), method(straight)),
        ):
            mine.load_state_dict(copy.deepcopy(theirs.state_dict()))
        resumed.progress.step = resumed.progress.position = straight.progress.step
        for number in range(stop, 9):
            straight.step(batch(number))
            resumed.step(batch(number))
        torch.testing.assert_close(
            attachments_of(straight).module.state_dict(), attachments_of(resumed).module.state_dict(), rtol=0, atol=0
        )
        assert not method(resumed).dense
