"""Queries on the syntax tree of a source file: the statement on a line, loops, functions, names read and written."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property

Loop = ast.For | ast.While | ast.AsyncFor
Function = ast.FunctionDef | ast.AsyncFunctionDef
Simple = ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr | ast.Return


@dataclass(frozen=True)
class Text:
    """The syntax tree of a file of the program."""

    module: ast.Module

    @staticmethod
    def of(source: str) -> Text | None:
        """Parse a file's source; None if the source is invalid in this version of Python or nested too deeply."""
        try:
            return Text(ast.parse(source))
        except (SyntaxError, ValueError, RecursionError):
            return None

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """Maps each node to its parent."""
        return {child: node for node in ast.walk(self.module) for child in ast.iter_child_nodes(node)}

    @cached_property
    def statements(self) -> list[Simple]:
        """All statements that contain no other statements."""
        return [node for node in ast.walk(self.module) if isinstance(node, Simple)]

    @cached_property
    def loops(self) -> list[Loop]:
        """All `for` and `while` loops in the file."""
        return [node for node in ast.walk(self.module) if isinstance(node, Loop)]

    def at(self, line: int) -> Simple | None:
        """The simple statement that a line belongs to."""
        return next((node for node in self.statements if node.lineno <= line <= (node.end_lineno or 0)), None)

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes that enclose a node, the innermost first."""
        while (above := self.parents.get(node)) is not None:
            yield above
            node = above

    def function(self, node: ast.AST) -> Function | ast.Module:
        """The innermost function around a node; the module if there is none."""
        return next((outer for outer in self.around(node) if isinstance(outer, Function)), self.module)

    def scopes(self, lines: Iterable[int]) -> list[Function]:
        """The innermost functions that contain these lines."""
        wanted, functions = set(lines), dict[Function, None]()
        for node in ast.walk(self.module):
            if isinstance(node, Simple) and wanted & set(range(node.lineno, (node.end_lineno or 0) + 1)):
                scope = self.function(node)
                if isinstance(scope, Function):
                    functions[scope] = None
        return list(functions)

    def generates(self, name: str) -> bool:
        """Whether the file defines a generator function with this name."""
        functions = [node for node in ast.walk(self.module) if isinstance(node, Function) and node.name == name]
        return any(isinstance(node, ast.Yield | ast.YieldFrom) for outer in functions for node in ast.walk(outer))

    def iterates_by(self, line: int) -> set[str]:
        """Names of the functions called in the iterable of a `for` loop on this line."""
        loops = [node for node in ast.walk(self.module) if isinstance(node, ast.For | ast.AsyncFor)]
        return set[str]().union(*(called(node.iter) for node in loops if node.lineno == line))

    def loop(self, node: ast.AST) -> Loop | None:
        """The innermost loop around a node in the same function."""
        for outer in self.around(node):
            if isinstance(outer, Function | ast.Lambda):
                return None
            if isinstance(outer, Loop):
                return outer
        return None


@cache
def waits(loop: Loop) -> bool:
    """Whether a loop is a busy wait, which ends when time has passed or when other code changes its condition."""
    if not isinstance(loop, ast.While):
        return False
    ends = [loop.test] if not isinstance(loop.test, ast.Constant) else []
    for node in (node for statement in loop.body for node in ast.walk(statement)):
        if isinstance(node, ast.If) and any(isinstance(inner, ast.Break | ast.Return) for inner in node.body):
            ends.append(node.test)
    used = _used(loop.body, [id(node) for end in ends for node in ast.walk(end)])
    clocks = _times(loop)
    timed = [bool(called(end) & CLOCKS or names_read(end) & clocks) for end in ends]
    return bool(ends) and (any(timed) or not any(names_read(end) & used for end in ends))


CLOCKS = frozenset(
    {"time", "perf_counter", "monotonic", "process_time", "thread_time", "clock_gettime", "now", "utcnow", "time_ns"}
    | {"perf_counter_ns", "monotonic_ns", "process_time_ns", "thread_time_ns", "default_timer", "timer"}
)
"""Functions that return the time, as the last part of their dotted names."""


def _times(loop: Loop) -> set[str]:
    """Names whose values in a loop are times or are computed from times."""
    assignments = [node for node in ast.walk(loop) if isinstance(node, ast.Assign)]
    names, before = set[str](), -1
    while len(names) > before:
        before = len(names)
        for node in assignments:
            if called(node.value) & CLOCKS or names_read(node.value) & names:
                names = names.union(*(names_written(target) for target in node.targets))
    return names


def _used(body: Iterable[ast.stmt], but: Iterable[int]) -> set[str]:
    """Names that statements assign or pass to calls, ignoring syntax nodes whose ids are in `but`."""
    left_out, names = set(but), set[str]()
    for node in (node for statement in body for node in ast.walk(statement) if id(node) not in left_out):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.Call):
            names |= names_read(node)
        elif isinstance(node, ast.Assign | ast.AugAssign):
            names |= names_written(node)
    return names


def names_read(node: ast.AST) -> set[str]:
    """Names that an expression reads."""
    return {name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Load)}


def names_written(node: ast.AST) -> set[str]:
    """Names that a statement may change, by assigning them or by changing their objects in place."""
    names = {name.id for name in ast.walk(node) if isinstance(name, ast.Name) and not isinstance(name.ctx, ast.Load)}
    for inner in ast.walk(node):
        if isinstance(inner, ast.Assign):
            names |= {name for target in inner.targets for name in names_read(target)}
        elif isinstance(inner, ast.AugAssign):
            names |= names_read(inner.target)
        elif isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute):
            method = inner.func.attr
            if method in _CHANGE or (method.endswith("_") and not method.endswith("__")):
                names |= names_read(inner.func.value)
    return names


_CHANGE = {"append", "extend", "update", "add", "insert", "pop", "clear", "step", "backward"}
"""Methods that change their object. Tensor methods whose names end with `_` also count."""


def called(node: ast.AST) -> set[str]:
    """Names of the functions and methods called in an expression or statement, without their modules and objects."""
    return {last_name(call) for call in ast.walk(node) if isinstance(call, ast.Call)} - {""}


def last_name(node: ast.Call) -> str:
    """The last part of a called function's dotted name; empty if the function is not called by a name."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def is_module(node: ast.expr) -> bool:
    """Whether an expression names a module of numerical functions, such as `torch` or `np`."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id in ("torch", "F", "nn", "math", "np")


def is_limits(node: ast.expr) -> bool:
    """Whether an expression yields the limits of a data type, such as `torch.finfo(…)`."""
    return isinstance(node, ast.Call) and last_name(node) in ("finfo", "iinfo")


def only_widens(index: ast.expr) -> bool:
    """Whether an index consists only of `None`, `:` and `...`, so that it selects all elements."""
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    return all(
        (isinstance(part, ast.Constant) and (part.value is None or part.value is ...))
        or (isinstance(part, ast.Slice) and not (part.lower or part.upper or part.step))
        for part in parts
    )


def integers(node: ast.expr) -> list[int]:
    """The integers in a literal integer, tuple or list; an empty list for other expressions."""
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError):
        return []
    items = value if isinstance(value, tuple | list) else (value,)
    return [item for item in items if isinstance(item, int)]
