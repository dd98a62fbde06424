"""Analysis of Python-bound steps: Python itself computes, or operators take less time than calling them from Python."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from statistics import mode

import numpy as np

from shoestring.figures import nanoseconds, percent
from shoestring.profile.analyses import costs
from shoestring.profile.analyses.reading import OperatorCall, Place, Reading
from shoestring.profile.analyses.statements import Loop, Text, names_read, names_written
from shoestring.profile.findings import Finding
from shoestring.profile.tree import NodeKind

LARGE = 0.2
"""Python, or a loop over small operators, is reported if it takes at least this share of the profiled time."""
ALONE = 15_000
"""If lines spend at least this many nanoseconds in Python per operator call, Python itself is assumed to compute."""
SMALL = 12_000.0
"""Maximum forward time of a small operator, in nanoseconds per call."""
OFTEN = 12.0
"""Minimum number of calls per step of an operator in a loop, for a finding."""
_WAITS = re.compile(
    r"sleep|\.wait\(|\.get\(|recv|\.read|\.join\(\)|open\(|input\(|print\(|\.result\(|next\(|synchronize"
)
_LOOPS = Loop | ast.GeneratorExp | ast.ListComp | ast.DictComp | ast.SetComp
_JAX = re.compile(r"/jax/_src/|/profile/jax_calls\.py\t")
_LOADS = re.compile(r"(__getitem__|__next__|__iter__|collate\w*|load\w*|batches)$")
_TAKES = frozenset({"aten::item", "aten::is_nonzero", "aten::_local_scalar_dense"})


def python_bound(reading: Reading) -> Iterator[Finding]:
    """Find functions in which Python itself computes, and loops over small operators."""
    yield from _python_alone(reading)
    loops: dict[ast.AST, list[OperatorCall]] = {}
    for call in reading.calls:
        text = reading.syntax(call.place[0]) if call.count >= OFTEN * reading.steps else None
        statement = text.at(call.place[1]) if text else None
        loop = text.loop(statement) if text and statement else None
        if loop is not None:
            loops.setdefault(loop, []).append(call)
    for loop, calls in loops.items():
        yield from _loop(reading, loop, calls)


def _python_alone(reading: Reading) -> Iterator[Finding]:
    tree = reading.tree
    names: dict[Place, int] = {}
    for node in range(1, len(tree)):
        if tree.kind[node] == NodeKind.PYTHON and reading.lines[node] == node and not reading.iterated[node]:
            names.setdefault(reading.place(node), int(tree.name[node]))
    functions: dict[tuple[str, int], dict[Place, int]] = {}
    for place, time in reading.line_itself.items():
        if place in names and not _LOADS.search(tree.names[names[place]]):
            functions.setdefault((place[0], names[place]), {})[place] = time
    jax = {reading.place(int(node)) for node in np.flatnonzero(reading.under(_JAX))}
    for (file, _), lines in functions.items():
        calls = [call for call in reading.calls if call.place in lines]
        if jax & lines.keys() or any("::" not in call.name for call in calls):
            continue  # these lines wait for compiled code
        taken = sum(lines.values())
        if reading.share(taken) < LARGE or taken < ALONE * sum(call.count for call in calls):
            continue
        text = reading.syntax(file)
        computing = {place: time for place, time in lines.items() if text and _computes(reading, text, place)}
        if sum(computing.values()) < 0.7 * taken:
            continue
        place = max(computing, key=lambda place: computing[place])
        nodes = [
            node for node in range(1, len(tree)) if reading.lines[node] == node and reading.place(node) in computing
        ]
        if sum(int(tree.own[node]) for node in nodes if reading.waiting[node]) > 0.5 * sum(computing.values()):
            continue  # a busy wait does not end earlier if it computes less
        yield reading.finding(
            "Python computes what operators could",
            place,
            f"Python itself takes {nanoseconds(taken)} in this function, {percent(reading.share(taken))} of the time,"
            " outside of operators.",
            "Compute on whole tensors (or with NumPy) instead of single values in a Python loop.",
            reading.gain("python", sum(computing.values()), nodes),
            nodes,
        )


def _computes(reading: Reading, text: Text, place: Place) -> bool:
    """Whether a line is in a loop or comprehension that calls no operators, and does not wait."""
    if _WAITS.search(reading.text(place)):
        return False
    inside = [node for node in ast.walk(text.module) if isinstance(node, _LOOPS) and _of(node, place[1])]
    calling = [call.place[1] for call in reading.calls if call.place[0] == place[0]]
    return any(not any(_of(loop, line) for line in calling) for loop in inside)


def _of(node: ast.AST, line: int) -> bool:
    """Whether a node of the syntax tree spans a line."""
    return getattr(node, "lineno", 0) <= line <= (getattr(node, "end_lineno", 0) or 0)


def _loop(reading: Reading, loop: ast.AST, calls: list[OperatorCall]) -> Iterator[Finding]:
    runs = mode(sorted(call.count for call in calls))
    often = [call for call in calls if call.count >= 0.5 * runs]
    runs_per_step = runs / reading.steps
    taken = sum(call.time for call in often)
    python = sum(reading.python.get(place, 0) for place in {call.place for call in often})
    if reading.share(taken + python) < LARGE or any(call.name in _TAKES for call in calls):
        return
    if any(call.forward > SMALL * max(reading.slower, 1.0) * call.count for call in often) or _carried(loop):
        return
    if all(call.name.endswith("_") for call in often):
        return  # in-place updates belong to an optimizer
    once = sum(_once(reading, call, runs_per_step) for call in often)
    saved = taken + python - once
    place = max({call.place for call in often}, key=lambda place: sum(c.time for c in often if c.place == place))
    nodes = [call.node for call in often]
    saves = reading.gain("python", saved, nodes)
    if saves.expected < LARGE / 2:
        return
    yield reading.finding(
        "a Python loop calls small operators one at a time",
        place,
        f"The loop runs {runs_per_step:.0f} times{' a step' * (reading.steps > 1)}; its operators take"
        f" {nanoseconds(taken)} and Python between them {nanoseconds(python)}, together"
        f" {reading.spent(taken + python)}.",
        "Compute all at once on a tensor with one more dimension (a batch, torch.vmap), or compile the loop"
        " (torch.compile).",
        saves,
        nodes,
    )


def _once(reading: Reading, call: OperatorCall, runs: float) -> float:
    """Estimate the nanoseconds after every `runs` calls are replaced by one call on a tensor `runs` times as large."""
    elements = (call.made[0].elements if call.made else call.elements) or 1
    name = call.name if costs.known(call.name) else "aten::matmul" if call.dense else "aten::mul"
    grown = costs.nanoseconds(name, "forward", elements * runs) * reading.slower
    backward = grown * 2 if call.backward else 0.0
    return min(grown + backward, call.time / call.count * runs) * call.count / runs


def _carried(loop: ast.AST) -> bool:
    """Whether an iteration of a loop depends on the previous iteration, other than by collecting results."""
    body: list[ast.stmt] = getattr(loop, "body", [])
    seen, carried = set[str](), False
    changed = set[str]().union(*(names_written(statement) for statement in body)) if body else set[str]()
    for statement in body:
        collected = _collected(statement)
        carried |= bool((names_read(statement) & changed) - seen - collected)
        seen |= names_written(statement)
    return carried


def _collected(statement: ast.stmt) -> set[str]:
    """Names of the list, tensor or sum to which a statement adds a result; empty if the statement does more."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        function = statement.value.func
        if isinstance(function, ast.Attribute) and function.attr in ("append", "add", "extend"):
            return names_read(function.value)
    if isinstance(statement, ast.AugAssign):
        return names_read(statement.target) | names_written(statement)
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Subscript):
        return names_read(statement.targets[0].value)
    if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.BinOp):
        total = statement.targets[0]
        if isinstance(statement.value.op, ast.Add) and ast.unparse(statement.value.left) == ast.unparse(total):
            return names_written(total)
    return set()
