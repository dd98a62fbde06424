"""From runs to figures: how many steps a method needs to a loss, and how long a step takes."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

import numpy as np

WINDOW = 5  # looks that one point of a smoothed curve is the mean of: itself and its neighbours

Log = dict[str, Any]  # what worker.Log is after its way through JSON


def smoothed(points: Sequence[tuple[int, float]], window: int = WINDOW) -> tuple[np.ndarray, np.ndarray]:
    """Steps and losses of a held-out curve, each loss the mean of up to `window` points around it.

    Near the ends the window shrinks equally on both sides, so that a falling curve is not shifted.
    """
    steps, losses = np.array(points, float).T
    reach = [min(window // 2, at, len(losses) - 1 - at) for at in range(len(losses))]
    return steps, np.array([losses[at - near : at + near + 1].mean() for at, near in enumerate(reach)])


def steps_to(points: Sequence[tuple[int, float]], loss: float, window: int = WINDOW) -> float | None:
    """The first step, between looks interpolated, at which the smoothed curve is at `loss`; None if it never is."""
    steps, losses = smoothed(points, window)
    below = np.flatnonzero(losses <= loss)
    if not len(below):
        return None
    at = int(below[0])
    if at == 0:
        return float(steps[0])
    share = (losses[at - 1] - loss) / (losses[at - 1] - losses[at])
    return float(steps[at - 1] + share * (steps[at] - steps[at - 1]))


def final(points: Sequence[tuple[int, float]], at: int, window: int = WINDOW) -> float:
    """The smoothed loss at step `at`."""
    return float(np.interp(at, *smoothed(points, window)))


def step_seconds(ranks: Sequence[Log], stretch: int) -> float:
    """The median over stretches of steps of their mean step; see `stretches`."""
    return median(stretches(ranks, stretch))


def stretches(ranks: Sequence[Log], length: int) -> list[float]:
    """Seconds a step of each `length` steps, as the last rank has done them; of what there is, if that is less.

    The last, because several ranks share a core: without communication the first ones leave it to the others.
    """
    steps = len(ranks[0]["seconds"])
    length = min(length, steps)
    starts = range(0, steps - length + 1, length)
    return [max(sum(log["seconds"][start : start + length]) for log in ranks) / length for start in starts]


def step_bytes(ranks: Sequence[Log]) -> float:
    """Bytes that a rank's interface sent in a step, on average."""
    return fmean(fmean(log["sent"]) for log in ranks)


def efficiency(dense: tuple[float, float], method: tuple[float, float]) -> float:
    """Time-to-loss efficiency from (steps to DDP's final loss, seconds a step): 1 is a network without cost."""
    return dense[0] * dense[1] / (method[0] * method[1])
