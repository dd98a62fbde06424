"""Without a compiler torch.profiler records single steps, and the tree has the same paths."""

import importlib
import logging
import py_compile
import subprocess
import sys
from pathlib import Path

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


def test_no_step_is_recorded_while_a_part_of_an_earlier_one_is_open(no_compiler):
    """torch would write to memory of the earlier window, which is freed, when the part ends."""
    ends = []

    def steps(count):
        net = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(count):
            net(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            ends.append(torch.autograd.profiler._is_profiler_enabled)

    with profiled() as result:
        with torch.profiler.record_function("epoch"):
            steps(45)
        steps(25)
    assert [count + 1 for count, on in enumerate(ends) if on] == [1, 59]
    assert any("2 steps were not recorded: a named part was open" in said for said in result.profile.facts.unseen)


def test_a_module_that_is_imported_in_a_window_keeps_its_name(no_compiler, tmp_path, monkeypatch):
    """torch reads the names of code that has run after it is gone."""
    monkeypatch.syspath_prepend(tmp_path)
    names = [f"imported_in_window_{number}" for number in range(20)]
    for name in names:
        (tmp_path / f"{name}.py").write_text("import torch\ntorch.ones(2).exp()\n")
        py_compile.compile(str(tmp_path / f"{name}.py"))  # of code that is read from a file, no name is shared
    with profiled() as result:
        for name in names:
            importlib.import_module(name)
        others = [f"{number:08}" for number in range(100_000)]  # which take the place of what is gone
        del others
    tree = result.profile.tree
    functions = [tree.names[tree.name[n]].split("\t") for n in np.flatnonzero(tree.kind == NodeKind.PYTHON)]
    assert {Path(file).name for file, name in functions if name == "<module>" and file.startswith(str(tmp_path))} == {
        f"{name}.py" for name in names
    }


@pytest.mark.slow
def test_a_process_that_was_recorded_lives_on():
    """Memory that torch writes to after it is freed ends a process when objects are collected, much later."""
    program = """
import gc, torch
from shoestring import native
from shoestring.profile import profiled
def refuse(name): raise native.CompileError("none")
native.load = refuse
for _ in range(8):
    with profiled():
        net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(45):
            net(torch.ones(2, 8)).square().mean().backward()
            optimizer.step()
gc.collect()
"""
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
