"""Step-time drift: each step takes longer than those before it, because something that it works on grows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from shoestring.profile.analyses.reading import MATTERS, OperatorCall, Place, Reading, costliest, milliseconds
from shoestring.profile.findings import Finding

FEWEST_STEPS, FEWEST = 24, 12
"""Steps, and moments at which it is known how far they are."""
GROWTH = 1.3
"""Median of the last quarter of the steps over that of the first, at least."""
ORDERLY = 0.8
"""Spearman's correlation of steps with their times, at least."""
EXPLAINED = 0.3
"""Part of the drift that the calls of one line account for, at least."""

SIZES = 3
"""Different sizes that an operator was given, at least."""
AGAIN = 3
"""Times as often as an operator runs that its gradient is computed, at least, where steps go back to earlier ones."""


def drifts(reading: Reading) -> Iterator[Finding]:
    """The line whose calls take longer and longer, where steps do."""
    work = reading.profile.facts.work
    if len(work) <= FEWEST or work[-1].steps - work[0].steps < FEWEST_STEPS:
        return
    steps, processor = np.array([each.steps for each in work]), np.array([each.processor for each in work])
    times = _each_step(steps, processor)
    if not _grows(times):
        return
    count = int(steps[-1] - steps[0])
    drifted = reading.total * max(_slope(times), 0.0) / 2 / float(times.mean())
    calls = _growing(reading, drifted)
    if not calls:
        return
    place = costliest(calls).place
    first, *_, last = times.reshape(4, -1).mean(1)
    nodes = [call.node for call in calls]
    saves = reading.gain("drift", drifted, nodes)
    if saves.expected < MATTERS:
        return
    excess = sum(_excess(reading, call) for call in calls)
    yield reading.finding(
        "steps take longer and longer",
        place,
        f"The first quarter of {count} steps take {milliseconds(first * 1e9)} each, the last"
        f" {milliseconds(last * 1e9)};"
        f" calls on this line take {milliseconds(excess)} more than if each were as quick as the quickest.",
        "Something that this line works on grows with each step: keep its size fixed (a buffer of fixed size, the last"
        " few results only, detach() for what earlier steps computed).",
        saves,
        nodes,
    )


def _each_step(steps: NDArray[np.int64], processor: NDArray[np.float64]) -> NDArray[np.float64]:
    """Processor seconds of a step in each twelfth of the steps."""
    ends = np.linspace(steps[0], steps[-1], FEWEST + 1)
    return np.diff(np.interp(ends, steps, processor)) / np.diff(ends)


def _grows(times: NDArray[np.float64]) -> bool:
    quarters = times.reshape(4, -1).mean(1)
    ranks = np.argsort(np.argsort(times))
    ordered = bool((np.diff(quarters) > 0).all())
    correlated = np.corrcoef(np.arange(len(times)), ranks)[0, 1] >= ORDERLY
    return ordered and quarters[3] >= GROWTH * quarters[0] and bool(correlated)


def _slope(times: NDArray[np.float64]) -> float:
    """By how much a step grows from the first to the last, which few that are far off do not move (Theil and Sen)."""
    first, second = np.triu_indices(len(times), 1)
    return float(np.median((times[second] - times[first]) / (second - first))) * len(times)


def _growing(reading: Reading, drifted: float) -> list[OperatorCall]:
    """Calls of the line that accounts for most of the drift."""
    lines: dict[Place, list[OperatorCall]] = {}
    for call in reading.calls:
        if call.place[0] and _works_on_more(reading, call):
            lines.setdefault(call.place, []).append(call)
    excess = {place: sum(_excess(reading, call) for call in calls) for place, calls in lines.items()}
    place = max(excess, key=lambda place: excess[place], default=("", 0))
    return lines[place] if place in lines and excess[place] >= EXPLAINED * drifted else []


def _works_on_more(reading: Reading, call: OperatorCall) -> bool:
    """Whether it was given tensors of ever more sizes, or its gradients were computed anew for all earlier steps."""
    tree, node = reading.tree, call.node
    larger = tree.variants[node] >= SIZES and call.forward >= 1.5 * int(tree.least[node]) * call.count
    return call.count >= FEWEST and (larger or call.evaluated >= AGAIN * call.count)


def _excess(reading: Reading, call: OperatorCall) -> float:
    """Nanoseconds beyond what calls had taken that were all as quick as the quickest, forward and backward."""
    if call.evaluated >= AGAIN * call.count:
        return call.backward * (1 - call.count / call.evaluated)
    quick = int(reading.tree.least[call.node]) * call.count
    return call.time * (1 - quick / max(call.forward, 1))


def rising(values: Sequence[float], parts: int = 3, least: float = 0.2) -> bool:
    """Whether each part of a series rises by this share of the whole rise at least."""
    ends = [part[-1] for part in np.array_split(np.array(values), parts)]
    rises = np.diff([values[0], *ends])
    return bool((rises >= least * (values[-1] - values[0])).all() and values[-1] > values[0])
