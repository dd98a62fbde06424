"""Synchronization in a loop: values are taken out of tensors one at a time."""

from __future__ import annotations

from collections.abc import Iterator

from shoestring.profile.analyses.reading import MATTERS, OperatorCall, Place, Reading, milliseconds
from shoestring.profile.findings import Finding

TAKES = frozenset({"aten::item", "aten::is_nonzero", "aten::_local_scalar_dense", "aten::equal", "aten::allclose"})
SMALL = 4_000
"""Nanoseconds of the shortest call on a single value, which vectorized code needs no more."""
OFTEN = 2.0
"""Values that one line takes in a step, from which on it is a loop."""


def synchronizations(reading: Reading) -> Iterator[Finding]:
    """Lines that take several values a step out of tensors, each with a wait for an accelerator, if there is one."""
    by_place: dict[Place, list[OperatorCall]] = {}
    for call in reading.calls:
        if call.name in TAKES and call.place[0] and call.direct:
            by_place.setdefault(call.place, []).append(call)
    for place, calls in by_place.items():
        yield from _line(reading, place, calls)


def _line(reading: Reading, place: Place, calls: list[OperatorCall]) -> Iterator[Finding]:
    count = sum(call.count for call in calls)
    if count < OFTEN * reading.steps:
        return
    each = max(call.count for call in calls)
    small = [
        call
        for call in reading.calls
        if call.place == place and reading.tree.least[call.node] <= SMALL and call.count >= 0.5 * each
    ]
    waited = sum(call.forward for call in calls if call not in small)
    called = sum(call.count for call in small)
    taken = sum(call.forward + call.backward for call in small) + waited
    python = max(reading.python.get(place, 0) + _loop_itself(reading, small), called * 400)
    gain = taken + python
    on_accelerator = reading.profile.facts.device not in ("", "cpu")
    nodes = [call.node for call in small]
    saves = reading.gain("synchronization", gain, nodes)
    if saves.expected < MATTERS:
        return
    cost = f"they take {milliseconds(taken)}, and Python takes {milliseconds(python)} on this line"
    also = "; each waits until the accelerator has finished" if on_accelerator else ""
    yield reading.finding(
        "a loop takes values out of tensors one at a time",
        place,
        f"{count} values are taken on this line, {count / reading.steps:.0f} a step: {cost}{also}.",
        "Compute on whole tensors and take the result out once (item(), tolist()), outside of the loop.",
        None if on_accelerator else saves,
        nodes,
    )


def _loop_itself(reading: Reading, calls: list[OperatorCall]) -> int:
    """Nanoseconds of Python on lines of the same function that call no operator, such as the head of the loop."""
    tree, frames = reading.tree, {call.frame for call in calls}
    calling = {call.place for call in reading.calls}
    nodes = [
        node
        for node in range(1, len(tree))
        if (int(tree.parent[node]), int(tree.name[node])) in frames and reading.place(node) not in calling
    ]
    return int(sum(tree.own[node] for node in nodes))
