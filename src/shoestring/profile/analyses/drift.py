"""Analysis of step-time drift: steps take longer and longer, because the data that they process grows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from shoestring.figures import nanoseconds, seconds
from shoestring.profile.analyses.reading import MATTERS, OperatorCall, Place, Reading
from shoestring.profile.findings import Finding

FEWEST_STEPS, FEWEST = 24, 12
"""Minimum number of steps, and minimum number of measurements of the steps' progress, to look for drift."""
GROWTH = 1.3
"""Minimum ratio of the mean step time in the last quarter of the steps to the mean step time in the first quarter."""
ORDERLY = 0.8
"""Minimum Spearman correlation between step numbers and step times."""
EXPLAINED = 0.3
"""A line is reported if its calls explain at least this fraction of the drift."""

SIZES = 3
"""An operator's arguments are assumed to grow if they have at least this many distinct sizes."""
AGAIN = 3
"""If an operator has at least this many computed gradients per call, steps are assumed to backpropagate into earlier
steps."""


def drifts(reading: Reading) -> Iterator[Finding]:
    """If steps take longer and longer, find the line whose calls explain most of the increase."""
    work = reading.profile.facts.work
    if len(work) <= FEWEST or work[-1].steps - work[0].steps < FEWEST_STEPS:
        return
    steps, processor = np.array([entry.steps for entry in work]), np.array([entry.processor for entry in work])
    # processor seconds per step in each twelfth of the steps
    ends = np.linspace(steps[0], steps[-1], FEWEST + 1)
    times = np.diff(np.interp(ends, steps, processor)) / np.diff(ends)
    # the times must grow from quarter to quarter, by `GROWTH` in all, and correlate with the number of the step
    quarters = times.reshape(4, -1).mean(1)
    correlation = np.corrcoef(np.arange(len(times)), np.argsort(np.argsort(times)))[0, 1]
    if not ((np.diff(quarters) > 0).all() and quarters[3] >= GROWTH * quarters[0] and correlation >= ORDERLY):
        return
    count = int(steps[-1] - steps[0])
    # growth of the step time from the first to the last step, by the Theil-Sen estimator: the median of pairwise slopes
    first_of_pair, second_of_pair = np.triu_indices(len(times), 1)
    slopes = (times[second_of_pair] - times[first_of_pair]) / (second_of_pair - first_of_pair)
    slope = float(np.median(slopes)) * len(times)
    drifted = reading.total * max(slope, 0.0) / 2 / float(times.mean())
    lines: dict[Place, list[OperatorCall]] = {}
    for call in reading.calls:
        # the sizes of the call's arguments keep changing, or later steps compute the call's gradients again
        slower = call.forward >= 1.5 * int(reading.tree.least[call.node]) * call.count
        larger = reading.tree.variants[call.node] >= SIZES and slower
        grows = call.count >= FEWEST and (larger or call.evaluated >= AGAIN * call.count)
        if call.place[0] and grows:
            lines.setdefault(call.place, []).append(call)
    excess = {place: sum(_excess(reading, call) for call in calls) for place, calls in lines.items()}
    place = max(excess, key=lambda place: excess[place], default=None)
    if place is None or excess[place] < EXPLAINED * drifted:
        return  # no line explains enough of the drift
    calls = lines[place]
    first, *_, last = quarters
    nodes = [call.node for call in calls]
    saves = reading.gain("drift", drifted, nodes)
    if saves.expected < MATTERS:
        return
    yield reading.finding(
        "steps take longer and longer",
        place,
        f"The first quarter of {count} steps take {seconds(first)} each, the last"
        f" {seconds(last)};"
        f" calls on this line take {nanoseconds(excess[place])} more than if each were as quick as the quickest.",
        "Something that this line works on grows with each step: keep its size fixed (a buffer of fixed size, the last"
        " few results only, detach() for what earlier steps computed).",
        saves,
        nodes,
    )


def _excess(reading: Reading, call: OperatorCall) -> float:
    """Nanoseconds, forward and backward, that would be saved if every call were as fast as the fastest call."""
    if call.evaluated >= AGAIN * call.count:
        return call.backward * (1 - call.count / call.evaluated)
    quick = int(reading.tree.least[call.node]) * call.count
    return call.time * (1 - quick / max(call.forward, 1))


def rising(values: Sequence[float], parts: int = 3, least: float = 0.2) -> bool:
    """Whether a series rises in each of `parts` equal parts by at least the fraction `least` of its total rise."""
    ends = [part[-1] for part in np.array_split(np.array(values), parts)]
    rises = np.diff([values[0], *ends])
    return bool((rises >= least * (values[-1] - values[0])).all() and values[-1] > values[0])
