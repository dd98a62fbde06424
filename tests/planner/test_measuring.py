"""What is measured of a model: weights, activations that autograd holds, and blocks of equal shapes once."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from shoestring.core.compose import compose
from shoestring.core.job import Job
from shoestring.core.world import World
from shoestring.models.gpt import GPT, GPTConfig
from shoestring.optim import AdamW, AdamW8bit
from shoestring.planner.measure import _Measuring

SHAPE = {"vocab_size": 64, "dim": 32, "layers": 3, "heads": 2, "kv_heads": 2, "hidden": 64, "context": 16}


@contextmanager
def measured(model, batch_of, sizes=(2, 4), features=()):
    with compose(Job(model), features or [AdamW()]) as job:
        measuring = _Measuring(job, World())
        for size in sizes:
            measuring.measure(batch_of(size), size)
        yield measuring.costs(tuple(sizes)), job


def tokens(samples):
    text = torch.arange(samples * 17).view(samples, 17) % 64
    return {"inputs": text[:, :-1], "targets": text[:, 1:]}


def held_by(job, batch):
    """Bytes of all tensors but weights that autograd holds of a pass."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*job.model.parameters(), *job.model.buffers())}
    found = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = tensor, storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        logits = job.model(batch["inputs"])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
    del loss
    return sum(nbytes for _, nbytes in found.values())


@pytest.mark.parametrize("tied", [True, False])
def test_the_parts_of_a_gpt_are_the_whole(tied):
    torch.manual_seed(0)
    model = GPT(GPTConfig(**SHAPE, tied=tied))
    with measured(model, tokens) as (costs, job):
        assert costs.trained == sum(parameter.nbytes for parameter in model.parameters())
        assert costs.tied == (64 * 32 * 4 if tied else 0)
        assert costs.hidden == (16 * 32 * 4,) * 4
        assert costs.scored == 16 * 64 * 4
        assert costs.state == pytest.approx(2.0, rel=0.01)  # both moments of AdamW
        for place, size in enumerate(costs.samples):
            parts = [*costs.blocks, costs.before, costs.behind]
            held = sum(part.held[place] for part in parts)
            assert held == pytest.approx(held_by(job, tokens(size)), rel=0.1)
            assert all(part.forward[place] > 0 for part in parts)
        assert all(parameter.grad is None for parameter in model.parameters())
        assert "forward" not in vars(model.blocks[0])  # nothing stays patched


def test_blocks_of_equal_shapes_are_measured_once():
    with measured(GPT(GPTConfig(**SHAPE)), tokens) as (costs, _):
        assert costs.blocks[0] == costs.blocks[2]


def test_optimizer_state_is_what_the_optimizer_holds():
    wide = SHAPE | {"dim": 128, "hidden": 256}  # small tensors keep their precision
    with measured(GPT(GPTConfig(**wide)), tokens, features=[AdamW8bit()]) as (costs, _):
        assert costs.state < 1


class Plain(nn.Module):
    """A model without repeated blocks."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(17, 9), nn.Linear(9, 5)

    def forward(self, x):
        return self.second(self.first(x).relu())


class Widening(nn.Module):
    """A model whose blocks return another shape than they get."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(17, 9), nn.Linear(9, 5)])
        self.behind = nn.Linear(5, 5)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.behind(x)


class Twice(Widening):
    """A model that calls a block twice."""

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.layers[1](nn.functional.pad(x, (0, 4)))


def images(size):
    return {"inputs": torch.randn(size, 17), "targets": torch.arange(size) % 5}


def test_blocks_may_return_another_shape_than_they_get():
    with measured(Widening(), images) as (costs, _):
        assert costs.hidden == (17 * 4, 9 * 4, 5 * 4)
        assert [block.trained for block in costs.blocks] == [18 * 9 * 4, 10 * 5 * 4]
        assert costs.behind.trained == 30 * 4
        assert costs.behind.held[0] > 0


@pytest.mark.parametrize("kind", [Plain, Twice])
def test_a_model_without_blocks_in_a_row_is_one_part(kind):
    model = kind()
    with measured(model, images) as (costs, _):
        assert costs.blocks == ()
        assert costs.trained == costs.behind.trained == sum(parameter.nbytes for parameter in model.parameters())
        assert costs.behind.backward[-1] > 0


def test_a_job_is_left_as_it_was():
    model = GPT(GPTConfig(**SHAPE))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with measured(model, tokens) as (_, job):
        assert isinstance(job, Job)
        assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
