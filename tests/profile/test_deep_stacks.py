"""Deep stacks: both ends are kept, with a gap between them, by every collector."""

import sys
import time
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from shoestring import native
from shoestring.profile import profiled
from shoestring.profile.lines import by_line
from shoestring.profile.python_samples import Samples
from shoestring.profile.tree import GAP, INNER, OUTER, NodeKind, TreeBuilder, both_ends

HERE = __file__


@contextmanager
def deep_recursion():
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def deeper(levels, act):
    return act() if levels == 0 else deeper(levels - 1, act)


def burn():
    until = time.thread_time() + 0.15
    total = 0
    while time.thread_time() < until:
        total += sum(range(100))
    return total


def multiply():
    ones = torch.ones(64, 64)
    for _ in range(50):
        ones @ ones


def in_part():
    with torch.profiler.record_function("part"):
        multiply()


def above(tree, node):
    """The nodes above one and itself, from the outermost."""
    path = []
    while node > 0:
        path.append(node)
        node = int(tree.parent[node])
    return path[::-1]


def gaps(tree, path):
    return [at for at, node in enumerate(path) if tree.kind[node] == NodeKind.OVERFLOWN]


def profile_of(act, levels=2000):
    with deep_recursion(), profiled() as result:
        deeper(levels, act)
    return result.profile


def line_of(function, offset):
    return HERE, function.__code__.co_firstlineno + offset


def check(tree, node, function):
    """That a path begins with this test and ends with a function, with one gap in between."""
    path = above(tree, node)
    names = [tree.names[tree.name[each]].partition("\t")[2] for each in path if tree.kind[each] == NodeKind.PYTHON]
    (gap,) = gaps(tree, path)
    assert tree.label(path[gap]) == GAP and gap == OUTER
    assert "profile_of" in names[:OUTER] and names[-1] == function
    assert len(names) == OUTER + INNER


def test_the_middle_of_a_deep_path_is_left_out():
    assert both_ends(range(OUTER + INNER)) == list(range(OUTER + INNER))
    ends = both_ends(range(1000))
    assert ends[OUTER] is None and ends[OUTER - 1] == OUTER - 1 and ends[OUTER + 1] == 1000 - INNER and ends[-1] == 999


def test_time_of_python_is_on_the_line_that_takes_it_however_deep():
    profile = profile_of(burn)
    lines = by_line(profile.tree)
    place = max(lines, key=lambda each: lines[each].total)
    assert place in (line_of(burn, 3), line_of(burn, 4))


@pytest.mark.parametrize("act", [multiply, in_part])
def test_operators_are_below_the_lines_that_call_them_however_deep(act):
    tree = profile_of(act).tree
    (node,) = (n for n in range(len(tree)) if tree.names[tree.name[n]] == "aten::matmul")
    assert tree.count[node] == 50
    path = above(tree, node)
    assert tree.place(path[-2]) == line_of(multiply, 3)
    if act is multiply:
        check(tree, path[-2], "multiply")
    else:  # only what called the span has a gap; below it is what the span called
        (part,) = (at for at, each in enumerate(path) if tree.kind[each] == NodeKind.SPAN)
        assert gaps(tree, path) == [OUTER]
        assert [tree.label(each).partition(" ")[0] for each in path[part + 1 : -1]] == ["in_part", "multiply"]


@pytest.mark.slow
def test_recursion_of_any_depth_has_few_nodes():
    with deep_recursion(), profiled() as result:
        for levels in range(0, 1500, 50):
            deeper(levels, multiply)
    assert len(result.profile.tree) < 20_000
    assert sum(result.profile.tree.count[result.profile.tree.kind == NodeKind.OPERATOR]) >= 50 * 30


def test_samples_below_a_span_in_a_deep_stack_add_up():
    builder, samples = TreeBuilder(), Samples()
    with deep_recursion():
        deeper(500, lambda: samples.add(sys._getframe()))
    samples.share_out(builder, 1e9)
    tree = builder.build()
    assert tree.own.sum() == pytest.approx(1e9) and int(np.argmax(tree.own)) == len(tree) - 1
    check_names = [tree.kind[node] for node in above(tree, len(tree) - 1)]
    assert check_names.count(NodeKind.OVERFLOWN) == 1 and len(check_names) == OUTER + INNER + 1


@pytest.mark.slow
def test_without_a_compiler_both_ends_are_kept_too(monkeypatch):
    def missing(name, **options):
        raise native.CompileError("there is none")

    monkeypatch.setattr(native, "load", missing)
    tree = profile_of(multiply, 400).tree
    nodes = [n for n in range(len(tree)) if tree.names[tree.name[n]] == "aten::matmul"]
    assert nodes and len(gaps(tree, above(tree, nodes[0]))) == 1
    assert tree.depth.max() < 2 * (OUTER + INNER)
