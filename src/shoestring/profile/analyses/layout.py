"""Analysis of conversions of layout or data type back and forth: later conversions undo earlier conversions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import numpy as np

from shoestring.figures import nanoseconds
from shoestring.profile.analyses.reading import MATTERS, OperatorCall, Place, Reading, costliest, named
from shoestring.profile.findings import Finding

TYPES = frozenset({"aten::to", "aten::type_as", "aten::_to_copy"})
LAYOUTS = frozenset({"aten::contiguous", "aten::clone", "aten::reshape"})
_METHOD = re.compile(r"(?:\.|torch\.)(\w+)\b")
_NAMED = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "long": "int64",
    "int": "int32",
    "byte": "uint8",
    "bool": "bool",
} | {name: name for name in ("float16", "float32", "float64", "bfloat16", "int64", "int32", "uint8")}
"""Maps names of torch's conversion methods and data types to the data type that they convert to."""
FEWEST = 4
"""A conversion is reported if it runs at least this many times."""
TO_DENSE, TO_SPARSE = named("to_dense"), named("to_sparse to_sparse_csr to_sparse_csc to_sparse_bsr")
IN_DOUBLE = 0.5
"""Fraction of an operator's time that single precision saves, compared to double precision."""


def conversions(reading: Reading) -> Iterator[Finding]:
    """Find functions that convert tensors back and forth between two layouts or data types.

    Conversions inside library functions are not reported, because the program cannot change them.
    """
    copies = copying(reading)
    changing = [call for call in reading.calls if copies[call.node] and call.place[0] and call.direct]
    yield from _types(reading, [call for call in changing if call.name in TYPES])
    yield from _promoted(reading)
    # Sparse tensors that are converted to dense tensors and back.
    often = [call for call in reading.calls if call.direct and call.count >= max(0.5 * reading.steps, FEWEST)]
    dense = [call for call in often if call.name in TO_DENSE and call.place[0]]
    sizes = {call.elements for call in dense}
    sparse = [call for call in often if call.name in TO_SPARSE and call.place[0] and call.elements in sizes]
    if sparse:
        yield from _function(reading, "sparse layout", [*dense, *sparse], to_and_fro=True)
    functions: dict[tuple[str, int], list[OperatorCall]] = {}
    for call in changing:
        if call.name in LAYOUTS:
            functions.setdefault((call.place[0], call.frame[1]), []).append(call)
    for calls in functions.values():
        back = [call for call in calls if _taken_back(reading, call)]
        yield from _function(reading, "layout", calls, taken_back=len(back) == len(calls))


def _taken_back(reading: Reading, conversion: OperatorCall) -> bool:
    """Whether another operator of the same function undoes a conversion from `channels_last`."""
    if not (conversion.given and conversion.made) or conversion.given[0].layout != "channels_last":
        return False
    size = conversion.given[0].elements
    return any(
        call.frame == conversion.frame
        and call.dense
        and call.given[:1] != call.made[:1]
        and [kind.layout for kind in call.given[:1]] == [conversion.made[0].layout]
        and [(kind.layout, kind.elements) for kind in call.made[:1]] == [("channels_last", size)]
        for call in reading.calls
    )


def _types(reading: Reading, calls: list[OperatorCall]) -> Iterator[Finding]:
    """Find conversions of the data type that other conversions undo, unless they run only at the beginning."""
    often = [call for call in calls if call.count >= max(0.5 * reading.steps, FEWEST) and call.given and call.made]
    known = [(call, source, target) for call in often for source, target in _pairs(reading, call)]
    backwards = {(target, source) for _, source, target in known if target != source}
    back = list({call.node: call for call, source, target in known if (source, target) in backwards}.values())
    unknown: dict[tuple[str, int], list[OperatorCall]] = {}
    for call in calls:
        if not (call.given and call.made):
            unknown.setdefault((call.place[0], call.frame[1]), []).append(call)
    for group in (back, *unknown.values()):
        if group:
            both = any(call.given and call.made and len(_pairs(reading, call)) > 1 for call in group)
            yield from _function(reading, "data type", group, to_and_fro=both)


def _promoted(reading: Reading) -> Iterator[Finding]:
    """Find operators that compute in float64 because of one argument, if the result is converted back to float32."""
    calls = [call for call in reading.calls if call.made and call.place[0]]
    sources = [
        call
        for call in calls
        if call.direct and call.name not in TYPES and call.made[0].dtype == "float64" and call.elements > 1
        if any((kind.dtype, kind.elements) == ("float32", call.made[0].elements) for kind in call.given)
    ]
    sizes = {call.made[0].elements for call in sources}
    back = [
        call
        for call in calls
        if call.name in TYPES and call.given and (call.made[0].elements in sizes and call.made[0].dtype == "float32")
        if call.given[0].dtype == "float64" or reading.tree.variants[call.node] > 1
        if call.count >= max(0.5 * reading.steps, FEWEST)
    ]
    if not back:
        return
    wide = [call for call in calls if call.made[0].dtype == "float64" and call.made[0].elements in sizes]
    taken = sum(call.time for call in wide)
    nodes = [call.node for call in wide + back]
    saves = reading.gain("layout", IN_DOUBLE * taken + sum(call.time for call in back), nodes)
    if saves.expected >= MATTERS:
        yield reading.finding(
            "single precision becomes double precision on the way",
            costliest(sources).place,
            f"{', '.join(dict.fromkeys(call.name.removeprefix('aten::') for call in wide))} compute in float64, which"
            f" takes {reading.spent(taken)}, because one of the tensors on this"
            f" line has it; line {costliest(back).place[1]} converts back.",
            "Keep that tensor in float32: convert it once, where it is made.",
            saves,
            nodes,
        )


def _pairs(reading: Reading, call: OperatorCall) -> list[tuple[str, str]]:
    """Pairs (source, target) of data types that a line converts, from its first recorded call and its source text."""
    source, target = call.given[0].dtype, call.made[0].dtype
    text = reading.syntax(call.place[0])
    statement = text.at(call.place[1]) if text else None
    if reading.tree.variants[call.node] < 2 or statement is None:
        return [(source, target)]
    named = [_NAMED[method] for method in _METHOD.findall(ast.unparse(statement)) if method in _NAMED]
    return [(source, target), *((target, other) for other in named if other != target)]


def copying(reading: Reading) -> np.ndarray:
    """Mask of the nodes that copy a tensor, directly or in a node below."""
    tree = reading.tree
    copying = np.array([name in ("aten::copy_", "aten::_to_copy", "aten::clone") for name in tree.names])[tree.name]
    copying &= tree.count > 0
    for node in range(len(tree) - 1, 0, -1):
        copying[tree.parent[node]] |= copying[node] and tree.kind[tree.parent[node]] == tree.kind[node]
    return copying


def _function(
    reading: Reading, kind: str, calls: list[OperatorCall], *, taken_back: bool = False, to_and_fro: bool = False
) -> Iterator[Finding]:
    """Report a function's conversions, if each run makes several conversions or one of the flags is set.

    Args:
        taken_back: whether another operator undoes all conversions, which takes as long as the conversions themselves.
        to_and_fro: whether a single line converts in both directions.
    """
    runs = min(call.count for call in calls)
    if sum(call.count for call in calls) / runs < 2 and not taken_back and not to_and_fro:
        return
    taken = 0.0
    for call in calls:
        # the gradient also has the other layout, so the next operator of the backward pass copies it
        copied = call.forward if kind == "layout" and call.graphed else 0
        taken += call.forward + max(call.backward, copied)
    taken *= 2 if taken_back else 1
    gain = taken + reading.python_of({call.place for call in calls}, sum(call.count for call in calls))
    nodes = [call.node for call in calls]
    saves = reading.gain("layout", gain, nodes)
    if saves.expected < MATTERS:
        return
    places: dict[Place, None] = dict.fromkeys(call.place for call in sorted(calls, key=lambda call: call.place))
    lines = ", ".join(str(line) for _, line in places)
    yield reading.finding(
        f"the {kind} is converted back and forth",
        costliest(calls).place,
        f"{sum(call.count for call in calls)} conversions on {'lines' if len(places) > 1 else 'line'} {lines} take"
        f" {nanoseconds(taken)}, forward and backward.",
        f"Keep one {kind} throughout: convert once, before the loop or at the model's inputs.",
        saves,
        nodes,
    )
