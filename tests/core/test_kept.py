"""What the built-in state is called: as torch's own functions name it, whatever wraps the model, and much quicker."""

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.optim import SGD, AdamW

from shoestring.core.compose import attach, compose
from shoestring.core.errors import ConfigError
from shoestring.core.job import Job
from shoestring.core.world import World


class Odd(nn.Module):
    """Tied and frozen parameters, buffers that are saved and not, state of its own, and a part that is compiled."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(4)
        self.norm.bias.requires_grad_(False)
        self.register_buffer("scale", torch.ones(3), persistent=False)
        self.body = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), backend="eager")

    def forward(self, inputs):
        return self.head(self.body(self.norm(self.embedding(inputs))))

    def get_extra_state(self):
        return {"version": 3}

    def set_extra_state(self, state):
        pass


def test_names_are_those_that_torch_gives():
    torch.manual_seed(0)
    model = torch.compile(Odd(), backend="eager")
    groups = [
        {"params": list(model.head.parameters()), "lr": 0.1},
        {"params": [model.norm.weight, *model.body.parameters()]},
    ]
    optimizer = AdamW(groups)
    with attach(model, optimizer) as job:
        for _ in range(2):
            model(torch.tensor([0, 1, 2])).sum().backward()
            optimizer.step()
            ours = {name: job.kept[name].state.state_dict() for name in ("model", "optimizer")}
            theirs = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
            same(ours, theirs)
    assert ours["model"]["_extra_state"] == {"version": 3} and "body.0.weight" in ours["model"]
    assert set(ours["optimizer"]["state"]) == {"embedding.weight", "norm.weight", "body.0.weight", "body.0.bias"}


@pytest.mark.parametrize("optimizer", [SGD, AdamW])
def test_an_optimizer_that_made_no_state_yet_is_laid_out(optimizer):
    model = nn.Linear(2, 3)
    with compose(Job(model, optimizer=lambda params: optimizer(params, lr=0.1), world=World())) as job:
        same(job.kept["optimizer"].state.state_dict(), get_optimizer_state_dict(model, job.optimizer))


def same(ours, theirs):
    if isinstance(theirs, torch.Tensor):
        assert ours.data_ptr() == theirs.data_ptr() and torch.equal(ours, theirs)
    elif isinstance(theirs, dict):
        assert set(ours) == set(theirs)
        for key, value in theirs.items():
            same(ours[key], value)
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            same(one, other)
    else:
        assert ours == theirs


def test_an_optimizer_whose_parameters_go_by_numbers_is_read_by_their_places():
    """As torch saves it, and other programs with it."""
    torch.manual_seed(0)
    model, fewer = nn.Linear(2, 3), nn.Linear(2, 3, bias=False)
    theirs = AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    theirs.step()
    ours = nn.Linear(2, 3)
    with attach(ours, AdamW(ours.parameters())) as job:
        job.kept["optimizer"].state.load_state_dict(theirs.state_dict())
        found = job.kept["optimizer"].state.state_dict()["state"]
    for index, name in enumerate(("weight", "bias")):
        assert all(torch.equal(found[name][key], value) for key, value in theirs.state_dict()["state"][index].items())
    with attach(fewer, AdamW(fewer.parameters())) as job, pytest.raises(ValueError, match=r"longer|shorter"):
        job.kept["optimizer"].state.load_state_dict(theirs.state_dict())


def test_a_scheduler_of_torch_is_refused():
    """It steps after the step was saved, and computes rates from those that it had set, which are no state here."""
    model = nn.Linear(2, 3)
    optimizer = SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with attach(model, optimizer) as job, pytest.raises(ConfigError, match="`schedule` would resume with wrong"):
        job.keep("schedule", schedule)


@pytest.mark.parametrize("make", [
    lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
    lambda parameters: torch.optim.Adam(parameters, lr=0.1, weight_decay=0.1),
], ids=["sgd", "adam"])  # fmt: skip
def test_weights_do_not_decay_into_a_state_that_is_laid_out(make):
    job = compose(Job(nn.Linear(3, 2), optimizer=make, world=World()))
    state = job.kept["optimizer"].state.state_dict()
    tensors = [value for each in state["state"].values() for value in each.values() if isinstance(value, torch.Tensor)]
    assert tensors and not any(value.any() for value in tensors)
    assert all(group["weight_decay"] == 0.1 and group["lr"] == 0.1 for group in job.optimizer.param_groups)
