"""Without a compiler torch.profiler records single steps, and the tree has the same paths."""

import logging

import numpy as np
import pytest
import torch

from shoestring import native
from shoestring.profile import profiled
from shoestring.profile.lines import by_line
from shoestring.profile.tree import NodeKind


@pytest.fixture
def no_compiler(monkeypatch):
    def refuse(name):
        raise native.CompileError("there is none on the PATH")

    monkeypatch.setattr(native, "load", refuse)
    from shoestring.profile import native_tree

    native_tree.library.cache_clear()
    yield
    native_tree.library.cache_clear()


def forward(net, batch):
    return net(batch).square().mean()  # a line with a backward pass


def train(steps):
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        forward(net, torch.ones(2, 8)).backward()
        optimizer.step()


def test_steps_are_recorded_by_torchs_profiler_and_it_is_said(no_compiler, caplog):
    with caplog.at_level(logging.WARNING, "shoestring"), profiled() as result:
        train(45)
    assert "no native collector: there is none on the PATH" in caplog.text
    tree, facts = result.profile.tree, result.profile.facts
    assert facts.collector == "torch.profiler"
    assert (facts.steps, len(facts.clock)) == (45, 44)
    assert 0 < facts.share < 1
    counts = {}
    for node in np.flatnonzero(tree.kind == NodeKind.OPERATOR):
        name = tree.names[tree.name[node]]
        counts[name] = counts.get(name, 0) + int(tree.count[node])
    assert counts["aten::tanh"] == pytest.approx(45, abs=6)
    assert (tree.count_variance[tree.kind == NodeKind.OPERATOR] > 0).any()
    assert tree.own.sum() == tree.inclusive[0]
    lines = by_line(tree)
    line = forward.__code__.co_firstlineno + 1
    assert lines[__file__, line].forward > 0
    assert lines[__file__, line].backward > 0


def test_a_program_without_an_optimizer_is_one_window(no_compiler):
    with profiled() as result:
        for _ in range(3):
            torch.ones(4).exp()
    tree = result.profile.tree
    (node,) = (n for n in range(len(tree)) if tree.names[tree.name[n]] == "aten::exp")
    assert tree.count[node] == 3
    assert not tree.count_variance.any()
