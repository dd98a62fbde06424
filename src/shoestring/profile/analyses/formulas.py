"""Formulas that a function of the program spells out, known by what they compute and not by how they are spelt.

Where a value that a function computes equals an operator of torch, applied to other values of it, the function computes
that operator by hand.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations
from typing import Any

import numpy as np

from shoestring.profile.analyses import counterparts
from shoestring.profile.analyses.counterparts import Array, number
from shoestring.profile.analyses.interpreting import SHAPE, Interpreter, Value
from shoestring.profile.analyses.statements import Function, Text

TOLERANCE = 1e-4
"""Relative. Formulas add a small number where they divide, and round their constants."""
DEEPEST = 40
"""Values that one is computed from, at most: what is larger is no formula."""


@dataclass(frozen=True)
class Formula:
    """An operator of torch that a function spells out."""

    operator: str
    """As `costs` knows it."""
    instead: str
    """How it is called."""
    parts: tuple[Value, ...]
    """What is computed on the way, the result last."""

    @property
    def lines(self) -> set[int]:
        """Of the statements that it is spelt out in."""
        return {line for part in self.parts for line in part.lines}

    def has(self, name: str, line: int) -> bool:
        """Whether an operator that is called on a line is a part of it."""
        return any(line in part.lines and name in _NAMES.get(part.operator, {part.operator}) for part in self.parts)


_NAMES = {
    "add": {"add", "rsub"},
    "sub": {"sub", "rsub", "subtract"},
    "mul": {"mul", "multiply"},
    "div": {"div", "true_divide", "reciprocal", "mul"},
    "max": {"max", "amax"},
    "clamp": {"clamp", "clamp_min", "clamp_max"},
    "square": {"square", "pow"},
    "invert": {"bitwise_not", "logical_not"},
    "logsigmoid": {"log_sigmoid"},
    "norm": {"norm", "linalg_vector_norm"},
}
"""As what the parts of a formula may be called, where that is not their own name."""


@dataclass(frozen=True)
class Known:
    """An operator of torch."""

    operator: str
    """As `costs` knows it."""
    instead: str
    compute: Callable[..., Array]
    axes: bool = False
    """Whether it is over a dimension."""
    loss: bool = False
    """Whether it is a loss, whose sign may be changed after a sum or mean."""
    fits: bool = False
    """Whether it has a constant, for which it must be given the result as well."""
    least: int = 3
    """Operators that spell it out, at least."""
    uses: frozenset[str] = frozenset()
    """Operators without one of which it is another formula that happens to give the same; any, where empty."""


_EXPONENTIALS = frozenset({"exp", "softmax", "log_softmax", "logsumexp"})
KNOWN = (
    Known("aten::gelu_tanh", "F.gelu(x, approximate='tanh')", counterparts.gelu_tanh),
    Known("aten::gelu", "F.gelu", counterparts.gelu),
    Known("aten::silu", "F.silu", counterparts.silu, least=2),
    Known("aten::mish", "F.mish", counterparts.mish, least=2),
    Known("aten::softplus", "F.softplus", counterparts.softplus, least=2),
    Known("aten::softplus", "F.logsigmoid", lambda x: -counterparts.softplus(-x), least=2),
    Known("aten::sigmoid", "torch.sigmoid", counterparts.sigmoid),
    Known("aten::elu", "F.elu", counterparts.elu, least=2),
    Known("aten::elu", "F.selu", counterparts.selu, least=2),
    Known("aten::hardswish", "F.hardswish", counterparts.hardswish),
    Known("aten::hardswish", "F.hardsigmoid", counterparts.hardsigmoid, least=2),
    Known("aten::leaky_relu", "F.leaky_relu", counterparts.leaky_relu, fits=True, least=2),
    Known("aten::layer_norm", "F.layer_norm (or F.group_norm)", counterparts.layer_norm, axes=True),
    Known("aten::rms_norm", "F.rms_norm", counterparts.rms_norm, axes=True),
    Known("aten::softmax", "torch.softmax", counterparts.softmax, axes=True),
    Known("aten::log_softmax", "F.cross_entropy or F.log_softmax", counterparts.log_softmax, axes=True, least=2),
    Known("aten::logsumexp", "torch.logsumexp", counterparts.logsumexp, axes=True),
)
KNOWN_OF_TWO = (
    Known(
        "aten::binary_cross_entropy_with_logits",
        "F.binary_cross_entropy_with_logits",
        counterparts.bce_with_logits,
        loss=True,
    ),
    Known("aten::binary_cross_entropy_with_logits", "F.binary_cross_entropy", counterparts.bce, loss=True),
    Known("aten::huber_loss", "F.huber_loss or F.smooth_l1_loss", counterparts.huber, fits=True),
    Known("aten::softmax", "torch.softmax, after masked_fill", counterparts.masked_softmax, axes=True),
    Known(
        "aten::layer_norm", "F.layer_norm (or F.group_norm)", counterparts.scaled(counterparts.layer_norm), axes=True
    ),
    Known("aten::rms_norm", "F.rms_norm", counterparts.scaled(counterparts.rms_norm), axes=True),
    Known("aten::log_softmax", "F.cross_entropy", counterparts.cross_entropy, axes=True, loss=True, uses=_EXPONENTIALS),
)
BATCH_NORM = Known("aten::layer_norm", "F.batch_norm", counterparts.batch_norm)
EPSILONS = (1e-5, 1e-3, 1e-6, 0.0)
"""Of batch norm, added to a variance that may be small."""
AXES = tuple(axes for count in (1, 2, 3) for axes in combinations(range(len(SHAPE)), count))


def spelt_out(text: Text, scope: Function | ast.Lambda | ast.Module) -> list[Formula]:
    """The formulas of a function, the largest first, none a part of another."""
    try:
        values = Interpreter(text).function(scope)
    except RecursionError:  # an expression that is nested too deeply for a formula
        return []
    found = [formula for value in values for formula in _formulas(value)]
    chosen: list[Formula] = []
    for formula in sorted(found, key=lambda formula: -len(formula.parts)):
        if not any(set(formula.parts) & set(other.parts) for other in chosen):
            chosen.append(formula)
    return chosen


def _formulas(result: Value) -> Iterator[Formula]:
    """What a value is of others."""
    below = _below(result)
    if not 2 <= len(below) <= DEEPEST or (result.array.shape != SHAPE and result.array.size == 1):
        return
    sources = [value for value in below if value is not result and value.array.shape == SHAPE]
    for x in sources:
        parts = _between(result, (x,))
        if parts is not None:
            yield from _known(KNOWN, result, (x,), parts)
    for pair in permutations(sources, 2):
        parts = _between(result, pair)
        if parts is not None and all(pair[0] is not part and pair[1] is not part for part in parts):
            yield from _known(KNOWN_OF_TWO, result, pair, parts)
    given = [value for value in below if value.given]
    if len(given) == 5:
        for order in permutations(given):
            yield from _known((BATCH_NORM,), result, order, _between(result, given) or ())


def _known(known: Sequence[Known], result: Value, of: Sequence[Value], parts: Sequence[Value]) -> Iterator[Formula]:
    arrays, operators = [number(value.array) for value in of], {part.operator for part in parts}
    if any(_equal(array, result.array) for array in arrays):  # so would any function be that is x for large x
        return
    for operator in known:
        itself = operator.operator.removeprefix("aten::") in operators and not operator.loss
        if len(parts) < operator.least or itself or (operator.uses and not operator.uses & operators):
            continue
        more: Sequence[tuple[Any, ...]] = [(axes,) for axes in AXES] if operator.axes else [()]
        if operator.fits:
            more = [(result.array,)]
        elif operator is BATCH_NORM:
            more = [(epsilon,) for epsilon in EPSILONS]
        with np.errstate(all="ignore"):
            computed = [operator.compute(*arrays, *each) for each in more]
            if any(
                _equal(array, result.array) or (operator.loss and _equal(-array, result.array)) for array in computed
            ):
                yield Formula(operator.operator, operator.instead, tuple(parts))


def _equal(one: Array, other: Array) -> bool:
    """Whether they are the same where they are numbers, which is in most places."""
    if one.shape != other.shape or other.dtype == bool:
        return False
    numbers = np.isfinite(one)
    if numbers.mean() < 0.3 or (numbers != np.isfinite(other)).any():
        return False
    with np.errstate(all="ignore"):
        near = TOLERANCE * min(float(other[numbers].std()), 1.0)
    return bool(np.allclose(one[numbers], other[numbers], rtol=TOLERANCE, atol=near))


def _below(result: Value) -> list[Value]:
    """A value and those that it is computed from, without constants."""
    found: dict[Value, None] = {}
    stack = [result]
    while stack and len(found) <= DEEPEST:
        value = stack.pop()
        if value not in found and value.array.ndim:
            found[value] = None
            stack.extend(value.of)
    return list(found)


def _between(result: Value, ends: Sequence[Value]) -> list[Value] | None:
    """What is computed from `ends` on the way to a value; None where it depends on anything else, or on one not."""
    found: dict[Value, None] = {}
    reached = set[Value]()
    stack = [result]
    while stack:
        value = stack.pop()
        if value in ends:
            reached.add(value)
        elif value.given:
            return None
        elif value not in found and value.array.ndim:
            found[value] = None
            stack.extend(value.of)
    return list(found)[::-1] if len(reached) == len(ends) else None
