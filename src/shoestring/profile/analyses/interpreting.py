"""What a function of a program computes, found from its text and without running it.

Each name that comes from outside is an array of random numbers, each operator of torch is its counterpart in numpy, and
whatever else is called gives new random numbers. Views, conversions and copies change no value here, and a reduction
keeps its dimension, so that the ranks of tensors need not be known.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoestring.profile.analyses import counterparts
from shoestring.profile.analyses.counterparts import Array, number, truth
from shoestring.profile.analyses.statements import (
    Function,
    Text,
    integers,
    is_limits,
    is_module,
    last_name,
    names_written,
    only_widens,
)

SHAPE = (4, 5, 6)
"""Of a value that comes from outside; a dimension is a remainder by its length."""
TINY = 1e-6
"""What a name such as `self.eps` is taken for."""
_SAME = {
    "view", "reshape", "unsqueeze", "squeeze", "expand", "expand_as", "flatten", "unflatten", "view_as", "to",
    "float", "double", "half", "bfloat16", "type_as", "type", "detach", "clone", "contiguous", "broadcast_to",
    "requires_grad_", "values", "cpu", "cuda",
}  # fmt: skip
"""Methods and functions that give the values they were given."""
_OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Pow: "pow", ast.Gt: "gt", ast.GtE: "ge",
    ast.Lt: "lt", ast.LtE: "le", ast.Eq: "eq", ast.NotEq: "ne", ast.BitAnd: "logical_and", ast.BitOr: "logical_or",
}  # fmt: skip
_FILLED = {"zeros_like": 0.0, "ones_like": 1.0, "zeros": 0.0, "ones": 1.0, "new_zeros": 0.0, "new_ones": 1.0}
_CONSTANTS = {"pi": math.pi, "inf": math.inf, "e": math.e, "min": -1e30, "max": 1e30, "eps": TINY, "tiny": 1e-30}


@dataclass(eq=False)
class Value:
    """A value that a function computes or is given."""

    array: Array
    operator: str = ""
    """Name of what computed it, as in `aten::NAME`; empty for what comes from outside and for constants."""
    of: tuple[Value, ...] = ()
    lines: range = range(0)
    """Of the statement."""

    @property
    def given(self) -> bool:
        """Whether it comes from outside, and is no constant."""
        return not self.operator and self.array.ndim > 0


@dataclass
class Interpreter:
    """Goes through the statements of a function in their order."""

    text: Text
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    names: dict[str, Value] = field(default_factory=dict)
    attributes: dict[str, Value] = field(default_factory=dict)
    """Of what is no name, such as `self.scale`, by its text."""
    values: list[Value] = field(default_factory=list)
    """All that were computed."""
    mask: str = ""
    """Text of the mask where elements are written, while they are computed."""
    lines: range = range(0)

    def outside(self) -> Value:
        """A value of which nothing is known."""
        return Value(self.random.normal(size=SHAPE))

    def function(self, scope: Function | ast.Lambda | ast.Module) -> list[Value]:
        """The values that a function computes."""
        if not isinstance(scope, ast.Module):
            for statement in self.text.module.body:
                if isinstance(statement, ast.Assign | ast.AnnAssign):
                    self.statement(statement)
            self.attributes |= self.numbers_of_class(scope)
            self.arguments(scope.args)
            self.values.clear()
        if isinstance(scope, ast.Lambda):
            self.lines = range(scope.lineno, (scope.end_lineno or scope.lineno) + 1)
            self.expression(scope.body)
        else:
            self.block(scope.body)
        return self.values

    def numbers_of_class(self, scope: ast.AST) -> dict[str, Value]:
        """What the class of a method sets to a number, unless told otherwise."""
        above = self.text.parents[scope]
        if not isinstance(above, ast.ClassDef) or getattr(scope, "name", "") == "__init__":
            return {}
        made = next((each for each in above.body if isinstance(each, Function) and each.name == "__init__"), None)
        if made is None:
            return {}
        before = Interpreter(self.text)
        before.function(made)
        return {text: value for text, value in before.attributes.items() if value.array.ndim == 0}

    def arguments(self, arguments: ast.arguments) -> None:
        """Those with a number as their default have that."""
        named = [*arguments.posonlyargs, *arguments.args]
        defaults = [None] * (len(named) - len(arguments.defaults)) + list(arguments.defaults)
        for argument, default in zip([*named, *arguments.kwonlyargs], [*defaults, *arguments.kw_defaults], strict=True):
            value = self.expression(default) if default is not None else None
            known = value is not None and value.array.ndim == 0 and math.isfinite(float(value.array))
            self.names[argument.arg] = value if known and value else self.outside()

    def block(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            self.statement(statement)

    def statement(self, node: ast.stmt) -> None:
        """After a loop or a condition, what it may have changed is not known."""
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Return | ast.Expr):
            self.lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=expression):
                for target, value in zip(targets, self.several(expression, len(targets)), strict=True):
                    self.assign(target, value)
            case ast.Assign(targets=[ast.Subscript(value=ast.Name()) as target], value=expression):
                self.write(target, lambda _: self.expression(expression))
            case ast.Assign(targets=targets, value=expression):
                value = self.expression(expression)
                for target in targets:
                    self.assign(target, value)
            case ast.AnnAssign(target=target, value=ast.expr() as expression):
                self.assign(target, self.expression(expression))
            case ast.AugAssign(target=ast.Subscript(value=ast.Name()) as target, op=operator, value=expression):
                self.write(target, lambda old: self.operation(operator, old, self.expression(expression)))
            case ast.AugAssign(target=target, op=operator, value=expression):
                self.assign(target, self.operation(operator, self.expression(target), self.expression(expression)))
            case ast.Return(value=ast.expr() as expression) | ast.Expr(value=ast.expr() as expression):
                self.expression(expression)
            case ast.With() | ast.AsyncWith():
                self.block(node.body)
            case ast.If() | ast.For() | ast.While() | ast.AsyncFor() | ast.Try():
                changed = names_written(node)
                for part in (node.body, getattr(node, "orelse", []), getattr(node, "finalbody", [])):
                    before = dict(self.names)
                    if not isinstance(node, ast.If):
                        self.forget(changed)
                    self.block(part)
                    leaves = part and isinstance(part[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)
                    if leaves or (isinstance(node, ast.If) and node.orelse):
                        self.names = before
                if not isinstance(node, ast.If) or node.orelse:
                    self.forget(changed)
            case _:
                pass

    def forget(self, names: set[str]) -> None:
        for name in names & self.names.keys():
            self.names[name] = self.outside()

    def several(self, node: ast.expr, count: int) -> list[Value]:
        """The values that are assigned to so many names."""
        match node:
            case ast.Tuple(elts=parts) if len(parts) == count:
                return [self.expression(part) for part in parts]
            case ast.Call() if last_name(node) in ("var_mean", "std_mean") and count == 2:
                given, options = self.given(node)
                mean = {name: value for name, value in options.items() if name == "dim"}
                return [self.spread(last_name(node)[:3], given, options), self.reduction("mean", given, mean)]
            case _:
                self.expression(node)
                return [self.outside() for _ in range(count)]

    def write(self, target: ast.Subscript, new: Callable[[Value], Value]) -> None:
        """Where a mask says so, a name has new values; after a write to another place, unknown ones."""
        assert isinstance(target.value, ast.Name)
        old, chosen = self.expression(target.value), self.expression(target.slice)
        if chosen.array.dtype != bool:
            new(old)
            self.names[target.value.id] = self.outside()
            return
        self.mask = ast.unparse(target.slice)
        written = new(old)
        self.mask = ""
        self.names[target.value.id] = self.compute("index_put", np.where, chosen, written, old)

    def assign(self, target: ast.expr, value: Value) -> None:
        match target:
            case ast.Name(id=name):
                self.names[name] = value
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                for part in parts:
                    self.assign(part, self.outside())
            case ast.Attribute() | ast.Subscript():
                self.attributes[ast.unparse(target)] = value
            case _:
                pass

    def compute(self, operator: str, function: Callable[..., Array], *of: Value) -> Value:
        """The value of an operator; a number of numbers is a number."""
        try:
            with np.errstate(all="ignore"):
                array = np.asarray(function(*(value.array for value in of)))
        except (ValueError, TypeError):  # a dimension of a number, say: it is something else than it is taken for
            return self.outside()
        if array.ndim == 0:
            return Value(array)
        value = Value(array, operator.removesuffix("_"), of, self.lines)
        self.values.append(value)
        return value

    def expression(self, node: ast.expr) -> Value:
        """Its value; one of which nothing is known where it is none of an operator."""
        match node:
            case ast.Constant(value=bool() | int() | float() as constant):
                return Value(np.asarray(float(constant) if abs(constant) < 1e300 else math.inf))
            case ast.Name(id=name):
                if name not in self.names:
                    self.names[name] = self.outside()
                return self.names[name]
            case ast.BinOp(left=left, op=operator, right=right):
                return self.operation(operator, self.expression(left), self.expression(right))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self.compute("neg", np.negative, self.expression(operand))
            case ast.UnaryOp(op=ast.Invert() | ast.Not(), operand=operand):
                return self.compute("invert", lambda x: ~truth(x), self.expression(operand))
            case ast.Compare(left=left, ops=[operator], comparators=[right]):
                return self.operation(operator, self.expression(left), self.expression(right))
            case ast.Subscript(value=of, slice=index):
                return self.expression(of) if only_widens(index) else self.subscript(node)
            case ast.Attribute(value=of, attr=name):
                return self.attribute(node, of, name)
            case ast.Call():
                return self.call(node)
            case ast.NamedExpr(target=target, value=expression):
                value = self.expression(expression)
                self.assign(target, value)
                return value
            case ast.IfExp(body=body, orelse=other):
                self.expression(body), self.expression(other)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                for part in parts:
                    self.expression(part)
            case _:
                pass
        return self.outside()

    def operation(self, operator: ast.AST, left: Value, right: Value) -> Value:
        name = _OPERATORS.get(type(operator))
        if name is None:
            return self.outside()
        return self.compute(name, lambda x, y: counterparts.BINARY[name](number(x), number(y)), left, right)

    def subscript(self, node: ast.Subscript) -> Value:
        """A length, the values that a maximum gives beside their places, or a part, which is the same each time."""
        if self.mask and ast.unparse(node.slice) == self.mask:
            return self.expression(node.value)
        match node:
            case ast.Subscript(value=ast.Attribute(attr="shape"), slice=index):
                return self.length(index)
            case ast.Subscript(value=ast.Call() as call, slice=ast.Constant(value=0)) if last_name(call) in (
                "max",
                "min",
            ):
                return self.expression(call)
            case _:
                return self.by_text(node)

    def by_text(self, node: ast.expr) -> Value:
        for name in ast.walk(node):  # what it is of may have been given another value
            if isinstance(name, ast.Name) and name.id in self.names and self.names[name.id].operator:
                return self.outside()
        return self.attributes.setdefault(ast.unparse(node), self.outside())

    def attribute(self, node: ast.Attribute, of: ast.expr, name: str) -> Value:
        if name in ("values", "data"):
            return self.expression(of)
        if name in _CONSTANTS and ((isinstance(of, ast.Name) and of.id in ("math", "np", "torch")) or is_limits(of)):
            return Value(np.asarray(_CONSTANTS[name]))
        if "eps" in name.lower() and ast.unparse(node) not in self.attributes:
            return Value(np.asarray(TINY))
        return self.by_text(node)

    def length(self, index: ast.expr) -> Value:
        axis = integers(index)
        return Value(np.asarray(float(SHAPE[axis[0] % len(SHAPE)]))) if axis else self.outside()

    def call(self, node: ast.Call) -> Value:
        """A function of torch, a method of a tensor, or one of which nothing is known."""
        name, (given, options) = last_name(node).removesuffix("_"), self.given(node)
        value = self.operator(name, given, options)
        if value is None:
            for argument in (*given, *options.values()):
                self.expression(argument)
            value = self.outside()
        if last_name(node).endswith("_") and given and isinstance(given[0], ast.Name):
            self.names[given[0].id] = value  # in place
        return value

    def given(self, node: ast.Call) -> tuple[list[ast.expr], dict[str, ast.expr]]:
        """Arguments of a call by their place, what a method is of before them, and by their name."""
        given = list(node.args)
        if isinstance(node.func, ast.Attribute) and not is_module(node.func.value):
            given.insert(0, node.func.value)
        return given, {option.arg: option.value for option in node.keywords if option.arg}

    def operator(self, name: str, given: list[ast.expr], options: dict[str, ast.expr]) -> Value | None:
        """The value of an operator; None where it is none that is known."""
        if name in _FILLED:
            return Value(np.asarray(_FILLED[name]))
        if name in ("full", "full_like", "new_full", "tensor", "as_tensor") and given:
            value = self.expression(given[-1])
            return value if value.array.ndim == 0 else None
        if name == "size" and len(given) + len(options) == 2:
            return self.length(options.get("dim", given[-1]))
        if (name == "sqrt" and len(given) == 1) or (name in counterparts.UNARY and len(given) == 1 and not options):
            function = counterparts.UNARY[name]
            return self.compute(name, lambda x: function(number(x)), self.expression(given[0]))
        if name == "gelu" and given:
            tanh = any("tanh" in ast.unparse(option) for option in (*given[1:], *options.values()))
            function = counterparts.gelu_tanh if tanh else counterparts.gelu
            return self.compute(name, function, self.expression(given[0]))
        if name in ("max", "min") and len(given) == 2 and not integers(given[1]):
            name += "imum"
        if name in counterparts.BINARY and len(given) == 2:
            return self.compute(
                name, lambda x, y: counterparts.BINARY[name](number(x), number(y)), *map(self.expression, given)
            )
        if name in _SAME and given:
            infinite = isinstance(given[0], ast.Constant) and given[0].value in ("inf", "-inf")
            return Value(np.asarray(float(ast.literal_eval(given[0])))) if infinite else self.expression(given[0])
        if name in ("var", "std") and given:
            return self.spread(name, given, options)
        if name in counterparts.REDUCTIONS and given:
            return self.reduction(name, given, options)
        if name == "where" and len(given) == 3:
            return self.compute(
                name, lambda c, x, y: np.where(truth(c), number(x), number(y)), *map(self.expression, given)
            )
        if name == "masked_fill" and len(given) == 3:
            return self.compute(name, lambda x, m, y: np.where(truth(m), y, x), *map(self.expression, given))
        if given and (name.startswith("clamp") or name in ("clip", "hardtanh")):
            return self.clamp(name, given, options)
        return None

    def clamp(self, name: str, given: list[ast.expr], options: dict[str, ast.expr]) -> Value:
        least = options.get("min", given[1] if len(given) > 1 and name != "clamp_max" else None)
        last = 1 if name == "clamp_max" else 2
        most = options.get("max", given[last] if len(given) > last else None)
        bounds = [
            self.expression(bound) if bound is not None and ast.unparse(bound) != "None" else Value(np.asarray(end))
            for bound, end in ((least, -math.inf), (most, math.inf))
        ]
        return self.compute("clamp", np.clip, self.expression(given[0]), *bounds)

    def reduction(self, name: str, given: list[ast.expr], options: dict[str, ast.expr]) -> Value:
        where = options.get("dim", options.get("axis"))
        if where is None and len(given) > 1 and name not in ("norm", "vector_norm"):
            where = given[1]
        axes = _axes(where)
        return self.compute(name, lambda x: counterparts.REDUCTIONS[name](number(x), axes), self.expression(given[0]))

    def spread(self, name: str, given: list[ast.expr], options: dict[str, ast.expr]) -> Value:
        """A variance or standard deviation, with the correction that it is told to have."""
        rest = given[1:]
        correction = options.get("correction", options.get("unbiased", options.get("ddof")))
        if correction is None and rest and isinstance(rest[-1], ast.Constant) and isinstance(rest[-1].value, bool):
            correction = rest.pop()
        less = 1.0 if correction is None else float(self.expression(correction).array.flat[0])
        axes = _axes(options.get("dim", options.get("axis", rest[0] if rest else None)))
        function = np.var if name == "var" else np.std
        return self.compute(name, lambda x: function(x, axis=axes, ddof=less, keepdims=True), self.expression(given[0]))


def _axes(node: ast.expr | None) -> Any:
    """Axes of an array here for the dimensions of a tensor; the last one where they are not known."""
    if node is None:
        return None
    return tuple({each % len(SHAPE) for each in integers(node)}) or (len(SHAPE) - 1,)
