"""Typical times of operators on a CPU, from the table `cpu.json`, which `benchmarks/profile/baselines.py` measured."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Literal

Direction = Literal["forward", "backward"]

_LIKE = {
    "aten::clamp": "clamp_min clamp_max hardtanh",
    "aten::maximum": "minimum",
    "aten::amax": "amin",
    "aten::max": "min",
    "aten::gt": "ge lt le eq ne",
    "aten::log": "log2 log10",
    "aten::exp": "exp2",
    "aten::erf": "erfc",
    "aten::tanh": "tan atan sinh cosh",
    "aten::softplus": "log_sigmoid logaddexp",
}
"""Maps operators in the table to operators that are missing from it but take about as long."""
LARGEST = 1 << 28
"""Largest number of elements that `elements_of` considers."""


@cache
def _table() -> tuple[list[int], dict[str, dict[str, list[float]]]]:
    table = json.loads(Path(__file__).with_name("cpu.json").read_text())
    nanoseconds = table["nanoseconds"]
    nanoseconds |= {f"aten::{other}": nanoseconds[name] for name, others in _LIKE.items() for other in others.split()}
    return table["sizes"], nanoseconds


def known(name: str, direction: Direction = "forward") -> bool:
    """Whether the cost of an operator is in the table."""
    return direction in _table()[1].get(name, {})


def nanoseconds(name: str, direction: Direction, elements: float) -> float:
    """Nanoseconds of a call on a tensor of `elements` elements, interpolated or extrapolated linearly.

    Raises:
        KeyError: the operator is not in the table.
    """
    sizes, table = _table()
    times = table[name][direction]
    points = list(zip(sizes, times, strict=False))
    if elements <= points[0][0]:
        return points[0][1]
    for (low, before), (high, after) in pairwise(points):
        if elements <= high or high == points[-1][0]:
            return before + (after - before) * (elements - low) / (high - low)
    raise AssertionError("the table of costs has fewer than two sizes")


def ratio(name: str) -> float:
    """The largest ratio of an operator's backward time to its forward time, over the sizes in the table."""
    return max(nanoseconds(name, "backward", size) / nanoseconds(name, "forward", size) for size in _table()[0])


def total(calls: Iterable[tuple[str, float]], direction: Direction, elements: float) -> float:
    """Total nanoseconds of (operator, number of calls) pairs; an operator outside the table counts as `aten::mul`."""
    return sum(
        count * nanoseconds(name if known(name, direction) else "aten::mul", direction, elements)
        for name, count in calls
    )


def elements_of(calls: Iterable[tuple[str, float]], measured: float, known: float = 0) -> tuple[float, float]:
    """Estimate the number of elements per call, and the ratio of times on this machine to times in the table.

    Args:
        calls: (operator, number of calls) pairs.
        measured: forward nanoseconds of all calls.
        known: recorded number of elements per call; if 0, the number is estimated from the measured time.
    """
    counted = list(calls)
    if known:
        return known, measured / max(total(counted, "forward", known), 1.0)
    least = total(counted, "forward", 1)
    if measured <= least:
        return 1.0, measured / max(least, 1.0)
    low, high = 0.0, math.log(LARGEST)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if total(counted, "forward", math.exp(middle)) < measured else (low, middle)
    return math.exp(low), 1.0
