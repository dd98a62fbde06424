"""checkpoint.waste-*: the time lost at our intervals over that at the best ones, by simulation."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

from benchmarks.harness import Bar, Deadline, Measured
from benchmarks.intervals import normal
from shoestring.checkpoint.tiers.interval import Level
from tests.rigs.checkpointing.failure_simulation import FailureSetting, Intervals, drawn, optimum

HOUR = 3600.0


@dataclass(frozen=True)
class Sizes:
    """Failures of each run and runs, for the grid and for what is reported; points of the grid a level and round."""

    events: int = 4000
    runs: int = 24
    final_events: int = 8000
    final_runs: int = 64
    points: int = 9


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
    setting: FailureSetting, chosen: Intervals, name: str, other: Intervals, other_name: str, sizes: Sizes
) -> Measured:
    """One choice's waste over another's, at fresh failures."""
    failures = drawn(setting, sizes.final_events, sizes.final_runs, seed=2)
    wastes = [choice.waste(setting, failures) for choice in (chosen, other)]
    ratio = wastes[0].mean() / wastes[1].mean()
    error = (wastes[0] - ratio * wastes[1]).std(ddof=1) / math.sqrt(sizes.final_runs) / wastes[1].mean()
    notes = (
        f"{title}: {100 * waste.mean():.2f}% of all time, at {_told(setting, choice)}"
        for title, choice, waste in zip((name, other_name), (chosen, other), wastes, strict=True)
    )
    return Measured(float(ratio), f"standard error {error:.1g}; {'; '.join(notes)}", normal(float(ratio), float(error)))


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
            kind="drawn",
        )
        for name, (setting, words) in told.items()
    ]
    what = (
        "time lost with checkpoints of 60 s at the simulator's best interval over ours with a level of 0.5 s below, "
        "which survives 10 of 11 failures; one every 55 minutes"
    )
    measure = functools.partial(one_level, two(), sizes)
    return [
        *bars,
        Bar("checkpoint.waste-one-level", what, ">=", 2.5, measure, baseline="disk only", seeds=(1, 2), kind="drawn"),
    ]
