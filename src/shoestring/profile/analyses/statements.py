"""What the text of a program says of its lines: loops, functions, and what an expression depends on."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

Loop = ast.For | ast.While | ast.AsyncFor
Function = ast.FunctionDef | ast.AsyncFunctionDef
Simple = ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr | ast.Return


@dataclass(frozen=True)
class Text:
    """A file of the program."""

    module: ast.Module

    @staticmethod
    def of(source: str) -> Text | None:
        """None where it is no Python of this version, or nested too deeply."""
        try:
            return Text(ast.parse(source))
        except (SyntaxError, ValueError, RecursionError):
            return None

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """Of each part of the text what it is in."""
        return {child: node for node in ast.walk(self.module) for child in ast.iter_child_nodes(node)}

    @cached_property
    def statements(self) -> list[Simple]:
        """Those that contain no others."""
        return [node for node in ast.walk(self.module) if isinstance(node, Simple)]

    def at(self, line: int) -> Simple | None:
        """The simple statement that a line is of."""
        return next((each for each in self.statements if each.lineno <= line <= (each.end_lineno or 0)), None)

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """What contains it, from within."""
        while (above := self.parents.get(node)) is not None:
            yield above
            node = above

    def function(self, node: ast.AST) -> Function | ast.Module:
        """The innermost function, or the module, that contains it."""
        return next((each for each in self.around(node) if isinstance(each, Function)), self.module)

    def scopes(self, lines: Iterable[int]) -> list[Function | ast.Lambda]:
        """The innermost functions that lines are of, and the lambdas on them."""
        wanted, found = set(lines), dict[Function | ast.Lambda, None]()
        for node in ast.walk(self.module):
            if isinstance(node, ast.Lambda) and wanted & set(range(node.lineno, (node.end_lineno or 0) + 1)):
                found[node] = None
            elif isinstance(node, Simple) and wanted & set(range(node.lineno, (node.end_lineno or 0) + 1)):
                scope = self.function(node)
                if isinstance(scope, Function):
                    found[scope] = None
        return list(found)

    def generates(self, name: str) -> bool:
        """Whether there is a generator of this name."""
        functions = [node for node in ast.walk(self.module) if isinstance(node, Function) and node.name == name]
        return any(isinstance(node, ast.Yield | ast.YieldFrom) for each in functions for node in ast.walk(each))

    def iterates_by(self, line: int) -> set[str]:
        """Names of the functions that a loop on this line calls for what it goes through."""
        loops = [node for node in ast.walk(self.module) if isinstance(node, ast.For | ast.AsyncFor)]
        return set[str]().union(*(called(node.iter) for node in loops if node.lineno == line))

    def loop(self, node: ast.AST) -> Loop | None:
        """The innermost loop of the same function that contains it."""
        for each in self.around(node):
            if isinstance(each, Function | ast.Lambda):
                return None
            if isinstance(each, Loop):
                return each
        return None


def names_read(node: ast.AST) -> set[str]:
    """Names whose values an expression depends on."""
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)}


def names_written(node: ast.AST) -> set[str]:
    """Names that may have another value, or other contents, after a statement: assigned, or changed in place."""
    found = {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load)}
    for each in ast.walk(node):
        if isinstance(each, ast.Assign):
            found |= {name for target in each.targets for name in names_read(target)}
        elif isinstance(each, ast.AugAssign):
            found |= names_read(each.target)
        elif isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) and _changes(each.func.attr):
            found |= names_read(each.func.value)
    return found


def _changes(method: str) -> bool:
    in_place = method.endswith("_") and not method.endswith("__")
    return in_place or method in {"append", "extend", "update", "add", "insert", "pop", "clear", "step", "backward"}


def called(node: ast.AST) -> set[str]:
    """Last names of the functions and methods that are called."""
    return {last_name(each) for each in ast.walk(node) if isinstance(each, ast.Call)} - {""}


def last_name(node: ast.Call) -> str:
    """The last name of what is called; empty where it has none."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def is_module(node: ast.expr) -> bool:
    """Whether it is a module that has functions of tensors or of numbers."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id in ("torch", "F", "nn", "math", "np")


def is_limits(node: ast.expr) -> bool:
    """Whether it is the limits of a data type."""
    return isinstance(node, ast.Call) and last_name(node) in ("finfo", "iinfo")


def only_widens(index: ast.expr) -> bool:
    """Whether an index has only `None`, `:` and `...`, so that it takes no part."""
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    return all(
        (isinstance(part, ast.Constant) and (part.value is None or part.value is ...))
        or (isinstance(part, ast.Slice) and not (part.lower or part.upper or part.step))
        for part in parts
    )


def integers(node: ast.expr) -> list[int]:
    """An integer, or those of a tuple; nothing where they are not known."""
    try:
        found = ast.literal_eval(node)
    except (ValueError, TypeError):
        return []
    found = found if isinstance(found, tuple | list) else (found,)
    return [each for each in found if isinstance(each, int)]
