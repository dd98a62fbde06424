"""Evaluates a function's source on random arrays with numpy, without running the program.

A name defined outside the function is an array of random numbers, a torch operator is computed by its counterpart in
numpy, and any other call returns new random numbers. Views, conversions and copies return their argument, and
reductions keep reduced dimensions, so the interpreter need not know how many dimensions a tensor has.

With this interpreter, the module `formulas` recognizes all of 36 formulas written by hand (`profile.formulas-recall`),
the formulas of all 18 planted faults of fusible operators, and 20 of torch's own reference functions. Kinds of
expressions that none of these formulas contains (lambdas, `var_mean`, `size`, reads through a mask) yield an unknown
value, which can hide a formula but cannot lead to a false result.
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
"""Shape of the random array for an unknown value; dimensions in the program are taken modulo the number of its
dimensions."""
TINY = 1e-6
"""Assumed value of attributes such as `self.eps`."""
_SAME = {
    "view", "reshape", "unsqueeze", "squeeze", "expand", "expand_as", "flatten", "unflatten", "view_as", "to",
    "float", "double", "half", "bfloat16", "type_as", "type", "detach", "clone", "contiguous", "broadcast_to",
    "requires_grad_", "values", "cpu", "cuda",
}  # fmt: skip
"""Methods and functions that are assumed to return their argument unchanged."""
_OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Pow: "pow", ast.Gt: "gt", ast.GtE: "ge",
    ast.Lt: "lt", ast.LtE: "le", ast.Eq: "eq", ast.NotEq: "ne", ast.BitAnd: "logical_and", ast.BitOr: "logical_or",
}  # fmt: skip
_SIGNS: dict[type[ast.AST], tuple[str, Callable[[Array], Array]]] = {
    ast.USub: ("neg", np.negative),
    ast.Invert: ("invert", lambda x: ~truth(x)),
    ast.Not: ("invert", lambda x: ~truth(x)),
}
_FILLED = {"zeros_like": 0.0, "ones_like": 1.0, "zeros": 0.0, "ones": 1.0, "new_zeros": 0.0, "new_ones": 1.0}
_CONSTANTS = {"pi": math.pi, "inf": math.inf, "e": math.e, "min": -1e30, "max": 1e30, "eps": TINY, "tiny": 1e-30}


@dataclass(eq=False)
class Value:
    """A value that a function computes or takes as an input."""

    array: Array
    operator: str = ""
    """Name of the operator that computed the value, as in `aten::NAME`; empty for inputs and constants."""
    of: tuple[Value, ...] = ()
    """Arguments of the operator."""
    lines: range = range(0)
    """Lines of the statement that computed the value."""

    @property
    def given(self) -> bool:
        """Whether the value is an input of the function, rather than a constant or a computed value."""
        return not self.operator and self.array.ndim > 0


@dataclass
class Interpreter:
    """Executes the statements of a function in order."""

    text: Text
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    names: dict[str, Value] = field(default_factory=dict)
    attributes: dict[str, Value] = field(default_factory=dict)
    """Values of attributes and items, by their source text, such as `self.scale`."""
    values: list[Value] = field(default_factory=list)
    """All values computed by operators so far, in order."""
    lines: range = range(0)

    def outside(self) -> Value:
        """Make a new unknown value: an array of random numbers."""
        return Value(self.random.normal(size=SHAPE))

    def function(self, scope: Function | ast.Module) -> list[Value]:
        """Interpret a function or a module; returns all values that its operators compute."""
        if not isinstance(scope, ast.Module):
            for statement in self.text.module.body:
                if isinstance(statement, ast.Assign | ast.AnnAssign):
                    self.statement(statement)
            self.attributes |= self.numbers_of_class(scope)
            self.arguments(scope.args)
            self.values.clear()
        self.block(scope.body)
        return self.values

    def numbers_of_class(self, scope: ast.AST) -> dict[str, Value]:
        """Attributes that `__init__` of the method's class sets to numbers if called with default arguments."""
        above = self.text.parents[scope]
        if not isinstance(above, ast.ClassDef) or getattr(scope, "name", "") == "__init__":
            return {}
        methods = [method for method in above.body if isinstance(method, Function)]
        constructor = next((method for method in methods if method.name == "__init__"), None)
        if constructor is None:
            return {}
        before = Interpreter(self.text)
        before.function(constructor)
        return {text: value for text, value in before.attributes.items() if value.array.ndim == 0}

    def arguments(self, arguments: ast.arguments) -> None:
        """Bind each parameter to its default if the default is a number, otherwise to an unknown value."""
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
        """Execute a statement. After a loop or a condition, the names that it may have changed are unknown."""
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
            case ast.AugAssign(target=target, op=operator, value=expression):
                self.write(target, lambda old: self.operation(operator, old, self.expression(expression)))
            case ast.Return(value=ast.expr() as expression) | ast.Expr(value=ast.expr() as expression):
                self.expression(expression)
            case ast.With() | ast.AsyncWith():
                self.block(node.body)
            case ast.If() | ast.For() | ast.While() | ast.AsyncFor() | ast.Try():
                self._branches(node)
            case _:
                pass

    def _branches(self, node: ast.If | ast.For | ast.While | ast.AsyncFor | ast.Try) -> None:
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

    def forget(self, names: set[str]) -> None:
        for name in names & self.names.keys():
            self.names[name] = self.outside()

    def several(self, node: ast.expr, count: int) -> list[Value]:
        """The values of an expression that is assigned to `count` targets."""
        match node:
            case ast.Tuple(elts=parts) if len(parts) == count:
                return [self.expression(part) for part in parts]
            case _:
                self.expression(node)
                return [self.outside() for _ in range(count)]

    def write(self, target: ast.expr, new: Callable[[Value], Value]) -> None:
        """Assign `new(old value)` to a target. If items of an array are assigned, the array is unknown afterwards,
        unless a boolean mask selects the items."""
        if not (isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name)):
            self.assign(target, new(self.expression(target)))
            return
        old, chosen = self.expression(target.value), self.expression(target.slice)
        if chosen.array.dtype != bool:
            new(old)
            self.names[target.value.id] = self.outside()
            return
        self.names[target.value.id] = self.compute("index_put", np.where, chosen, new(old), old)

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
        """Compute an operator and record its result in `values`, unless all arguments are numbers."""
        try:
            with np.errstate(all="ignore"):
                array = np.asarray(function(*(value.array for value in of)))
        except (ValueError, TypeError):  # an argument's shape or type is not as assumed
            return self.outside()
        if array.ndim == 0:
            return Value(array)
        value = Value(array, operator.removesuffix("_"), of, self.lines)
        self.values.append(value)
        return value

    def expression(self, node: ast.expr) -> Value:
        """The value of an expression; an unknown value if the interpreter does not support the expression."""
        match node:
            case ast.Constant(value=bool() | int() | float() as constant):
                return Value(np.asarray(float(constant) if abs(constant) < 1e300 else math.inf))
            case ast.Name(id=name):
                return self.names[name] if name in self.names else self.names.setdefault(name, self.outside())
            case (
                ast.BinOp(left=left, op=operator, right=right)
                | ast.Compare(left=left, ops=[operator], comparators=[right])
            ):
                return self.operation(operator, self.expression(left), self.expression(right))
            case ast.UnaryOp(op=operator, operand=operand) if type(operator) in _SIGNS:
                return self.compute(*_SIGNS[type(operator)], self.expression(operand))
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
        """The value of an item: a size for items of `shape`, otherwise an unknown value (see `by_text`)."""
        if isinstance(node.value, ast.Attribute) and node.value.attr == "shape":
            axis = integers(node.slice)
            return Value(np.asarray(float(SHAPE[axis[0] % len(SHAPE)]))) if axis else self.outside()
        return self.by_text(node)

    def by_text(self, node: ast.expr) -> Value:
        """An unknown value for an attribute or item; equal source texts get equal values."""
        for name in ast.walk(node):  # an item of a computed value may change between reads
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

    def call(self, node: ast.Call) -> Value:
        """The value of a call of a torch function or tensor method; an unknown value for other calls."""
        name, (positional, options) = last_name(node).removesuffix("_"), self.given(node)
        value = self.operator(name, positional, options)
        if value is None:
            for argument in (*positional, *options.values()):
                self.expression(argument)
            value = self.outside()
        if last_name(node).endswith("_") and positional and isinstance(positional[0], ast.Name):
            self.names[positional[0].id] = value  # an in-place operation
        return value

    def given(self, node: ast.Call) -> tuple[list[ast.expr], dict[str, ast.expr]]:
        """Positional arguments of a call, with the object of a method first, and keyword arguments."""
        positional = list(node.args)
        if isinstance(node.func, ast.Attribute) and not is_module(node.func.value):
            positional.insert(0, node.func.value)
        return positional, {option.arg: option.value for option in node.keywords if option.arg}

    def operator(self, name: str, arguments: list[ast.expr], options: dict[str, ast.expr]) -> Value | None:
        """The value of an operator; None if the operator is unknown."""
        if name in _FILLED:
            return Value(np.asarray(_FILLED[name]))
        count, first = len(arguments), arguments[0] if arguments else None
        if name in ("full", "full_like", "new_full", "tensor", "as_tensor") and arguments:
            value = self.expression(arguments[-1])
            return value if value.array.ndim == 0 else None
        if first is not None and count == 1 and (name == "sqrt" or (name in counterparts.UNARY and not options)):
            function = counterparts.UNARY[name]
            return self.compute(name, lambda x: function(number(x)), self.expression(first))
        if name in ("max", "min") and count == 2 and not integers(arguments[1]):
            name += "imum"
        if name in counterparts.BINARY and count == 2:
            return self.compute(
                name, lambda x, y: counterparts.BINARY[name](number(x), number(y)), *map(self.expression, arguments)
            )
        if name in _SAME and first is not None:
            infinite = isinstance(first, ast.Constant) and first.value in ("inf", "-inf")
            return Value(np.asarray(float(ast.literal_eval(first)))) if infinite else self.expression(first)
        if name in ("var", "std") and arguments:
            return self.spread(name, arguments, options)
        if name in counterparts.REDUCTIONS and arguments:
            return self.reduction(name, arguments, options)
        if name == "where" and count == 3:
            return self.compute(
                name, lambda c, x, y: np.where(truth(c), number(x), number(y)), *map(self.expression, arguments)
            )
        if name == "masked_fill" and count == 3:
            return self.compute(name, lambda x, m, y: np.where(truth(m), y, x), *map(self.expression, arguments))
        if arguments and (name.startswith("clamp") or name in ("clip", "hardtanh")):
            return self.clamp(name, arguments, options)
        return None

    def clamp(self, name: str, arguments: list[ast.expr], options: dict[str, ast.expr]) -> Value:
        least = options.get("min", arguments[1] if len(arguments) > 1 and name != "clamp_max" else None)
        last = 1 if name == "clamp_max" else 2
        most = options.get("max", arguments[last] if len(arguments) > last else None)
        bounds = [
            self.expression(bound) if bound is not None and ast.unparse(bound) != "None" else Value(np.asarray(end))
            for bound, end in ((least, -math.inf), (most, math.inf))
        ]
        return self.compute("clamp", np.clip, self.expression(arguments[0]), *bounds)

    def reduction(self, name: str, arguments: list[ast.expr], options: dict[str, ast.expr]) -> Value:
        where = options.get("dim", options.get("axis"))
        if where is None and len(arguments) > 1 and name not in ("norm", "vector_norm"):
            where = arguments[1]
        axes, value = _axes(where), self.expression(arguments[0])
        return self.compute(name, lambda x: counterparts.REDUCTIONS[name](number(x), axes), value)

    def spread(self, name: str, arguments: list[ast.expr], options: dict[str, ast.expr]) -> Value:
        """A variance or standard deviation, with the option `correction`, `unbiased` or `ddof`."""
        rest = arguments[1:]
        correction = options.get("correction", options.get("unbiased", options.get("ddof")))
        if correction is None and rest and isinstance(rest[-1], ast.Constant) and isinstance(rest[-1].value, bool):
            correction = rest.pop()
        less = 1.0 if correction is None else float(self.expression(correction).array.flat[0])
        axes = _axes(options.get("dim", options.get("axis", rest[0] if rest else None)))
        function, value = np.var if name == "var" else np.std, self.expression(arguments[0])
        return self.compute(name, lambda x: function(x, axis=axes, ddof=less, keepdims=True), value)


def _axes(node: ast.expr | None) -> Any:
    """Convert a torch operator's `dim` to numpy axes; the last axis if `dim` is unknown."""
    if node is None:
        return None
    return tuple({axis % len(SHAPE) for axis in integers(node)}) or (len(SHAPE) - 1,)
