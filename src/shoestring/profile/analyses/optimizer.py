"""Analysis of unfused optimizers: parameters are updated one by one, with several small operators each."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from shoestring.figures import nanoseconds
from shoestring.profile.analyses import costs
from shoestring.profile.analyses.reading import MATTERS, OperatorCall, Reading, costliest, named
from shoestring.profile.analyses.statements import called
from shoestring.profile.findings import Finding

UPDATES = named("add_ sub_ mul_ div_ addcmul_ addcdiv_ lerp_ copy_ zero_ sqrt_ sign_ clamp_ fill_")
FUNCTIONAL = named("add sub mul div lerp addcmul addcdiv")
PARAMETERS = {"parameters", "named_parameters", "buffers", "named_buffers", "state_dict"}
"""Methods of modules that return parameters or buffers; a loop over their result counts as a loop over parameters."""
_COUNTED = {"SGD": "add", "RMSprop": "addcdiv", "Adagrad": "addcdiv"}
"""Maps optimizers to the in-place operator that they call once per parameter; other optimizers call `addcdiv_`."""
FOREACH = 0.6
"""The single operator of a `foreach` step of SGD takes about this fraction of the step's time."""
FEWEST = 6
"""Minimum number of parameters in a step, for a finding."""
MANY = 6
"""A line with at least this many calls per step is assumed to be in a loop over parameters."""


def unfused_optimizers(reading: Reading) -> Iterator[Finding]:
    """Find optimizer steps that use neither `fused` nor `foreach`, and the program's own loops over parameters."""
    known = [
        node for node in reading.spans if costs.known(f"{_class(reading, node)} single") and not _own(reading, node)
    ]
    for node in known:
        yield from _step(reading, node)
    for node in sorted({*reading.spans} - {*known}):
        yield from _unknown_step(reading, node)
    if reading.behind.any():  # there is a backward pass, so the program trains
        # The program's own loops that update parameters, outside the optimizer steps in `known`.
        inside = set()
        for node in known:
            inside |= set(reading.below(node).nonzero()[0].tolist())
        functions: dict[tuple[int, int], list[OperatorCall]] = {}
        for call in reading.calls:
            often = call.count >= MANY * reading.steps
            if call.node not in inside and call.place[0] and call.direct and often and not call.graphed:
                functions.setdefault(call.frame, []).append(call)
        for calls in functions.values():
            updates = [call for call in calls if call.name in UPDATES or _replaces(reading, call)]
            if updates and not any(call.name in ("aten::item", "aten::select") for call in calls):
                yield from _loop(reading, [call for call in calls if not call.dense], updates)


def _own(reading: Reading, node: int) -> bool:
    """Whether the program itself implements the optimizer's step."""
    inside = reading.below(node)
    return any(inside[call.node] and call.direct for call in reading.calls)


def _class(reading: Reading, node: int) -> str:
    """The class name of an optimizer, from the name of the span of its step."""
    return reading.names(node).partition("#")[2].partition(".")[0]


def _step(reading: Reading, node: int) -> Iterator[Finding]:
    tree, inside = reading.tree, reading.below(node)
    name = _class(reading, node)
    counts: dict[str, int] = {}
    for call in reading.calls:
        if inside[call.node]:
            counts[call.name] = counts.get(call.name, 0) + call.count
    if any("_foreach_" in operator or "_fused_" in operator for operator in counts) or not tree.count[node]:
        return
    # number of optimizers that step on this line, such as one per layer
    optimizers = max(1, round(int(tree.count[node]) / reading.steps))
    steps, taken = max(1, int(tree.count[node]) // optimizers), int(tree.inclusive[node])
    kind = "SGD momentum" if name == "SGD" and "aten::mul_" in counts else name
    updates = max(counts.get(f"aten::{_COUNTED.get(name, 'addcdiv')}_", 0), 0)
    if name == "SGD" and "aten::mul_" in counts:
        updates = counts["aten::mul_"]
    parameters = updates / steps
    if parameters < FEWEST:
        return
    way = "fused" if costs.known(f"{kind} fused") else "foreach"
    updated = [call for call in reading.calls if inside[call.node] and call.name in UPDATES]
    elements, slower = costs.elements_of(
        [(f"{kind} single", parameters)], taken / steps, _mean_elements(reading, updated)
    )
    after = slower * parameters * costs.nanoseconds(f"{kind} {way}", "forward", elements)
    saves = reading.gain("optimizer", taken - after * steps, [node])
    if saves.expected < MATTERS:
        return
    yield reading.finding(
        "the optimizer updates each parameter by itself",
        reading.place(node),
        f"{steps} steps of {name} take {reading.spent(taken)}:"
        f" {sum(counts.values()) / steps:.0f} operators a step for about {parameters:.0f} parameters.",
        f"Pass {way}=True to {name}, which updates all parameters in one call."
        + " One optimizer can have a group of parameters for each rate." * (optimizers > 1),
        saves,
        [node],
    )


def _unknown_step(reading: Reading, node: int) -> Iterator[Finding]:
    """Estimate the saving for an optimizer without measured costs, from the operators that its step calls."""
    inside, steps = reading.below(node), max(int(reading.tree.count[node]), 1)
    calls = [call for call in reading.calls if inside[call.node] and not call.direct]
    updates = [call for call in calls if call.name in UPDATES and call.count >= FEWEST * steps]
    if len(updates) < 2 or any("_foreach_" in call.name or "_fused_" in call.name for call in calls):
        return
    often = [call for call in calls if call.count >= FEWEST * steps]
    count, taken = sum(call.count for call in often), int(reading.tree.inclusive[node])
    parameters = max(call.count for call in updates) / steps
    elements, slower = costs.elements_of(
        [(call.name.removesuffix("_"), call.count / count) for call in often],
        sum(call.forward for call in often) / count,
        _mean_elements(reading, updates),
    )
    after = count * FOREACH * slower * costs.nanoseconds("SGD foreach", "forward", elements)
    saves = reading.gain("optimizer", taken - after, [node])
    if saves.expected < MATTERS:
        return
    yield reading.finding(
        "the optimizer updates each parameter by itself",
        reading.place(node),
        f"{steps} steps of {_class(reading, node)} take {reading.spent(taken)}:"
        f" {count / steps:.0f} operators a step for about {parameters:.0f} parameters.",
        f"Pass foreach=True to {_class(reading, node)}, which updates all parameters in few calls.",
        saves,
        [node],
    )


def _mean_elements(reading: Reading, calls: list[OperatorCall]) -> float:
    """Mean number of elements of the tensors that these calls update, assuming 4 bytes per element; 0 if unknown."""
    tensors = sum(call.count * sum(tensor.elements > 1 for tensor in (*call.given, *call.made)) for call in calls)
    return float(sum(reading.tree.bytes[call.node] for call in calls)) / 4 / max(tensors, 1)


def _replaces(reading: Reading, call: OperatorCall) -> bool:
    """Whether a call, in a loop over parameters, computes a new tensor per parameter, such as a moving average."""
    text = reading.syntax(call.place[0])
    statement = text.at(call.place[1]) if text else None
    loop = text.loop(statement) if text and statement else None
    over = called(loop.iter) if isinstance(loop, ast.For) else set()
    return call.name in FUNCTIONAL and call.elements > 1 and bool(over & PARAMETERS)


def _loop(reading: Reading, calls: list[OperatorCall], updates: list[OperatorCall]) -> Iterator[Finding]:
    parameters = min(call.count for call in updates)
    taken = sum(call.forward for call in calls)
    python = reading.python_of({call.place for call in calls}, sum(call.count for call in calls))
    computing = [call for call in calls if call.name not in ("aten::detach", "aten::alias", "aten::set_data")]
    counted = [(call.name.removesuffix("_"), call.count / parameters) for call in computing]
    elements, slower = costs.elements_of(counted, taken / parameters, _mean_elements(reading, updates))
    after = parameters * len(computing) * FOREACH * slower * costs.nanoseconds("SGD foreach", "forward", elements)
    if any("sqrt" in call.name for call in calls):
        after = parameters * slower * costs.nanoseconds("Adam fused", "forward", elements)
    nodes = [call.node for call in calls]
    saves = reading.gain("optimizer", taken + python - after, nodes)
    if saves.expected < MATTERS:
        return
    names = ", ".join(dict.fromkeys(call.name.removeprefix("aten::") for call in computing))
    yield reading.finding(
        "a loop updates tensors one by one",
        costliest(updates).place,
        f"{names} run for {parameters / reading.steps:.0f} tensors a step and take {nanoseconds(taken)}, besides what"
        " Python takes between them.",
        "Update all tensors in one call: a fused optimizer of torch.optim, or torch._foreach_ operators.",
        saves,
        nodes,
    )
