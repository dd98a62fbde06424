"""Layout and data type ping-pong: conversions that a later one takes back."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shoestring.profile.analyses.reading import MATTERS, OperatorCall, Place, Reading, costliest, milliseconds
from shoestring.profile.findings import Finding

TYPES = frozenset({"aten::to", "aten::type_as", "aten::_to_copy"})
LAYOUTS = frozenset({"aten::contiguous", "aten::clone", "aten::reshape"})


def conversions(reading: Reading) -> Iterator[Finding]:
    """Conversions of which two or more follow each other in what one function does."""
    copies = copying(reading)
    changing = [call for call in reading.calls if copies[call.node] and call.place[0]]
    yield from _types(reading, [call for call in changing if call.name in TYPES])
    functions: dict[tuple[str, int], list[OperatorCall]] = {}
    for call in changing:
        if call.name in LAYOUTS:
            functions.setdefault((call.place[0], call.frame[1]), []).append(call)
    for calls in functions.values():
        yield from _function(reading, "layout", calls)


def _types(reading: Reading, calls: list[OperatorCall]) -> Iterator[Finding]:
    """Of conversions of the data type, those that others take back."""
    known = {call.node: (call.given[0].dtype, call.made[0].dtype) for call in calls if call.given and call.made}
    back = [call for call in calls if known.get(call.node, ("", ""))[::-1] in known.values()]
    unknown: dict[tuple[str, int], list[OperatorCall]] = {}
    for call in calls:
        if call.node not in known:
            unknown.setdefault((call.place[0], call.frame[1]), []).append(call)
    for group in (back, *unknown.values()):
        if group:
            yield from _function(reading, "data type", group)


def copying(reading: Reading) -> np.ndarray:
    """Which nodes copy, themselves or below."""
    tree = reading.tree
    copying = np.array([name in ("aten::copy_", "aten::_to_copy", "aten::clone") for name in tree.names])[tree.name]
    copying &= tree.count > 0
    for node in range(len(tree) - 1, 0, -1):
        copying[tree.parent[node]] |= copying[node] and tree.kind[tree.parent[node]] == tree.kind[node]
    return copying


def _function(reading: Reading, kind: str, calls: list[OperatorCall]) -> Iterator[Finding]:
    runs = min(call.count for call in calls)
    each = sum(call.count for call in calls) / runs
    if each < 2:
        return
    taken = sum(call.forward + call.backward for call in calls)
    gain = taken + reading.python_of({call.place for call in calls}, sum(call.count for call in calls))
    nodes = [call.node for call in calls]
    saves = reading.gain("layout", gain, nodes)
    if saves[0] < MATTERS:
        return
    places: dict[Place, None] = dict.fromkeys(call.place for call in sorted(calls, key=lambda call: call.place))
    lines = ", ".join(str(line) for _, line in places)
    yield reading.finding(
        f"the {kind} is converted back and forth",
        costliest(calls).place,
        f"{sum(call.count for call in calls)} conversions on {'lines' if len(places) > 1 else 'line'} {lines} take"
        f" {milliseconds(taken)}, forward and backward.",
        f"Keep one {kind} throughout: convert once, before the loop or at the model's inputs.",
        saves,
        nodes,
    )
