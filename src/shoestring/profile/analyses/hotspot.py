"""Analysis of hotspots: one line takes more than half of the program's time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shoestring.figures import percent
from shoestring.profile.analyses.association import costly_orders
from shoestring.profile.analyses.products import wasted_products
from shoestring.profile.analyses.reading import OperatorCall, Place, Reading
from shoestring.profile.findings import Finding
from shoestring.profile.tree import NodeKind

LARGE = 0.5
"""Minimum share of the profiled time that a line must take, for a finding."""
PRODUCTS = 0.15
"""A line is assumed to call the model if a matrix product on it takes more than this share of the profiled time."""


def hotspots(reading: Reading) -> Iterator[Finding]:
    """Find wasteful matrix products, and a line that takes, with the code it calls, more than half of the time.

    The time of matrix products, convolutions and attention does not count for their line, because a model needs them
    and they already run near the machine's peak speed. Lines that call a whole model are not reported either, because
    their time belongs to lines or layers inside the model.
    """
    yield from wasted_products(reading)
    yield from costly_orders(reading)
    times: dict[Place, float] = {}
    waiting = _starting(reading)
    for (file, line), time in reading.line_itself.items():  # a short loop's samples fall on its head or body
        around = [reading.line_itself.get((file, near), 0) for near in (line - 1, line + 1)]
        # a line that waits computes nothing
        if (file, line) not in waiting and ".wait(" not in reading.text((file, line)):
            times[file, line] = float(time + sum(other for other in around if other < time))
    calls = dict[Place, list[OperatorCall]]()
    for call in reading.calls:
        if call.modules <= 1 and not call.dense and not call.name.startswith(("c10d", "Torch", "DistributedData")):
            times[call.place] = times.get(call.place, 0) + call.time
            calls.setdefault(call.place, []).append(call)
    place = max(times, key=lambda place: times[place], default=("", 0))
    if not place[0] or reading.share(times[place]) <= LARGE:
        return
    if any(call.dense and call.place == place and reading.share(call.time) > PRODUCTS for call in reading.calls):
        return
    parts = sorted(calls.get(place, ()), key=lambda call: -call.time)[:3]
    shares = [(call.name.removeprefix("aten::"), call.time) for call in parts]
    shares.append(("Python itself", reading.line_itself.get(place, 0)))
    largest = ", ".join(f"{name} {percent(reading.share(time))}" for name, time in shares if reading.share(time) > 0.01)
    if reading.waits(place):
        advice = (
            "Look here first: this loop ends when a clock or a condition says so, and computing less in it saves"
            " nothing. Find out what it waits for, and whether it must; an event or a lock waits without computing."
        )
        yield reading.finding(
            "one line takes most of the time, in a loop that waits",
            place,
            f"{percent(reading.share(times[place]))} of the time is spent on this line: {largest}.",
            advice,
            None,
            [call.node for call in parts],
        )
        return
    yield reading.finding(
        "one line takes most of the time",
        place,
        f"{percent(reading.share(times[place]))} of the time is spent on this line and on its gradients: {largest}.",
        "Look here first: compute less (a cheaper formulation, less precision, fewer elements), or compute it once.",
        None,
        [call.node for call in parts],
    )


def _starting(reading: Reading) -> set[Place]:
    """Lines that call compiled JAX functions; such a line spends most of its own time on waiting for the functions."""
    if "jax" not in reading.profile.facts.versions:
        return set()
    tree = reading.tree
    compiled = (tree.kind == NodeKind.OPERATOR) & np.array(["::" not in name for name in tree.names])[tree.name]
    for node in range(len(tree) - 1, 0, -1):
        compiled[tree.parent[node]] |= compiled[node]
    return {reading.place(node) for node in np.flatnonzero(compiled & (reading.lines == np.arange(len(tree)))).tolist()}
