"""Profiles: every nanosecond is somewhere once, on the line that took it, and a file gives back what was saved."""

import json
import logging
import shutil
import sys
import sysconfig
import threading
import time
import zipfile
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.cli import main
from shoestring.core.errors import DataError
from shoestring.profile import load, profiled
from shoestring.profile.jax_collector import JaxCollector
from shoestring.profile.recording import Events, Facts, Profile, StepTimes
from shoestring.profile.summary import by_line
from shoestring.profile.tree import CallTree, NodeKind, TreeBuilder, columns, merged

HEADERS = Path(sysconfig.get_path("include"), "Python.h")
pytestmark = pytest.mark.skipif(
    not (shutil.which("c++") and HEADERS.is_file()), reason="needs a C++ compiler and Python's headers"
)


def train(steps):
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        loss = net(torch.ones(8, 64)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in net.parameters()]


def here(function, text):
    """The line of this file that has the text, in a function."""
    code = function.__code__
    lines = open(__file__).read().splitlines()  # noqa: PTH123, SIM115
    return next(n + 1 for n in range(code.co_firstlineno - 1, len(lines)) if text in lines[n])


def test_times_are_conserved_and_the_tree_is_the_wall_time():
    train(2)
    with profiled() as result:
        train(100)
    tree, facts = result.profile.tree, result.profile.facts
    assert tree.own.sum() == tree.inclusive[0]
    assert (tree.own[tree.kind != NodeKind.PYTHON] >= 0).all()
    assert tree.inclusive[0] / 1e9 + facts.overhead == pytest.approx(facts.seconds, rel=0.02)
    calls = tree.inclusive[np.isin(tree.kind, (NodeKind.OPERATOR, NodeKind.SPAN)) & (tree.kind[tree.parent] == 1)]
    assert calls.sum() / 1e9 < facts.seconds
    assert facts.lost == 0
    assert set(facts.versions) == {"torch", "python"}
    assert (facts.collector, facts.threads) == ("native", torch.get_num_threads())
    assert 0 < facts.processor < 2 * facts.cores * facts.seconds


def test_operators_are_counted_on_their_lines_and_backward_functions_on_those_of_the_forward_pass():
    train(2)
    with profiled() as result:
        train(30)
    tree = result.profile.tree
    calls = {}
    for node in range(len(tree)):
        if tree.kind[node] == NodeKind.OPERATOR:
            name = tree.names[tree.name[node]]
            calls[name] = calls.get(name, 0) + int(tree.count[node])
    assert calls["aten::linear"] == 60
    assert calls["aten::tanh"] == 30
    lines = by_line(tree)
    forward = lines[__file__, here(train, "loss = net(")]
    assert forward.forward > 0
    assert forward.backward > 0
    assert "aten::addmm" in forward.operators
    backward = tree.kind == NodeKind.BACKWARD
    below = np.zeros(len(tree), bool)
    for node in range(1, len(tree)):
        below[node] = below[tree.parent[node]] or (tree.kind[node] == NodeKind.LINK and tree.link[node] >= 0)
    linked = tree.inclusive[backward & below & (tree.kind[tree.parent] == NodeKind.LINK)].sum()
    apart = sum(
        int(tree.inclusive[node])
        for node in np.flatnonzero(backward & ~below)
        if "AccumulateGrad" not in tree.names[tree.name[node]] and not backward[tree.parent[node]]
    )
    assert apart <= 0.01 * linked


def test_training_is_the_same_with_a_profile():
    torch.manual_seed(0)
    plain = train(5)
    torch.manual_seed(0)
    with profiled():
        watched = train(5)
    assert all(torch.equal(*pair) for pair in zip(plain, watched, strict=True))


def test_the_tree_does_not_grow_with_time():
    train(1)
    sizes = []
    for steps in (3, 60):
        with profiled() as result:
            train(steps)
        tree = result.profile.tree
        sizes.append(int((tree.kind != NodeKind.PYTHON).sum()))
    assert sizes[0] == sizes[1]


def spin(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


@pytest.mark.slow
def test_pythons_own_time_is_on_the_lines_that_take_it():
    with profiled() as result:
        spin(0.4)
        torch.ones(4).sum()
    lines = by_line(result.profile.tree)
    spinning = sum(line.python for (file, number), line in lines.items() if number in range(*_lines_of(spin)))
    assert spinning / 1e9 == pytest.approx(0.4, rel=0.15)


def _lines_of(function):
    first = function.__code__.co_firstlineno
    return first, first + 5


def test_threads_have_paths_of_their_own_and_nested_spans_are_nodes():
    def work():
        with torch.profiler.record_function("mine"):
            torch.ones(10) + 1

    with profiled() as result:
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        work()
    tree = result.profile.tree
    spans = [node for node in range(len(tree)) if tree.names[tree.name[node]] == "mine"]
    assert sum(tree.count[node] for node in spans) == 4
    adds = [node for node in range(len(tree)) if tree.names[tree.name[node]] == "aten::add"]
    assert adds
    for node in adds:
        line = tree.parent[node]
        assert tree.kind[line] == NodeKind.PYTHON
        assert tree.parent[line] in spans


def test_it_works_beside_torchs_profiler_and_ends_where_the_program_fails(tmp_path):
    path = tmp_path / "p.npz"
    with torch.profiler.profile() as theirs, pytest.raises(ZeroDivisionError), profiled(path):
        train(2)
        1 / 0  # noqa: B018
    assert any(event.key == "aten::linear" for event in theirs.key_averages())
    assert len(load(path).tree) > 10
    with profiled(), pytest.raises(RuntimeError, match="recorded in this process already"), profiled():
        pass


@pytest.mark.parametrize("part", ["start", "_folded"])
def test_what_was_recorded_of_torch_is_saved_where_jax_cannot_be_recorded(tmp_path, caplog, monkeypatch, part):
    def fails(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(JaxCollector, part, fails)
    with caplog.at_level(logging.WARNING, "shoestring"), profiled(tmp_path / "p.npz"):
        train(2)
    profile = load(tmp_path / "p.npz")
    assert any(name == "aten::linear" for name in profile.tree.names)
    (said,) = profile.facts.unseen
    assert said == "JAX could not be profiled to the end: RuntimeError: can't start new thread."
    assert said in caplog.text


# -- trees and files ---------------------------------------------------------------------------------------------------


@st.composite
def trees(draw):
    builder = TreeBuilder()
    count = draw(st.integers(0, 12))
    for _ in range(count):
        parent = draw(st.integers(0, len(builder.rows) - 1))
        kind = draw(st.sampled_from([NodeKind.PYTHON, NodeKind.OPERATOR, NodeKind.BACKWARD]))
        name = draw(st.sampled_from(["a.py\tf", "ä.py\tg", "aten::add", "x"]))
        node, some = builder.node(parent, kind, name, draw(st.integers(0, 3))), st.integers(0, 2**40)
        builder.add(node, count=1, own=draw(some), bytes=draw(some), flops=draw(some), inputs="f", variants=1)
    return builder.build()


@settings(max_examples=30)
@given(first=trees(), second=trees())
def test_merging_keeps_all_time_and_is_the_same_in_either_order(first, second):
    both, other = merged([first, second]), merged([second, first])
    assert both.inclusive[0] == first.inclusive[0] + second.inclusive[0] == both.own.sum()

    def paths(tree):
        found = {}
        for node in range(len(tree)):
            path, above = [], node
            while above >= 0:
                path.append((int(tree.kind[above]), tree.names[tree.name[above]], int(tree.line[above])))
                above = int(tree.parent[above])
            found[tuple(path)] = (int(tree.own[node]), int(tree.count[node]))
        return found

    assert paths(both) == paths(other)
    assert paths(merged([first])) == paths(first)


@settings(max_examples=20)
@given(tree=trees())
def test_a_file_gives_back_what_was_saved(tmp_path_factory, tree):
    path = tmp_path_factory.mktemp("profile") / "p.npz"
    facts = Facts(["a", "b"], 1.5, 0.1, 3, versions={"torch": "2"}, clock=[StepTimes(0, 2, 1.5, 1.0, 7)])
    facts = replace(facts, unseen=["Nothing."], processor=2.5, cores=4, threads=2)
    facts.waits["garbage collection"] = Events(3, 0.5, 0.3, "a.py:3")
    Profile(tree, facts).save(path)
    back = load(path)
    assert back.facts == facts
    assert list(back.tree.names) == list(tree.names)
    for name, column in columns(tree).items():
        np.testing.assert_array_equal(getattr(back.tree, name), column)


def test_series_of_a_file_before_version_3_were_lists_of_tables(tmp_path):
    save(tmp_path / "now.npz", clock=[StepTimes(0, 2, 1.5, 1.0, 7)])
    with np.load(tmp_path / "now.npz") as arrays:
        kept = dict(arrays)
    table = json.loads(kept["head"].tobytes())
    table["version"] = 2
    table["facts"] |= {"clock": [asdict(StepTimes(0, 2, 1.5, 1.0, 7))], "work": [], "memory": []}
    np.savez(tmp_path / "then.npz", **kept | {"head": as_bytes(table), "inclusive": kept["own"]})
    assert load(tmp_path / "then.npz").facts == load(tmp_path / "now.npz").facts


def save(path, **changes):
    builder = TreeBuilder()
    builder.add(builder.node(0, NodeKind.OPERATOR, "x"), count=1, own=5)
    Profile(builder.build(), Facts(clock=changes.pop("clock", []))).save(path)
    with np.load(path) as arrays:
        kept = dict(arrays)
    np.savez(path, **(kept | changes))


def as_bytes(value):
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parent": np.array([-1, 7])}, "refer to parents, links or names that do not exist"),
        ({"name": np.array([0, 9])}, "refer to parents, links or names that do not exist"),
        ({"line": np.array([0])}, "columns of"),
        ({"head": as_bytes({"format": "other", "version": 1})}, "not a profile of shoestring"),
        ({"head": as_bytes({"format": "shoestring-profile", "version": 99})}, "newer version"),
        ({"names": as_bytes({"a": 1})}, "not a list of strings"),
        ({"head": as_bytes([1])}, "not a profile, or damaged"),
        ({"count": np.array([{"a": 1}, None], dtype=object)}, "not a profile, or damaged"),
    ],
)
def test_what_is_no_profile_is_refused(tmp_path, changes, said):
    save(tmp_path / "p.npz", **changes)
    with pytest.raises(DataError, match=said):
        load(tmp_path / "p.npz")


def test_a_damaged_file_is_refused_in_one_line(tmp_path):
    save(tmp_path / "p.npz")
    whole = (tmp_path / "p.npz").read_bytes()
    for size in (0, 10, len(whole) // 2, len(whole) - 5):
        (tmp_path / "cut.npz").write_bytes(whole[:size])
        with pytest.raises(DataError, match="not a profile, or damaged"):
            load(tmp_path / "cut.npz")
    with zipfile.ZipFile(tmp_path / "p.npz") as archive:
        assert "head.npy" in archive.namelist()


def test_a_tree_whose_columns_do_not_fit_is_refused():
    with pytest.raises(DataError, match="columns of"):
        kept = columns(TreeBuilder().build())
        CallTree([""], **{**kept, "count": kept["count"][:0]})


# -- the verb ----------------------------------------------------------------------------------------------------------


def test_any_program_runs_under_the_verb_with_its_arguments_and_its_exit_code(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\nimport torch\nx = torch.ones(300, 300)\nfor _ in range(30):\n    x = x @ x / 300\n"
        "print('given', sys.argv[1:])\nsys.exit(3)\n"
    )
    before = list(sys.argv), list(sys.path)
    assert main(["profile", "--lines", "1", str(program), "--help", "7"]) == 3
    said = capsys.readouterr().out
    assert "given ['--help', '7']" in said
    assert "program.py:5" in said
    assert "more line" in said
    assert (list(sys.argv), list(sys.path)) == (before[0], ["", *before[1]]) or list(sys.argv) == before[0]
    assert main(["profile", "view", "profile.npz"]) == 0
    assert "aten::mm" in capsys.readouterr().out
    assert main(["profile", "none.py"]) == 2
    assert "there is no program none.py" in capsys.readouterr().err
