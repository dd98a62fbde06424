"""Analysis of synchronization in a loop: values are read out of tensors (`item()`) one at a time."""

from __future__ import annotations

from collections.abc import Iterator

from shoestring.figures import nanoseconds
from shoestring.profile.analyses.reading import MATTERS, OperatorCall, Place, Reading
from shoestring.profile.findings import Finding

TAKES = frozenset({"aten::item", "aten::is_nonzero", "aten::_local_scalar_dense", "aten::equal", "aten::allclose"})
SMALL = 4_000
"""An operator whose shortest call takes at most this many nanoseconds is assumed to work on single values, so that
vectorizing avoids its calls."""
OFTEN = 2.0
"""A line in a loop is reported if it reads at least this many values per step."""


def synchronizations(reading: Reading) -> Iterator[Finding]:
    """Find lines that read several values per step out of tensors; each read waits for the accelerator, if any."""
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
    most = max(call.count for call in calls)
    small = [
        call
        for call in reading.calls
        if call.place == place and reading.tree.least[call.node] <= SMALL and call.count >= 0.5 * most
    ]
    waited = sum(call.forward for call in calls if call not in small)
    called = sum(call.count for call in small)
    taken = sum(call.forward + call.backward for call in small) + waited
    # Python also takes time on other lines of the functions that make these calls, such as the head of a loop.
    tree, frames, calling = reading.tree, {call.frame for call in small}, {call.place for call in reading.calls}
    others = [
        node
        for node in range(1, len(tree))
        if (int(tree.parent[node]), int(tree.name[node])) in frames and reading.place(node) not in calling
    ]
    python = max(reading.python.get(place, 0) + int(sum(tree.own[node] for node in others)), called * 400)
    gain = taken + python
    on_accelerator = reading.profile.facts.device not in ("", "cpu")
    nodes = [call.node for call in small]
    saves = reading.gain("synchronization", gain, nodes)
    if saves.expected < MATTERS:
        return
    cost = f"they take {nanoseconds(taken)}, and Python takes {nanoseconds(python)} on this line"
    also = "; each waits until the accelerator has finished" if on_accelerator else ""
    yield reading.finding(
        "a loop takes values out of tensors one at a time",
        place,
        f"{count} values are taken on this line, {count / reading.steps:.0f} a step: {cost}{also}.",
        "Compute on whole tensors and take the result out once (item(), tolist()), outside of the loop.",
        None if on_accelerator else saves,
        nodes,
    )
