"""torch.compile as a feature: a module of torch.nn at the top is not compiled, and the feature says so."""

import pytest
import torch
from torch import nn

import shoestring as ss
from shoestring.core.job import attachments_of


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, inputs):
        return self.layers(inputs)


@pytest.mark.parametrize("model", [nn.Sequential(nn.Linear(4, 4), nn.ReLU()), Wrapped()])
def test_explain_says_what_torch_does_not_compile(model):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model.compile(backend=backend)
    model(torch.randn(2, 4))
    said = ss.graph.Compile().explain(attachments_of(ss.Job(model)))
    assert bool(graphs) == ("does not compile" not in said), said
