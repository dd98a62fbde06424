"""The native collector: what operators are given, threads, forks, and spans that overlap."""

import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from shoestring.core.trace import span
from shoestring.profile import profiled
from shoestring.profile.lines import by_line
from shoestring.profile.tree import NodeKind

HEADERS = Path(sysconfig.get_path("include"), "Python.h")
pytestmark = pytest.mark.skipif(
    not (shutil.which("c++") and HEADERS.is_file()), reason="needs a C++ compiler and Python's headers"
)


def operators(tree, name):
    return [n for n in range(len(tree)) if tree.kind[n] == NodeKind.OPERATOR and tree.names[tree.name[n]] == name]


def products():
    image = torch.ones(2, 4, 9, 9, requires_grad=True)
    kernel, across = torch.ones(6, 4, 3, 3, requires_grad=True), torch.ones(4, 3, 2, 2, requires_grad=True)
    matrix = torch.ones(5, 7, requires_grad=True)
    total = F.conv2d(image, kernel, stride=2).sum() + F.conv_transpose2d(image, across, stride=2).sum()
    total = total + F.linear(torch.ones(3, 7), matrix, torch.ones(5)).sum()
    total = total + (torch.ones(2, 5, 7) @ torch.ones(2, 7, 3)).sum() + (matrix @ torch.ones(7)).sum()
    total.backward()


def test_floating_point_operations_are_those_that_torch_counts():
    with FlopCounterMode(display=False) as counted:
        products()
    with profiled() as result:
        products()
    tree = result.profile.tree
    theirs = {str(name): int(count) for name, count in counted.get_flop_counts()["Global"].items()}
    ours = {}
    for node in range(len(tree)):
        if tree.flops[node]:
            name = tree.names[tree.name[node]].replace("aten::", "aten.")
            ours[name] = ours.get(name, 0) + int(tree.flops[node])
    vector = 2 * 5 * 7  # torch counts products with vectors as others
    assert ours.pop("aten.mv") == vector
    assert ours == {name: count for name, count in theirs.items() if name != "aten.mv"}


def test_attention_is_two_products_forward_and_five_backward():
    query = torch.ones(2, 3, 16, 8, requires_grad=True)
    with profiled() as result:
        F.scaled_dot_product_attention(query, torch.ones(2, 3, 16, 8), torch.ones(2, 3, 16, 8)).sum().backward()
    tree = result.profile.tree
    product = 2 * 2 * 3 * 16 * 16 * 8
    assert sorted(tree.flops[tree.flops > 0]) == [2 * product, 5 * product]


def test_arguments_are_described_and_views_move_no_bytes():
    image = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)
    with profiled() as result:
        for _ in range(3):
            image.contiguous().to(torch.bfloat16).view(-1)
        for size in range(1, 6):
            torch.ones(size).neg()
        torch.ones(4).expand(1000, 4).sum()
    tree = result.profile.tree
    (copy,) = operators(tree, "aten::clone")
    assert tree.names[tree.inputs[copy]] == "float32[2,3,4,4] channels_last -> float32[2,3,4,4]"
    assert tree.bytes[copy] == 3 * 2 * 4 * 96
    (cast,) = operators(tree, "aten::_to_copy")
    assert tree.names[tree.inputs[cast]] == "float32[2,3,4,4] -> bfloat16[2,3,4,4]"
    (view,) = operators(tree, "aten::view")
    assert (tree.count[view], tree.bytes[view]) == (3, 0)
    (neg,) = operators(tree, "aten::neg")
    assert tree.variants[neg] == 5
    assert all(tree.bytes[node] == 4 * 4 + 4 for node in operators(tree, "aten::sum"))


def test_a_second_profile_of_the_same_lines_knows_nothing_of_what_the_first_was_given():
    seen = []
    for size in (200, 100):
        given = torch.eye(size) if size == 200 else torch.ones(size, size)
        with profiled() as result:
            for _ in range(300):  # more operators than are looked at when a profile begins
                torch.ones(3).exp()
                torch.ones(3).log()
            for _ in range(4):
                given @ given
        tree = result.profile.tree
        (product,) = operators(tree, "aten::mm")
        seen.append(
            (tree.names[tree.inputs[product]], tree.variants[product], tree.flops[product] / tree.count[product])
        )
    assert "99.5% zeros" in seen[0][0]
    assert seen[1] == ("float32[100,100], float32[100,100] -> float32[100,100]", 1, 2 * 100**3)


def test_calls_that_record_for_the_backward_pass_are_counted():
    weight = torch.ones(3, requires_grad=True)
    with profiled() as result:
        for recording in (True, True, False):
            with torch.set_grad_enabled(recording):
                weight.exp()
    (node,) = operators(result.profile.tree, "aten::exp")
    assert (result.profile.tree.count[node], result.profile.tree.graphed[node]) == (3, 2)


def test_spans_may_overlap_and_still_all_time_is_somewhere_once():
    first, second = torch.profiler.record_function("first"), torch.profiler.record_function("second")
    with profiled() as result:
        first.__enter__()
        second.__enter__()
        torch.ones(300, 300).exp()
        first.__exit__(None, None, None)
        torch.ones(300, 300).exp()
        second.__exit__(None, None, None)
        torch.ones(3).exp()
    tree, facts = result.profile.tree, result.profile.facts
    found = {tree.names[tree.name[n]]: n for n in range(len(tree)) if tree.kind[n] == NodeKind.SPAN}
    assert set(found) == {"first", "second"}
    assert all(tree.count[node] == 1 for node in found.values())
    assert sum(tree.count[node] for node in operators(tree, "aten::exp")) == 3
    assert (tree.own[tree.kind != NodeKind.PYTHON] >= 0).all()
    assert tree.inclusive[0] / 1e9 + facts.overhead == pytest.approx(facts.seconds, rel=0.02)


def test_a_span_that_a_profile_does_not_see_end_is_not_in_the_next_one():
    work = span("of the first profile", "compute")
    with profiled():
        work.__enter__()
        torch.ones(3).exp()
    with profiled() as result:
        torch.ones(3).exp()
    work.__exit__(None, None, None)
    tree = result.profile.tree
    assert not [n for n in range(len(tree)) if tree.kind[n] == NodeKind.SPAN]
    (exp,) = operators(tree, "aten::exp")
    assert tree.kind[tree.parent[exp]] == NodeKind.PYTHON


@pytest.mark.slow
def test_python_within_a_span_is_on_the_lines_that_run_and_not_the_operators_time():
    with profiled() as result, torch.profiler.record_function("prepare"):
        torch.ones(3).exp()
        end = time.perf_counter() + 0.5
        while time.perf_counter() < end:
            pass
    tree = result.profile.tree
    lines = {line: each for (file, line), each in by_line(tree).items() if file == __file__}
    first = test_python_within_a_span_is_on_the_lines_that_run_and_not_the_operators_time.__code__.co_firstlineno
    waiting = sum(each.python for line, each in lines.items() if line - first in (4, 5))
    assert waiting > 0.8 * 0.5e9
    assert sum(each.forward for each in lines.values()) < 0.1e9
    (span,) = [n for n in range(len(tree)) if tree.kind[n] == NodeKind.SPAN]
    assert tree.own[span] < 0.1e9 and tree.inclusive[span] > 0.45e9
    assert (tree.own >= 0).all()


def test_what_follows_a_collective_that_goes_on_does_not_run_within_it(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with profiled() as result:
            work = torch.distributed.all_reduce(torch.ones(1 << 20), async_op=True)
            torch.ones(100).cumsum(0)
            work.wait()
    finally:
        torch.distributed.destroy_process_group()
    tree = result.profile.tree
    (node,) = operators(tree, "aten::cumsum")
    above = set()
    while node > 0:
        above.add(tree.names[tree.name[node]])
        node = tree.parent[node]
    assert any("all_reduce" in name for name in tree.names)
    assert not any("all_reduce" in name or "allreduce" in name for name in above)


def test_threads_that_come_and_go_share_trees():
    from shoestring.profile.native_tree import library

    with profiled() as result:
        for _ in range(20):
            thread = threading.Thread(target=lambda: torch.ones(3).exp())
            thread.start()
            thread.join()
        trees = library().callpaths_threads()
    assert sum(result.profile.tree.count[node] for node in operators(result.profile.tree, "aten::exp")) == 20
    assert trees < 20


FORKING = """
import os, sys, torch
from shoestring.profile import load, profiled
with profiled(sys.argv[1]) as result:
    for _ in range(5):
        torch.ones(3).exp()
    child = os.fork()
    if not child:
        torch.ones(3).tanh()
        with profiled(sys.argv[2]):
            torch.ones(3).sin()
        sys.exit(3)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    torch.ones(3).cos()
print(code)
"""


@pytest.mark.slow
def test_a_forked_child_leaves_its_parents_profile_alone_and_may_have_one_of_its_own(tmp_path):
    from shoestring.profile import load

    paths = [str(tmp_path / name) for name in ("parent.npz", "child.npz")]
    done = subprocess.run(
        [sys.executable, "-c", FORKING, *paths], capture_output=True, text=True, timeout=100, env=os.environ
    )
    assert done.stdout.strip() == "3", done.stderr
    parent, child = (load(path).tree for path in paths)
    names = [{tree.names[name] for name in tree.name[tree.count > 0]} for tree in (parent, child)]
    assert {"aten::exp", "aten::cos"} <= names[0]
    assert not {"aten::tanh", "aten::sin"} & names[0]
    assert "aten::sin" in names[1]
    assert not {"aten::exp", "aten::tanh"} & names[1]


# -- Python's own time ------------------------------------------------------------------------------------------------


def holds_the_lock_then_lets_go(seconds):
    """Two lines: one never lets go of the interpreter's lock, and the other does each time; seconds of the first."""
    numbers, image, total = list(range(100_000)), torch.ones(64, 64), 0
    alone, end = 0.0, time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        total += sum(numbers)
        alone += time.perf_counter() - began
        image.mul_(1.0)
    assert total
    return alone


@pytest.mark.slow
def test_a_line_that_keeps_the_interpreters_lock_has_its_own_time():
    line = holds_the_lock_then_lets_go.__code__.co_firstlineno + 5
    with profiled() as result:
        alone = holds_the_lock_then_lets_go(1.5)
    place = (__file__, line)
    assert by_line(result.profile.tree)[place].total / 1e9 == pytest.approx(alone, rel=0.1)


@pytest.mark.slow
def test_a_child_of_a_profiled_program_asks_nobody_and_can_be_profiled():
    with profiled():
        assert holds_the_lock_then_lets_go(0.1) > 0  # the clock that asks has run
        child = os.fork()
        if not child:
            try:
                with profiled() as result:
                    holds_the_lock_then_lets_go(0.2)
                os._exit(0 if result.profile.facts.seconds > 0.1 else 2)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
