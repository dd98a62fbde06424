"""checkpoint.waste-*: the time lost at our intervals over that at the best ones, by simulation failure by failure.

The simulator has no model of the waste. It follows the steps and the checkpoints of many runs through failures drawn at
random (a renewal process for each class, exponential or Weibull), and finds its own best intervals on a grid, every
point of which meets the same failures. What is reported is simulated at other failures than those it was chosen at.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, product

import numpy as np

from benchmarks.harness import Bar, Deadline, Measured
from shoestring.checkpoint.tiers.interval import Level, plan

HOUR = 3600.0
NARROWING = (2.0, 1.35, 1.12)  # the factors by which each grid goes both ways from the best point of the one before


@dataclass(frozen=True)
class FailureSetting:
    """Levels whose rates are the reciprocal mean times between failures, steps of `step` seconds, a Weibull shape."""

    levels: tuple[Level, ...]
    step: float
    shape: float = 1.0


@dataclass(frozen=True)
class Sizes:
    """Failures of each run and runs, for the grid and for what is reported; points of the grid a level and round."""

    events: int = 4000
    runs: int = 24
    final_events: int = 8000
    final_runs: int = 64
    points: int = 9


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


# -- rows -------------------------------------------------------------------------------------------------------------


def cache(mean: float, shape: float = 1.0) -> FailureSetting:
    """Own memory, a peer's, and disk; a failure every `mean` seconds: of 71, 60 take a process, 10 a host, 1 all."""
    rate = 1 / mean / 71
    memory = Level("memory", cost=0.05, duration=0.2, rate=60 * rate, restart=5.0)
    peer = Level("peer", cost=0.3, duration=4.0, rate=10 * rate, restart=20.0)
    disk = Level("disk", cost=2.0, duration=30.0, rate=rate, restart=60.0)
    return FailureSetting((memory, peer, disk), step=0.5, shape=shape)


def two() -> FailureSetting:
    """Two levels whose checkpoints stop training."""
    memory = Level("memory", cost=0.5, duration=0.5, rate=1 / HOUR, restart=5.0)
    return FailureSetting((memory, Level("disk", cost=60.0, duration=60.0, rate=0.1 / HOUR, restart=120.0)), step=1.0)


def against_optimum(setting: FailureSetting, sizes: Sizes, deadline: Deadline) -> Measured:
    """The waste of our plan over that of the simulator's choice."""
    best = optimum(setting, drawn(setting, sizes.events, sizes.runs, seed=1), deadline.check, sizes.points)
    return compared(setting, Intervals.planned(setting), "ours", best, "the simulator's", sizes)


def one_level(setting: FailureSetting, sizes: Sizes, deadline: Deadline) -> Measured:
    """The waste of the highest level alone, at the simulator's choice of its interval, over that of our plan."""
    rate = sum(level.rate for level in setting.levels)
    alone = replace(setting, levels=(replace(setting.levels[-1], rate=rate),))
    best = optimum(alone, drawn(alone, sizes.events, sizes.runs, seed=1), deadline.check, sizes.points)
    only = Intervals((len(setting.levels) - 1,), best.every)
    return compared(setting, only, "one level", Intervals.planned(setting), "ours", sizes)


def compared(
    setting: FailureSetting, mine: Intervals, name: str, other: Intervals, other_name: str, sizes: Sizes
) -> Measured:
    """One choice's waste over another's, at fresh failures."""
    failures = drawn(setting, sizes.final_events, sizes.final_runs, seed=2)
    wastes = [choice.waste(setting, failures) for choice in (mine, other)]
    ratio = wastes[0].mean() / wastes[1].mean()
    error = (wastes[0] - ratio * wastes[1]).std(ddof=1) / math.sqrt(sizes.final_runs) / wastes[1].mean()
    notes = (
        f"{title}: {100 * waste.mean():.2f}% of all time, at {_told(setting, choice)}"
        for title, choice, waste in zip((name, other_name), (mine, other), wastes, strict=True)
    )
    return Measured(float(ratio), f"standard error {error:.1g}; {'; '.join(notes)}")


def _told(setting: FailureSetting, choice: Intervals) -> str:
    each = zip(choice.used, choice.every, strict=True)
    return ", ".join(f"{setting.levels[index].name} {steps * setting.step:g} s" for index, steps in each)


def rows(sizes: Sizes | None = None) -> list[Bar]:
    """The bars: our waste over the optimum in four settings, and one level's over ours in a fifth."""
    sizes = sizes or Sizes()
    often = {"10min": (HOUR / 6, "10 minutes"), "1h": (HOUR, "hour"), "10h": (10 * HOUR, "10 hours")}
    what = "time lost at our intervals of three levels over that at the simulator's best, a failure every"
    told = {name: (cache(mean), f"{what} {words}") for name, (mean, words) in often.items()}
    told["weibull"] = (cache(HOUR, shape=0.7), f"{what} hour, Weibull of shape 0.7")
    bars = [
        Bar(
            f"checkpoint.waste-{name}",
            words,
            "<=",
            1.1,
            functools.partial(against_optimum, setting, sizes),
            seeds=(1, 2),
        )
        for name, (setting, words) in told.items()
    ]
    what = (
        "time lost with checkpoints of 60 s at the simulator's best interval over ours with a level of 0.5 s below, "
        "which survives 10 of 11 failures; one every 55 minutes"
    )
    measure = functools.partial(one_level, two(), sizes)
    return [*bars, Bar("checkpoint.waste-one-level", what, ">=", 2.5, measure, baseline="disk only", seeds=(1, 2))]
