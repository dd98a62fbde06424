"""Analysis of evaluation with autograd enabled: a forward pass saves tensors for a backward pass that never runs."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from shoestring.figures import nanoseconds
from shoestring.profile.analyses import costs
from shoestring.profile.analyses.reading import OperatorCall, Reading
from shoestring.profile.analyses.statements import Function, Loop
from shoestring.profile.findings import Finding
from shoestring.profile.tree import Integers, NodeKind, totals

SHARE = 0.08
"""A forward pass without a backward pass is reported if it takes at least this share of the profiled time."""
MOSTLY = 0.9
"""A function is assumed to call the model if at least this fraction of the time of forward passes without a backward
pass is spent below the function."""


def kept_gradients(reading: Reading) -> Iterator[Finding]:
    """Find lines that run a forward pass with autograd enabled but without a backward pass."""
    tree = reading.tree
    useless = np.zeros(len(tree), np.int64)
    for call in reading.calls:
        useless[call.node] = call.forward if call.graphed else 0
    graphed = totals(tree.parent, useless)
    own = (reading.lines == np.arange(len(tree))) & (tree.kind == NodeKind.PYTHON) & ~reading.behind
    for node in reading.topmost(own & (graphed > 0) & (reading.gradients == 0)):
        if reading.share(int(graphed[node])) < SHARE:
            continue
        nodes = _of_one_function(reading, own, graphed, node)
        inside = np.zeros(len(tree), bool)
        for inner in nodes:
            inside |= reading.below(inner)
        calls = [call for call in reading.calls if inside[call.node] and call.graphed]
        functions = int(tree.graphed[inside].sum())
        yield reading.finding(
            "a forward pass that no backward pass follows keeps what gradients would need",
            reading.place(max(nodes, key=lambda line: graphed[line])),
            f"{functions} functions of a backward pass are recorded below this line, whose operators take"
            f" {nanoseconds(sum(call.forward for call in calls))}, and none of them runs.",
            "Evaluate within torch.inference_mode() (or torch.no_grad()), which records nothing and frees each result"
            " as soon as it is used.",
            reading.gain("evaluation", sum(_recording(reading, call) for call in calls), [call.node for call in calls]),
            [call.node for call in calls],
        )


def _of_one_function(reading: Reading, own: NDArray[np.bool_], graphed: Integers, node: int) -> list[int]:
    """Descend from a line to the lines of the function that calls the model.

    Args:
        own: mask of the program's own lines.
        graphed: for each node, nanoseconds of the operators (at and below the node) that recorded functions for a
            backward pass.
    """
    tree, nodes = reading.tree, [node]
    while True:
        candidates = np.flatnonzero(own & (graphed > 0)).tolist()
        inside = [line for line in candidates if _nearest_own(reading, own, line) in nodes]
        calls = max(nodes, key=lambda line: graphed[line])
        functions = {int(tree.name[line]) for line in inside if graphed[line] > (1 - MOSTLY) * graphed[calls]}
        below = sum(int(graphed[line]) for line in inside)
        enters = below >= MOSTLY * sum(int(graphed[line]) for line in nodes) and len(functions) == 1
        if not (enters and _evaluates(reading, calls, tree.names[functions.pop()])):
            return nodes
        nodes = inside


def _nearest_own(reading: Reading, own: NDArray[np.bool_], node: int) -> int:
    """The nearest node above `node` that is a line of the program's own code; the root if there is none."""
    above = int(reading.tree.parent[node])
    while above > 0 and not own[above]:
        above = int(reading.tree.parent[above])
    return above


def _evaluates(reading: Reading, line: int, name: str) -> bool:
    """Whether the function that a line calls is part of the evaluation code rather than of the model."""
    file, _, function = name.partition("\t")
    if function.rpartition(".")[2] in ("forward", "__call__"):
        return False
    outer, inner = reading.syntax(reading.place(line)[0]), reading.syntax(file)
    statement = outer.at(reading.place(line)[1]) if outer else None
    looped = outer is not None and statement is not None and outer.loop(statement) is not None
    if not looped:
        return True
    # a function that is called in a loop is part of the evaluation code only if it contains a loop itself
    for node in ast.walk(inner.module) if inner else ():
        named = isinstance(node, Function) and node.name == function.rpartition(".")[2]
        if named and any(isinstance(part, Loop) for part in ast.walk(node)):
            return True
    return False


def _recording(reading: Reading, call: OperatorCall) -> float:
    """Nanoseconds that autograd's recording adds to an operator's calls."""
    nodes = reading.below(call.node)
    recorded = int(reading.tree.graphed[nodes].sum())
    elements = call.made[0].elements if call.made else call.elements or 1
    taken = reading.slower * recorded * costs.nanoseconds("recording", "forward", elements)
    return min(taken, 0.9 * call.forward + taken)
