"""The time that a run loses at given checkpoint intervals, and the best ones, by simulation failure by failure.

The simulator has no model of the waste. It follows the steps and the checkpoints of many runs through failures drawn at
random (a renewal process for each class, exponential or Weibull), and finds its own best intervals on a grid, every
point of which meets the same failures. What is reported is simulated at other failures than those it was chosen at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, product

import numpy as np

from shoestring.checkpoint.tiers.interval import Level, plan

NARROWING = (2.0, 1.35, 1.12)  # the factors by which each grid goes both ways from the best point of the one before


@dataclass(frozen=True)
class FailureSetting:
    """Levels whose rates are the reciprocal mean times between failures, steps of `step` seconds, a Weibull shape."""

    levels: tuple[Level, ...]
    step: float
    shape: float = 1.0


@dataclass(frozen=True)
class Failures:
    """What happens to each run, both (events, runs): seconds since the failure before, and which level recovers."""

    gaps: np.ndarray
    levels: np.ndarray

    def only(self, used: Sequence[int]) -> Failures:
        """The same, where of the levels only `used`, of which the highest is one, are there to recover."""
        return replace(self, levels=np.searchsorted(used, self.levels))


def drawn(setting: FailureSetting, events: int, runs: int, seed: int) -> Failures:
    """So many failures of each of so many runs; each class is a renewal process of its own."""
    random, rates = np.random.default_rng(seed), np.array([level.rate for level in setting.levels])
    expected = events * rates / rates.sum()
    counts = np.ceil(expected + 8 * np.sqrt(expected) + 20).astype(int)  # so many that no class runs out
    means = 1 / rates / math.gamma(1 + 1 / setting.shape)
    times = [(mean * random.weibull(setting.shape, (n, runs))).cumsum(0) for mean, n in zip(means, counts, strict=True)]
    kinds = np.repeat(np.arange(len(rates)), counts)
    merged = np.concatenate(times)
    order = merged.argsort(axis=0)[:events]
    return Failures(np.diff(np.take_along_axis(merged, order, axis=0), axis=0, prepend=0.0), kinds[order])


class Points:
    """The clock of undisturbed runs at several intervals: steps, and after every `every[l]` a checkpoint of level l.

    Where checkpoints of several levels are due at once, they follow one another from the lowest to the highest.

    Args:
        every: steps between checkpoints, (points, levels), each a multiple of the one before it.
    """

    def __init__(self, levels: Sequence[Level], step: float, every: np.ndarray) -> None:
        self.step, self.costs = step, [level.cost for level in levels]
        self.every = [column[:, None].astype(float) for column in every.T]
        self.times = [one / other for other, one in pairwise([np.ones_like(self.every[0]), *self.every])]
        self.seconds: list[np.ndarray] = []  # from the end of one level's save to the end of the next
        below = np.full_like(self.every[0], step)
        for times, cost in zip(self.times, self.costs, strict=True):
            below = times * below + cost
            self.seconds.append(below)

    def begun(self, steps: np.ndarray) -> np.ndarray:
        """When the step after so many, (points, runs), begins."""
        saves = (np.floor(steps / every) * cost for every, cost in zip(self.every, self.costs, strict=True))
        return steps * self.step + sum(saves)

    def saved(self, level: int, clock: np.ndarray) -> np.ndarray:
        """The steps, (points, runs), that the newest checkpoint of that level has, which was over at `clock`."""
        steps, rest = np.zeros_like(clock), clock
        for upper in reversed(range(level, len(self.every))):
            number = np.floor(rest / self.seconds[upper])
            rest = rest - number * self.seconds[upper]
            if upper < len(self.every) - 1:
                over = number >= self.times[upper + 1]  # then a checkpoint above continues, and no steps
                number, rest = np.where(over, self.times[upper + 1], number), np.where(over, 0.0, rest)
            steps = steps + number * self.every[upper]
        return steps


def simulate(levels: Sequence[Level], step: float, every: np.ndarray, failures: Failures) -> np.ndarray:
    """The share of the time lost, (points, runs), up to the last failure, at intervals `every`, (points, levels).

    A failure takes all checkpoints of the levels below the one that it names, and those under way. The run resumes
    from the newest checkpoint that is left, after the time that the level named takes.
    """
    points = Points(levels, step, every)
    # What is under way beside training: from the end of the stall to where the checkpoint can be recovered from.
    latency = [max(level.duration - level.cost, 0.0) for level in levels]
    restart = np.array([level.restart for level in levels])
    here = np.zeros((len(every), failures.gaps.shape[1]))
    saved = np.zeros((len(levels), *here.shape))
    pause = np.zeros(here.shape[1])
    for gap, level in zip(failures.gaps, failures.levels, strict=True):
        clock = points.begun(here) + np.maximum(gap - pause, 0.0)
        for each, late in enumerate(latency):
            newest = points.saved(each, np.maximum(clock - late, 0.0))
            saved[each] = np.where(newest > here, newest, saved[each])
            saved[each][:, level > each] = 0.0
        here, pause = saved.max(0), restart[level]
    return 1 - here * step / failures.gaps.sum(0)


@dataclass(frozen=True)
class Intervals:
    """Which levels are used, and steps between checkpoints of each of them."""

    used: tuple[int, ...]
    every: tuple[int, ...]

    @classmethod
    def planned(cls, setting: FailureSetting) -> Intervals:
        """Ours."""
        steps = plan(setting.levels, setting.step)
        used = tuple(index for index, level in enumerate(setting.levels) if level.name in steps)
        return cls(used, tuple(steps[setting.levels[index].name] for index in used))

    def waste(self, setting: FailureSetting, failures: Failures) -> np.ndarray:
        """Of each run, (runs,)."""
        return _at(setting, self.used, np.array([self.every]), failures)[0]


def _at(setting: FailureSetting, used: Sequence[int], every: np.ndarray, failures: Failures) -> np.ndarray:
    levels = [setting.levels[index] for index in used]
    return simulate(levels, setting.step, every, failures.only(used))


def optimum(setting: FailureSetting, failures: Failures, check: Callable[[], None], points: int) -> Intervals:
    """The best choice: of all on the coarse grids of every selection of levels, then on ever finer ones around it."""
    highest = len(setting.levels) - 1
    selections = [(*low, highest) for number in range(highest + 1) for low in combinations(range(highest), number)]
    best = min(
        (_best(setting, used, coarse(setting, used), failures, check) for used in selections), key=lambda it: it[0]
    )
    for factor in NARROWING:
        found = _best(setting, best[1].used, around(setting, best[1], factor, points), failures, check)
        best = min(best, found, key=lambda it: it[0])
    return best[1]


def _best(
    setting: FailureSetting, used: tuple[int, ...], grid: np.ndarray, failures: Failures, check: Callable[[], None]
) -> tuple[float, Intervals]:
    wastes: list[float] = []
    for part in np.array_split(grid, math.ceil(len(grid) / 128)):
        check()
        wastes += _at(setting, used, part, failures).mean(1).tolist()
    index = int(np.argmin(wastes))
    return wastes[index], Intervals(used, tuple(map(int, grid[index])))


def coarse(setting: FailureSetting, used: Sequence[int]) -> np.ndarray:
    """Powers of four of a step that are allowed, up to the mean time between failures that the highest is there for."""
    longest = max(1, int(math.log(1 / setting.levels[-1].rate / setting.step, 4)))
    nests = product(range(longest + 1), repeat=len(used))
    return _allowed(setting, used, ([4**each for each in nest] for nest in nests if list(nest) == sorted(nest)))


def around(setting: FailureSetting, choice: Intervals, factor: float, points: int) -> np.ndarray:
    """Each interval as a multiple of the one below, up to `factor` times shorter and longer."""
    times = [one // other for other, one in pairwise((1, *choice.every))]
    scales = np.geomspace(1 / factor, factor, points)
    tried = ({max(1, round(each * scale)) for scale in scales} for each in times)
    return _allowed(setting, choice.used, (np.cumprod(nest).tolist() for nest in product(*map(sorted, tried))))


def _allowed(setting: FailureSetting, used: Sequence[int], nests: Iterator[list[int]]) -> np.ndarray:
    """Those at which every checkpoint is over before the next of its level."""
    least = [setting.levels[index].duration / setting.step - 1e-9 for index in used]
    return np.array([nest for nest in nests if all(one >= other for one, other in zip(nest, least, strict=True))])
