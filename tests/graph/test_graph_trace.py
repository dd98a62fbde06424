"""Traced steps: what is paired and repeated in them, and which line is named of a model that cannot be traced."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shoestring._torch import without_data
from shoestring.core.errors import ConfigError
from shoestring.graph.trace import tensors_of, trace
from shoestring.models.gpt import tiny
from tests.graph.steps import WithLoss, texts


@pytest.mark.slow
def test_every_parameter_of_a_gpt_has_its_gradient():
    model = WithLoss(tiny(vocab_size=64, context=16, dim=32, layers=2, hidden=64))
    step = trace(model, *texts(64, 16))
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    assert {name: node.meta["val"].shape for name, node in step.nodes.parameters.items()} == shapes
    assert {name: node.meta["val"].shape for name, node in step.nodes.gradients.items()} == shapes
    assert not step.dynamo


@pytest.mark.slow
def test_blocks_are_found_and_a_deeper_model_has_more():
    found = []
    for layers in (1, 4):
        with without_data():
            model, batch = WithLoss(tiny(vocab_size=64, context=16, dim=32, layers=layers, hidden=64)), texts(64, 16)
        found.append(trace(model, *batch).repeats)
    assert [repeats.times for repeats in found] == [1, 4]
    assert found[1].operators > 30


def test_frozen_parameters_have_no_gradient():
    model = WithLoss(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)))
    model.inner[0].weight.requires_grad_(False)
    step = trace(model, torch.randn(2, 4), torch.tensor([1, 2]))
    assert set(step.nodes.parameters) - set(step.nodes.gradients) == {"inner.0.weight"}


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        x = self.layer(x)
        if x.sum() > 0:  # a number that only real data has
            x = x * 2
        return x.sum()


class Asking(Branching):
    def __init__(self, width):
        super().__init__()
        self.layer, self.scale = nn.Linear(width, width), width**-0.5

    def forward(self, x):
        if not torch.compiler.is_compiling() and (x > 0).all():  # as transformers asks for the lengths of packed texts
            x = x * 2
        x = self.layer(x)[None, None]
        return F.scaled_dot_product_attention(x, x, x, scale=self.scale).sum()


@pytest.mark.slow
def test_sizes_are_known_of_whatever_was_traced_before():
    for batch, width in ((16, 4), (8, 4), (8, 6), (4, 8), (2, 12)):
        step = trace(Asking(width), torch.randn(batch, width))
        assert step.dynamo
        shapes = [size for node in step.module.graph.nodes for one in tensors_of(node) for size in one.shape]
        assert all(type(size) is int for size in shapes), (batch, width)


class Picking(Branching):
    def forward(self, x):
        return self.layer(x)[x.nonzero()[:, 0]].sum()


class Misfitting(Branching):
    def forward(self, x):
        return F.linear(x, self.layer.weight[:, :3]).sum()


@pytest.mark.parametrize(
    ("model", "line"),
    [(Branching, "if x.sum() > 0:"), (Picking, "x.nonzero()"), (Misfitting, "self.layer.weight[:, :3]")],
)
def test_the_line_that_cannot_be_traced_is_named(model, line):
    lines, first = inspect.getsourcelines(model.forward)
    place = first + next(number for number, source in enumerate(lines) if line in source)
    with pytest.raises(ConfigError) as caught:
        trace(model(), torch.randn(2, 4))
    assert f"{__file__}:{place}" in str(caught.value)
    assert line in str(caught.value)


def test_a_loss_that_trains_nothing_is_refused():
    model = Branching()
    model.forward = lambda x: x.sum()
    with pytest.raises(ConfigError, match="no trained parameter"):
        trace(model, torch.randn(2, 4))
