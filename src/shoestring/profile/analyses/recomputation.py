"""Analysis of recomputation: a program computes the same value in every step, or twice in one function."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from shoestring.figures import nanoseconds, percent
from shoestring.profile.analyses.reading import MATTERS, OperatorCall, Place, Reading
from shoestring.profile.analyses.statements import Simple, Text, called, names_read, names_written
from shoestring.profile.findings import Finding
from shoestring.profile.tree import NodeKind, totals

_RANDOM = re.compile(r"^aten::.*(rand|normal_|uniform_|bernoulli|multinomial|exponential_|dropout|geometric_|cauchy_)")
_LIBRARIES = {"torch", "np", "numpy", "math", "F", "nn", "functional", "jnp", "jax", "fft", "linalg", "special"}
_CHANGING = {"rand", "randn", "randint", "randperm", "normal", "rand_like", "randn_like", "bernoulli", "multinomial"}
_CHANGING |= {
    "dropout",
    "next",
    "input",
    "read",
    "load",
    "sample",
    "pop",
    "get",
    "step",
    "time",
    "perf_counter",
    "open",
}
_SIZES = {"size", "dim", "numel", "len", "range", "int", "float", "tuple", "list", "min", "max", "abs"}
DEEPEST = 12


@dataclass(frozen=True)
class Line:
    """The operator calls and the time of one line of the program."""

    calls: list[OperatorCall]
    time: float
    """Nanoseconds of the line, including time in Python and gradients."""

    @property
    def count(self) -> int:
        """Lower bound of the number of times that the line ran."""
        return min(call.count for call in self.calls)


def recomputations(reading: Reading) -> Iterator[Finding]:
    """Find lines that recompute a value that they, or an earlier line, have already computed."""
    lines = _lines(reading)
    same: dict[tuple[str, ast.AST], list[Place]] = {}
    for place, line in sorted(lines.items()):
        text = reading.syntax(place[0])
        statement = text.at(place[1]) if text else None
        if text is None or statement is None or any(_changes(reading, call) for call in line.calls):
            continue
        if line.count > 1 and _always_the_same(text, statement, line):
            same.setdefault((place[0], text.function(statement)), []).append(place)
        elif earlier := _computed_before(text, statement, lines, place):
            saved = min(line.time, lines[earlier].time)
            yield from _again(reading, place, line, saved, f"Line {earlier[1]} has computed the same.", earlier)
    for places in same.values():
        place = max(places, key=lambda place: lines[place].time)
        calls = [call for other in places for call in lines[other].calls]
        line = Line(calls, sum(lines[other].time for other in places))
        yield from _again(reading, place, line, line.time * (1 - 1 / line.count), _IN_EVERY)


_IN_EVERY = "Nothing that it depends on changes between its runs."


def _again(
    reading: Reading, place: Place, line: Line, saved: float, why: str, earlier: Place | None = None
) -> Iterator[Finding]:
    nodes = [call.node for call in line.calls]
    saves = reading.gain("recomputation", saved, nodes)
    if saves.expected < MATTERS:
        return
    names = ", ".join(list(dict.fromkeys(call.name.removeprefix("aten::") for call in line.calls))[:5])
    advice = "Compute it once before the loop (in a module, as a buffer in __init__), and use it from there."
    yield reading.finding(
        "the same value is computed again and again" if earlier is None else "the same value is computed twice",
        place,
        f"It is computed {line.count} times ({names}), which takes {nanoseconds(line.time)},"
        f" {percent(reading.share(line.time))} of the time. {why}",
        advice if earlier is None else "Keep the first result in a variable, and use it here.",
        saves,
        nodes,
    )


def _lines(reading: Reading) -> dict[Place, Line]:
    """Lines of the program that take enough time to be reported, with all operators below each line."""
    tree = reading.tree
    own = (reading.lines == np.arange(len(tree))) & (tree.kind == NodeKind.PYTHON) & ~reading.behind
    python = totals(tree.parent, np.where((tree.kind == NodeKind.PYTHON) & ~reading.behind, tree.own, 0))
    calls: dict[Place, dict[int, OperatorCall]] = {}
    for call in reading.calls:
        node = call.node
        while node > 0:
            if own[node]:
                calls.setdefault(tree.place(node), {})[call.node] = call
            node = int(tree.parent[node])
    times: dict[Place, int] = {}
    for node in np.flatnonzero(own).tolist():
        times[tree.place(node)] = times.get(tree.place(node), 0) + int(python[node])
    lines = {}
    for place, by_node in calls.items():
        time = sum(call.time for call in by_node.values()) + times[place]
        if place[0] and reading.share(time) >= MATTERS / 2:
            lines[place] = Line(list(by_node.values()), time)
    return lines


def _changes(reading: Reading, call: OperatorCall) -> bool:
    """Whether a call may return different results for the same arguments, or changes its arguments."""
    tree = reading.tree
    if (call.name.endswith("_") and not call.name.endswith("__")) or tree.variants[call.node] > 1:
        return True
    names = {tree.names[name] for name in tree.name[reading.below(call.node) & (tree.kind == NodeKind.OPERATOR)]}
    return any(_RANDOM.search(name) for name in names)


# -- the same value in every run -------------------------------------------------------------------------------------


def _always_the_same(text: Text, statement: Simple, line: Line) -> bool:
    """Whether a statement computes the same value each time it runs."""
    value = getattr(statement, "value", None)
    if value is None or not called(value) or any(call.graphed for call in line.calls):
        return False
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _FACTORIES:
        return False  # the statement only creates a tensor, and later statements may write to it
    loop, function = text.loop(statement), text.function(statement)
    written = names_written(loop) if loop else set[str]()
    # a name that the statement sets but does not read carries no value from run to run
    if isinstance(statement, ast.Assign):
        written -= {target.id for target in statement.targets if isinstance(target, ast.Name)} - names_read(value)
    return _Constant(text, function, loop, written).is_constant(value, DEEPEST)


@dataclass(frozen=True)
class _Constant:
    """Decides whether an expression has the same value in every run of a loop or a function."""

    text: Text
    function: ast.AST
    loop: ast.AST | None
    written: set[str]
    """Names that the loop may change."""

    def is_constant(self, node: ast.AST, depth: int) -> bool:
        if depth == 0:
            return False
        inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        if isinstance(node, ast.Constant):
            return True
        if isinstance(node, ast.Attribute) and node.attr in ("shape", "device", "dtype", "ndim", "pi"):
            return True
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            # An attribute of `self` is constant if it is assigned exactly once, from an expression without calls.
            name, values = ast.unparse(node), list[ast.expr]()
            for statement in self.text.statements:
                for target in statement.targets if isinstance(statement, ast.Assign) else ():
                    pairs = [(target, statement.value)] if isinstance(statement, ast.Assign) else []
                    if isinstance(target, ast.Tuple) and isinstance(pairs[0][1], ast.Tuple):
                        pairs = list(zip(target.elts, pairs[0][1].elts, strict=False))
                    values += [value for part, value in pairs if ast.unparse(part) == name]
            return len(values) == 1 and not any(isinstance(part, ast.Call) for part in ast.walk(values[0]))
        if isinstance(node, ast.Name):
            return node.id in _LIBRARIES or self._name(node, depth)
        if isinstance(node, ast.Call):
            return self._call(node, depth)
        if isinstance(node, ast.IfExp):
            inner = [node.body, node.orelse]
        plain = (
            ast.IfExp,
            ast.BinOp,
            ast.UnaryOp,
            ast.Tuple,
            ast.List,
            ast.Subscript,
            ast.Slice,
            ast.Attribute,
            ast.Compare,
        )
        return isinstance(node, plain) and all(self.is_constant(child, depth - 1) for child in inner)

    def _call(self, node: ast.Call, depth: int) -> bool:
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in _CHANGING or name.endswith("_"):
            return False
        if name in ("size", "dim", "numel", "len"):
            return True
        sizes = all(self._is_size(argument, depth) for argument in arguments)
        if isinstance(node.func, ast.Name) and name not in _SIZES:
            return False
        of = node.func.value if isinstance(node.func, ast.Attribute) else None
        library = isinstance(of, ast.Name) and of.id in _LIBRARIES
        inputs = sizes
        if not (library and name in _FACTORIES):
            inputs = all(self.is_constant(argument, depth - 1) for argument in arguments)
        return inputs and (of is None or library or self.is_constant(of, depth - 1))

    def _is_size(self, node: ast.AST, depth: int) -> bool:
        """Whether an argument is constant; an attribute of `self` is assumed to be a constant size."""
        of_self = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
        if isinstance(node, ast.BinOp):
            return self._is_size(node.left, depth) and self._is_size(node.right, depth)
        return of_self or self.is_constant(node, depth - 1)

    def _name(self, node: ast.Name, depth: int) -> bool:
        """Whether a name is assigned once, from a constant expression."""
        if node.id in self.written:
            assigned = self._assignments(self.loop or self.function, node.id)
            return len(assigned) == 1 and self._value(assigned[0], node.id, depth)
        for place in (self.function, self.text.module):
            assigned = self._assignments(place, node.id)
            if len(assigned) > 1:
                return False
            if assigned:
                return self._value(assigned[0], node.id, depth)
            if place is self.function and node.id in _parameters(place):
                return False
        return False

    def _assignments(self, place: ast.AST, name: str) -> list[ast.AST]:
        return [
            node
            for node in ast.walk(place)
            if isinstance(node, ast.stmt | ast.comprehension)
            and not isinstance(node, ast.FunctionDef | ast.With | ast.If | ast.ClassDef)
            and name in _bound(node)
        ]

    def _value(self, statement: ast.AST, name: str, depth: int) -> bool:
        """Whether an assignment sets a name to a constant expression."""
        if not isinstance(statement, ast.Assign):
            return False
        target, value = statement.targets[0], statement.value
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            pairs = zip(target.elts, value.elts, strict=True)
            value = next((v for t, v in pairs if isinstance(t, ast.Name) and t.id == name), value)
        return self.is_constant(value, depth - 1)


_PLAIN = ast.IfExp | ast.BinOp | ast.UnaryOp | ast.Tuple | ast.List | ast.Subscript | ast.Slice | ast.Attribute
_FACTORIES = {"arange", "ones", "zeros", "eye", "full", "linspace", "logspace", "hann_window", "triu_indices", "tensor"}
_FACTORIES |= {"tril_indices", "meshgrid", "hamming_window", "empty"}


def _bound(statement: ast.AST) -> set[str]:
    """Names that a statement itself assigns, without the names that statements inside it assign."""
    if isinstance(statement, ast.For | ast.AsyncFor | ast.comprehension):
        statement = statement.target
    elif not isinstance(statement, Simple):
        return set()
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _parameters(function: ast.AST) -> set[str]:
    arguments = getattr(function, "args", None)
    return {node.arg for node in ast.walk(arguments) if isinstance(node, ast.arg)} if arguments else set()


# -- the same value twice --------------------------------------------------------------------------------------------


def _computed_before(text: Text, statement: Simple, lines: Mapping[Place, Line], place: Place) -> Place | None:
    """An earlier line of the same block with the same costly call, if the names that the call reads do not change."""
    own, after = _calls(statement), statement.lineno
    for other, line in lines.items():
        if other[0] != place[0] or other[1] >= after or not line.calls:
            continue
        earlier = text.at(other[1])
        if earlier is None or text.parents[earlier] not in [*text.around(statement)]:
            continue
        if text.function(earlier) is not text.function(statement) or text.loop(earlier) is not text.loop(statement):
            continue
        for call in own.keys() & _calls(earlier).keys():
            changed = _changed_between(text, earlier, statement)
            if not names_read(own[call]) & changed and not called(own[call]) & _CHANGING:
                return other
    return None


def _calls(statement: ast.stmt) -> dict[str, ast.expr]:
    """Map dumped syntax trees to calls: the calls in a statement that have arguments and do more than compute sizes."""
    calls: dict[str, ast.expr] = {}
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and (node.args or node.keywords) and not called(node) <= _SIZES:
            calls[ast.dump(node)] = node
    return calls


def _changed_between(text: Text, first: ast.stmt, second: ast.stmt) -> set[str]:
    """Names changed from the first statement up to the second; an optimizer step counts as changing every name."""
    changed = set[str]()
    for statement in text.statements:
        between = first.lineno <= statement.lineno < second.lineno
        if between and text.function(statement) is text.function(first):
            changed |= names_written(statement)
            if called(statement) & {"step", "train", "eval", "zero_", "requires_grad_", "load_state_dict"}:
                changed |= names_read(second)
    return changed
