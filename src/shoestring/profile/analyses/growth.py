"""Analysis of memory growth: allocated memory rises throughout the run, as the program keeps results of every step."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from shoestring import figures
from shoestring.profile.analyses.drift import rising
from shoestring.profile.analyses.reading import Place, Reading
from shoestring.profile.analyses.statements import Loop, Text, called, names_read
from shoestring.profile.findings import Finding
from shoestring.profile.tree import NodeKind

FEWEST = 8
"""Minimum number of measurements of memory, for a finding."""
LEAST, SHARE = 24 << 20, 0.05
"""Minimum growth, in bytes and as a fraction of the allocated memory, for a finding."""
SETTLED = 0.25
"""Fraction of the run after which a program is assumed to have allocated its buffers."""
_PLAIN = {"item", "float", "int", "len", "str", "bool", "tolist", "append", "perf_counter", "time"}


def growths(reading: Reading) -> Iterator[Finding]:
    """If memory grows until the end of the run, find the line that keeps the results of each step."""
    memory = reading.profile.facts.memory
    held = [moment.allocated for moment in memory if moment.seconds >= SETTLED * memory[-1].seconds]
    grown = held[-1] - held[0] if held else 0
    if len(held) < FEWEST or grown < max(LEAST, SHARE * held[-1]) or not rising(list(map(float, held))):
        return
    # Statements in the loop over steps that add to a longer-lived object, scored by the size of what they add.
    lines, functions = _step_lines(reading)
    bytes_of = {call.place: 0 for call in reading.calls}
    for call in reading.calls:
        bytes_of[call.place] += int(reading.tree.bytes[call.node])
    keepers: list[tuple[Place, float]] = []
    for file in reading.profile.sources:
        text = reading.syntax(file)
        for statement in text.statements if text else ():
            assert text is not None
            function, place = text.function(statement), (file, statement.lineno)
            added = _added(statement)
            ran_here = place in lines or (file, getattr(function, "name", "<module>")) in functions
            if added is None or not ran_here or _is_number(added) or not _outlives(text, function, statement):
                continue
            sizes = [bytes_of.get((file, line), 0) for line in _made_at(function, added)]
            keepers.append((place, float(max(sizes, default=0)) + ("detach" not in called(added))))
    if not keepers:
        return
    yield reading.finding(
        "memory grows with every step",
        max(keepers, key=lambda keeper: keeper[1])[0],
        f"The process held {figures.memory(held[0])} after a quarter of the time and {figures.memory(held[-1])} at the"
        " end, and its memory grew all the time; this line keeps results of every step.",
        "Keep numbers instead of tensors (item()), or detach() what is kept from the graph that made it, or bound what"
        " is kept to the last few.",
        None,
    )


def _step_lines(reading: Reading) -> tuple[set[Place], set[tuple[str, str]]]:
    """Find the lines of the loop over training steps, and (file, name) of the functions that the loop calls.

    The loop over training steps is the outermost loop in which an optimizer steps. If there is no optimizer, it is the
    loop that takes the most time.
    """
    tree = reading.tree
    loops: dict[Place, Loop] = {}
    within: dict[Place, int] = {}
    head = [("", 0)] * len(tree)  # (file, line) of the outermost loop around each node
    for node in range(1, len(tree)):
        head[node] = head[int(tree.parent[node])]
        if reading.lines[node] != node:
            continue
        file, line = reading.place(node)
        text = reading.syntax(file)
        around = [loop for loop in text.loops if loop.lineno <= line <= (loop.end_lineno or 0)] if text else []
        if around and not head[node][0]:
            outermost = min(around, key=lambda loop: loop.lineno)
            head[node] = file, outermost.lineno
            loops[head[node]] = outermost
    for node in range(1, len(tree)):
        if head[node][0]:
            within[head[node]] = within.get(head[node], 0) + int(tree.own[node])
    stepping = {head[node] for node in reading.spans if head[node][0]}
    chosen = max(stepping or within, key=lambda loop: within.get(loop, 0), default=None)
    if chosen is None:
        return set(), set()
    last = loops[chosen].end_lineno or chosen[1]
    lines = {(chosen[0], line) for line in range(chosen[1], last + 1)}
    functions = {
        (tree.place(node)[0], reading.names(node).partition("\t")[2].rpartition(".")[2])
        for node in range(1, len(tree))
        if head[node] == chosen and tree.kind[node] == NodeKind.PYTHON and tree.place(node) not in lines
    }
    return lines, functions


def _added(statement: ast.stmt) -> ast.expr | None:
    """The value that a statement adds to a container, a sum or an attribute; None for other statements."""
    value = getattr(statement, "value", None)
    if isinstance(statement, ast.Expr) and isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        grows = value.func.attr in ("append", "add", "extend", "insert", "setdefault", "appendleft", "put")
        return value.args[-1] if grows and value.args else None
    if isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Add):
        return statement.value
    if isinstance(statement, ast.Assign) and value is not None:
        target = statement.targets[0]
        if isinstance(target, ast.Subscript):
            return value
        if isinstance(target, ast.Name | ast.Attribute):  # the new value is the old value plus another, or contains it
            parts = [value.left, value.right] if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add) else []
            if called(value) & {"cat", "concatenate", "stack", "vstack", "hstack"}:
                parts = [node for node in ast.walk(value) if isinstance(node, ast.expr)]
            if ast.unparse(target) in map(ast.unparse, parts):
                return value
    return None


def _is_number(value: ast.expr) -> bool:
    """Whether a value is a number or text, which holds no tensor."""
    names = called(value) if isinstance(value, ast.Call) else set()
    outer = value.func if isinstance(value, ast.Call) else None
    last = outer.attr if isinstance(outer, ast.Attribute) else outer.id if isinstance(outer, ast.Name) else ""
    return isinstance(value, ast.Constant | ast.JoinedStr) or (bool(names) and last in _PLAIN)


def _outlives(text: Text, function: ast.AST, statement: ast.stmt) -> bool:
    """Whether the object that a statement adds to existed before the loop or call that contains the statement."""
    if text.loop(statement) is None and isinstance(function, ast.Module):
        return False
    value = getattr(statement, "value", None)
    target = getattr(statement, "target", None) or getattr(statement, "targets", [None])[0]
    if target is None and isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        target = value.func.value
    while isinstance(target, ast.Subscript):
        target = target.value
    if isinstance(target, ast.Attribute):
        return True
    if not isinstance(target, ast.Name) or not isinstance(function, ast.FunctionDef | ast.Module):
        return False
    outermost = statement
    for around in text.around(statement):
        if around is function:
            break
        outermost = around if isinstance(around, Loop) else outermost
    inside = {id(node) for node in ast.walk(outermost)}
    uses = [node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == target.id]
    stored = [id(node) for node in uses if isinstance(node.ctx, ast.Store)]
    sets_item = isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Subscript)
    if isinstance(statement, ast.Assign | ast.AugAssign) and not sets_item:
        return any(store not in inside for store in stored)  # `statement` itself is an assignment within the loop
    return not any(store in inside for store in stored)


def _made_at(function: ast.AST, value: ast.expr) -> list[int]:
    """Lines that compute a value: the line of its expression, and lines that assign names used in the expression."""
    lines, names = [value.lineno], names_read(value)
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and any(
            names & {n.id for n in ast.walk(t) if isinstance(n, ast.Name)} for t in node.targets
        ):
            lines += range(node.lineno, (node.end_lineno or node.lineno) + 1)
    return lines
