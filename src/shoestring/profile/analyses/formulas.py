"""Recognizes operators of torch that a program implements by a formula, by comparing results instead of source text.

If a value in a function equals the result of a torch operator on other values of the function, then the function
implements this operator by hand.
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
"""Relative tolerance of equality. Formulas are not exact: they add a small number before they divide, and round
constants."""
DEEPEST = 40
"""Maximum number of intermediate values between the inputs of a formula and its result."""


@dataclass(frozen=True)
class Formula:
    """A torch operator that a function implements by hand."""

    operator: str
    """Name of the operator, as in the table of `costs`."""
    instead: str
    """Call that replaces the formula, as source text."""
    parts: tuple[Value, ...]
    """Intermediate values of the formula; the last value is the formula's result."""

    @property
    def lines(self) -> set[int]:
        """Lines of the statements that compute the formula."""
        return {line for part in self.parts for line in part.lines}

    def has(self, name: str, line: int) -> bool:
        """Whether the call of operator `name` on line `line` is part of the formula."""
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
"""Maps operators in a formula to the names under which a profile may record them, if the names differ."""


@dataclass(frozen=True)
class Known:
    """A torch operator that can be recognized."""

    operator: str
    """Name of the operator, as in the table of `costs`."""
    instead: str
    compute: Callable[..., Array]
    axes: bool = False
    """Whether the operator reduces or normalizes over dimensions."""
    loss: bool = False
    """Whether the operator is a loss. The result may then have the opposite sign, because a program may negate a loss
    before or after its sum or mean."""
    fits: bool = False
    """Whether `compute` also takes the formula's result as an argument, to fit a constant of the operator to the
    result."""
    least: int = 3
    """Minimum number of operators in a formula that implements this operator."""
    uses: frozenset[str] = frozenset()
    """A formula that uses none of these operators equals the result only by coincidence; if empty, formulas may use any
    operators."""


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
"""Values of `eps` that are tried for batch norm."""
AXES = tuple(axes for count in (1, 2, 3) for axes in combinations(range(len(SHAPE)), count))


def spelt_out(text: Text, scope: Function | ast.Module) -> list[Formula]:
    """Find the formulas in a function, the largest first; a formula that overlaps a larger formula is left out."""
    try:
        values = Interpreter(text).function(scope)
    except RecursionError:  # an expression that is nested so deeply is no formula
        return []
    formulas = [formula for value in values for formula in _formulas(value)]
    chosen: list[Formula] = []
    for formula in sorted(formulas, key=lambda formula: -len(formula.parts)):
        if not any(set(formula.parts) & set(other.parts) for other in chosen):
            chosen.append(formula)
    return chosen


def _formulas(result: Value) -> Iterator[Formula]:
    """Find operators that compute `result` from one, two or (batch norm) five of the values it depends on."""
    # `below` is `result` and all values that it is computed from, without constants.
    values: dict[Value, None] = {}
    stack = [result]
    while stack and len(values) <= DEEPEST:
        value = stack.pop()
        if value not in values and value.array.ndim:
            values[value] = None
            stack.extend(value.of)
    below = list(values)
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
    inputs = [value for value in below if value.given]
    if len(inputs) == 5:
        for order in permutations(inputs):
            yield from _known((BATCH_NORM,), result, order, _between(result, inputs) or ())


def _known(known: Sequence[Known], result: Value, inputs: Sequence[Value], parts: Sequence[Value]) -> Iterator[Formula]:
    """Yield a formula for every operator in `known` that maps `inputs` to `result`."""
    arrays, operators = [number(value.array) for value in inputs], {part.operator for part in parts}
    if any(_equal(array, result.array) for array in arrays):  # an input is the result already: a ReLU of large x is x
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
            computed = [operator.compute(*arrays, *extra) for extra in more]
            if any(
                _equal(array, result.array) or (operator.loss and _equal(-array, result.array)) for array in computed
            ):
                yield Formula(operator.operator, operator.instead, tuple(parts))


def _equal(left: Array, right: Array) -> bool:
    """Whether arrays are equal within tolerance, are finite at the same positions, and have enough finite values."""
    if left.shape != right.shape or right.dtype == bool:
        return False
    numbers = np.isfinite(left)
    if numbers.mean() < 0.3 or (numbers != np.isfinite(right)).any():
        return False
    with np.errstate(all="ignore"):
        near = TOLERANCE * min(float(right[numbers].std()), 1.0)
    return bool(np.allclose(left[numbers], right[numbers], rtol=TOLERANCE, atol=near))


def _between(result: Value, ends: Sequence[Value]) -> list[Value] | None:
    """Values computed between `ends` and `result`; None unless `result` depends on all of `ends` and no other input."""
    values: dict[Value, None] = {}
    reached = set[Value]()
    stack = [result]
    while stack:
        value = stack.pop()
        if value in ends:
            reached.add(value)
        elif value.given:
            return None
        elif value not in values and value.array.ndim:
            values[value] = None
            stack.extend(value.of)
    return list(values)[::-1] if len(reached) == len(ends) else None
