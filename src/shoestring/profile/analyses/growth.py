"""Allocation growth: the process holds more and more, as something keeps what each step made."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from shoestring.profile.analyses.drift import rising
from shoestring.profile.analyses.reading import Place, Reading
from shoestring.profile.analyses.statements import Loop, Text, called, names_read
from shoestring.profile.findings import Finding
from shoestring.profile.tree import NodeKind

FEWEST = 8
"""Moments at which memory was looked at."""
LEAST, SHARE = 24 << 20, 0.05
"""Bytes of the growth, and its part of what is held."""
SETTLED = 0.25
"""Part of the time after which a program's buffers are there."""
_PLAIN = {"item", "float", "int", "len", "str", "bool", "tolist", "append", "perf_counter", "time"}


def growths(reading: Reading) -> Iterator[Finding]:
    """The line that keeps what each step made, where memory grows to the end."""
    memory = reading.profile.facts.memory
    held = [each.allocated for each in memory if each.seconds >= SETTLED * memory[-1].seconds]
    grown = held[-1] - held[0] if held else 0
    if len(held) < FEWEST or grown < max(LEAST, SHARE * held[-1]) or not rising([float(each) for each in held]):
        return
    keepers = sorted(_keepers(reading), key=lambda keeper: -keeper[1])
    if not keepers:
        return
    yield reading.finding(
        "memory grows with every step",
        keepers[0][0],
        f"The process held {held[0] >> 20} MiB after a quarter of the time and {held[-1] >> 20} MiB at the end, and"
        " rose throughout; this line keeps what each step made.",
        "Keep numbers instead of tensors (item()), or detach() what is kept from the graph that made it, or bound what"
        " is kept to the last few.",
        None,
    )


def _keepers(reading: Reading) -> Iterator[tuple[Place, float]]:
    """Statements that ran and add to what outlives a step, with how likely it is that they hold much."""
    ran = {
        tuple(reading.tree.names[name].split("\t"))
        for name in set(reading.tree.name[reading.tree.kind == NodeKind.PYTHON].tolist())
    }
    bytes_of = {call.place: 0 for call in reading.calls}
    for call in reading.calls:
        bytes_of[call.place] += int(reading.tree.bytes[call.node])
    for file in reading.profile.sources:
        text = reading.syntax(file)
        for statement in text.statements if text else ():
            assert text is not None
            function = text.function(statement)
            name = getattr(function, "name", "<module>")
            kept = _kept(statement)
            ran_here = any(place[0] == file and place[-1].rpartition(".")[2] == name for place in ran)
            if kept is None or not ran_here or _of_numbers(kept) or not _outlives(text, function, statement):
                continue
            sizes = [bytes_of.get((file, line), 0) for line in _made_at(text, function, kept)]
            yield (file, statement.lineno), float(max(sizes, default=0)) + ("detach" not in called(kept))


def _kept(statement: ast.stmt) -> ast.expr | None:
    """What a statement adds to something that it does not replace."""
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
        if isinstance(target, ast.Name | ast.Attribute) and _adds_to(target, value):
            return value
    return None


def _adds_to(target: ast.expr, value: ast.expr) -> bool:
    """Whether a value is what the target was, and something besides."""
    itself = ast.unparse(target)
    parts = [value.left, value.right] if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add) else []
    if called(value) & {"cat", "concatenate", "stack", "vstack", "hstack"}:
        parts = [each for each in ast.walk(value) if isinstance(each, ast.expr)]
    return any(ast.unparse(part) == itself for part in parts)


def _of_numbers(kept: ast.expr) -> bool:
    names = called(kept) if isinstance(kept, ast.Call) else set()
    outer = kept.func if isinstance(kept, ast.Call) else None
    last = outer.attr if isinstance(outer, ast.Attribute) else outer.id if isinstance(outer, ast.Name) else ""
    return isinstance(kept, ast.Constant | ast.JoinedStr) or (bool(names) and last in _PLAIN)


def _outlives(text: Text, function: ast.AST, statement: ast.stmt) -> bool:
    """Whether what it adds to was there before the loop, or the call, that it is in."""
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
    inside = {id(each) for each in ast.walk(outermost)}
    assigned = [each for each in ast.walk(function) if isinstance(each, ast.Name) and each.id == target.id]
    stored = [each for each in assigned if isinstance(each.ctx, ast.Store)]
    in_function = any(id(each) not in inside for each in stored)
    return (
        in_function
        if isinstance(statement, ast.Assign | ast.AugAssign) and not _is_item(statement)
        else not any(id(each) in inside for each in stored)
    )


def _is_item(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Subscript)


def _made_at(text: Text, function: ast.AST, kept: ast.expr) -> list[int]:
    """Lines that make what is kept: its own, and those that assign the names in it."""
    lines, names = [kept.lineno], names_read(kept)
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and any(
            names & {n.id for n in ast.walk(t) if isinstance(n, ast.Name)} for t in node.targets
        ):
            lines += range(node.lineno, (node.end_lineno or node.lineno) + 1)
    return lines
