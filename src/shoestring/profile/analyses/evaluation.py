"""Gradients kept in evaluation: a forward pass records what a backward pass would need, and none follows."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from shoestring.profile.analyses import costs
from shoestring.profile.analyses.reading import OperatorCall, Place, Reading, milliseconds
from shoestring.profile.analyses.statements import Function, Loop, Text
from shoestring.profile.findings import Finding
from shoestring.profile.tree import Integers, NodeKind, totals

SHARE = 0.08
"""Of the time, what such a forward pass takes at least."""
MOSTLY = 0.9


def kept_gradients(reading: Reading) -> Iterator[Finding]:
    """Lines that run a forward pass with gradients of which no backward pass is run."""
    tree = reading.tree
    useless = np.zeros(len(tree), np.int64)
    for call in reading.calls:
        useless[call.node] = call.forward if call.graphed else 0
    kept = totals(tree.parent, useless)
    own = (reading.lines == np.arange(len(tree))) & (tree.kind == NodeKind.PYTHON) & ~reading.behind
    for node in reading.topmost(own & (kept > 0) & (reading.gradients == 0)):
        if reading.share(int(kept[node])) >= SHARE:
            yield _finding(reading, _of_one_function(reading, own, kept, node), kept)


def _of_one_function(reading: Reading, own: NDArray[np.bool_], kept: Integers, node: int) -> list[int]:
    """The lines of the function that calls the model, from a line above them."""
    tree, nodes = reading.tree, [node]
    while True:
        inside = [
            each for each in np.flatnonzero(own & (kept > 0)).tolist() if _nearest_own(reading, own, each) in nodes
        ]
        calls = max(nodes, key=lambda each: kept[each])
        functions = {int(tree.name[each]) for each in inside if kept[each] > (1 - MOSTLY) * kept[calls]}
        below = sum(int(kept[each]) for each in inside)
        enters = below >= MOSTLY * sum(int(kept[each]) for each in nodes) and len(functions) == 1
        if not (enters and _evaluates(reading, calls, tree.names[functions.pop()])):
            return nodes
        nodes = inside


def _nearest_own(reading: Reading, own: NDArray[np.bool_], node: int) -> int:
    above = int(reading.tree.parent[node])
    while above > 0 and not own[above]:
        above = int(reading.tree.parent[above])
    return above


def _evaluates(reading: Reading, line: int, name: str) -> bool:
    """Whether a function that a line calls is a part of the program that evaluates, and no part of the model."""
    file, _, function = name.partition("\t")
    if function.rpartition(".")[2] in ("forward", "__call__"):
        return False
    outer, inner = reading.syntax(reading.place(line)[0]), reading.syntax(file)
    statement = outer.at(reading.place(line)[1]) if outer else None
    looped = outer is not None and statement is not None and outer.loop(statement) is not None
    return not looped or (inner is not None and _loops(inner, function.rpartition(".")[2]))


def _loops(text: Text, function: str) -> bool:
    named = [node for node in ast.walk(text.module) if isinstance(node, Function) and node.name == function]
    return any(isinstance(each, Loop) for node in named for each in ast.walk(node))


def _finding(reading: Reading, nodes: list[int], kept: Integers) -> Finding:
    line = max(nodes, key=lambda each: kept[each])
    inside = np.zeros(len(reading.tree), bool)
    for node in nodes:
        inside |= reading.below(node)
    calls = [call for call in reading.calls if inside[call.node] and call.graphed]
    functions = int(reading.tree.graphed[inside].sum())
    place: Place = reading.place(line)
    return reading.finding(
        "a forward pass that no backward pass follows keeps what gradients would need",
        place,
        f"{functions} functions of a backward pass are recorded below this line, whose operators take"
        f" {milliseconds(sum(call.forward for call in calls))}, and none of them runs.",
        "Evaluate within torch.inference_mode() (or torch.no_grad()), which records nothing and frees each result as"
        " soon as it is used.",
        reading.gain("evaluation", sum(_recording(reading, call) for call in calls), [call.node for call in calls]),
        [call.node for call in calls],
    )


def _recording(reading: Reading, call: OperatorCall) -> float:
    """Nanoseconds that an operator's calls take longer because they record for the backward pass."""
    nodes = reading.below(call.node)
    recorded = int(reading.tree.graphed[nodes].sum())
    each = costs.nanoseconds("recording", "forward", call.made[0].elements if call.made else call.elements or 1)
    return min(recorded * reading.slower * each, 0.9 * call.forward + reading.slower * each * recorded)
