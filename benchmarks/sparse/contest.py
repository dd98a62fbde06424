"""The quickstart's GPT at equal steps: dense, and with its feed-forward layers sparse in every way there is.

Every run is stored as one JSON file in the cache and never made twice, so a contest that was stopped continues where it
was. Learning rates are tuned equally: each method takes the best of three on a seed that is not reported.
"""

from __future__ import annotations

import logging
import math
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from benchmarks.harness import stored
from benchmarks.intervals import of_mean
from benchmarks.rows import Bar, Interval, Measured
from benchmarks.training import recipe
from shoestring.report.sinks import Sink

SEEDS, TUNING_SEED = (1, 2, 3, 4, 5), 100
RATES = (2e-3, 4e-3, 8e-3)
STUDENT_90 = 1.533  # one-sided 90% quantile of t with 4 degrees of freedom: the upper bound of a mean of five
GRID = (6e-6, 2e-5, 6e-5, 2e-4, 6e-4)

OFTEN = {"refresh": 40, "calibrate": 0.0}
METHODS: Mapping[str, Mapping[str, Any]] = {
    "dense": {},
    "ste": {"ste": {}},
    "srste": {"srste": {}},
    "sste": {"sste": {}},
    "step": {"step": {}},
    "ste-transposable": {"ste": {"mask": "transposable", "refresh": 40}},
    "ste-greedy": {"ste": {"mask": "greedy", "refresh": 40}},
    "ste-torch-default": {"ste": {"mask": "torch_default", "refresh": 40}},
    "tsrste": {"tsrste": {"tail": 0.0}},
    "tsrste-tail": {"tsrste": {}},
}
BY_ROWS, BOTH_WAYS = ("ste", "srste", "sste", "step"), ("ste-transposable", "tsrste")


@dataclass
class Flips:
    """A sink that remembers the flip rates and the decay."""

    rates: dict[int, float] = field(default_factory=dict)
    decay: float = 0.0

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if "flip_rate" in values and step % 25 == 0:
            self.rates[step] = values["flip_rate"]
        self.decay = values.get("decay") or self.decay

    def close(self) -> None:
        return


@dataclass
class Contest:
    """All runs; `check` raises when the time is up."""

    folder: Path
    steps: int = 600
    check: Callable[[], None] = field(default=lambda: None)

    def run(self, name: str, tables: Mapping[str, Any], rate: float, seed: int) -> dict[str, Any]:
        """Held-out nats a byte, flip rates and the decay factor of one run; made now if it was not before."""
        path = self.folder / f"{name}-{rate:g}-{seed}-{self.steps}.json"
        return stored(path, self.check, lambda: trained(tables, rate, seed, self.steps))

    @cached_property
    def rates(self) -> dict[str, float]:
        """The best learning rate of each method."""
        return {
            name: min(RATES, key=lambda rate: self.run(name, tables, rate, TUNING_SEED)["nats"])
            for name, tables in METHODS.items()
        }

    def nats(self, name: str) -> list[float]:
        return [self.run(name, METHODS[name], self.rates[name], seed)["nats"] for seed in SEEDS]

    def gaps(self, name: str, other: str = "dense") -> list[float]:
        """Nats a byte above another method, seed by seed."""
        return [mine - theirs for mine, theirs in zip(self.nats(name), self.nats(other), strict=True)]

    @property
    def table(self) -> str:
        """The gap of each method to dense, and its learning rate."""
        said = (f"{name} {bound(self.gaps(name))} at {self.rates[name]:g}" for name in METHODS if name != "dense")
        return "gap to dense, nats a byte, and learning rate: " + "; ".join(said)


def nats_of(document: dict[str, Any], *sinks: Sink) -> float:
    """Held-out nats a byte after a run, which leaves no folder."""
    from shoestring.core.world import World
    from shoestring.run import parse
    from shoestring.training.loop import train

    logging.getLogger("shoestring").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        document["run"]["folder"] = f"{folder}/run"
        result = train(parse(document, name="contest"), World(), sinks=sinks)
    return float(result.metrics["held_out_bits_per_byte"]) * math.log(2)


def trained(tables: Mapping[str, Any], rate: float, seed: int, steps: int) -> dict[str, Any]:
    flips = Flips()
    document = recipe(steps, seed=seed, rate=rate)
    nats = nats_of(document | ({"sparse": tables} if tables else {}), flips)
    return {"nats": nats, "flips": flips.rates, "decay": flips.decay}


@dataclass(frozen=True)
class Bound:
    """A mean of five paired differences, the upper end of its one-sided interval of 90%, and that of 95%."""

    mean: float
    upper: float
    interval: Interval | None

    def __str__(self) -> str:
        return f"{self.mean:+.4f} (<= {self.upper:+.4f})"


def bound(gaps: Sequence[float]) -> Bound:
    mean = statistics.fmean(gaps)
    upper = mean + STUDENT_90 * statistics.stdev(gaps) / len(gaps) ** 0.5
    return Bound(mean, upper, of_mean(gaps).interval)


def rows(ask: Callable[[], Contest]) -> list[Bar]:
    """Every bar of the contest."""

    def bar(name: str, what: str, value: float, measure: Callable[[Contest], Measured], baseline: str) -> Bar:
        return Bar(
            f"sparse.{name}", what, "<=", value,
            measure=lambda _: measure(ask()), baseline=baseline, seeds=SEEDS, peers=("torch",), kind="drawn",
        )  # fmt: skip

    gap = "nats a byte above dense, upper 90% bound of 5 paired seeds, equal steps"
    return [
        bar("gap-rows", f"{gap}: the best method with row masks", 0.03, partial(best, BY_ROWS), "dense"),
        bar("gap-tiles", f"{gap}: the best method with transposable masks", 0.06, partial(best, BOTH_WAYS), "dense"),
        bar("gap-greedy", "the same of STE on exact tiles above greedy ones", 0.0, exact_over_greedy, "STE, greedy"),
        bar("gap-tail", f"{gap}: T-SR-STE with a dense tail of 1/6", 0.06, with_tail, "dense"),
        bar("decay-loss", "the same of the decay found in the run above the best of a grid", 0.01, decay_loss, "grid"),
        bar("decay-low", "0.60 over the flip rate, as a share of dense training's", 1.0, partial(ratio, True), "dense"),
        bar(
            "decay-high",
            "the flip rate, as a share of dense training's, over 0.95",
            1.0,
            partial(ratio, False),
            "dense",
        ),
    ]


def best(names: Sequence[str], contest: Contest) -> Measured:
    found = {name: bound(contest.gaps(name)) for name in names}
    name = min(found, key=lambda name: found[name].upper)
    return Measured(found[name].upper, f"{name}; {contest.table}", found[name].interval)


def exact_over_greedy(contest: Contest) -> Measured:
    """What the search is worth: the same method (STE) on the best tiles and on greedily chosen ones."""
    exact = bound(contest.gaps("ste-transposable", "ste-greedy"))
    decayed = bound(contest.gaps("tsrste", "ste-greedy"))
    return Measured(exact.mean, f"STE on both. T-SR-STE's decay on exact tiles against it: {decayed}", exact.interval)


def with_tail(contest: Contest) -> Measured:
    found = bound(contest.gaps("tsrste-tail"))
    return Measured(found.upper, f"mean {found.mean:+.4f}; sparse in 5/6 of the steps", found.interval)


def decay_loss(contest: Contest) -> Measured:
    rate = contest.rates["tsrste"]
    grid = {
        factor: [
            contest.run(f"tsrste-{factor:g}", {"tsrste": OFTEN | {"tail": 0.0, "masked_decay": factor}}, rate, seed)[
                "nats"
            ]
            for seed in SEEDS
        ]
        for factor in GRID
    }
    factor = min(grid, key=lambda factor: statistics.fmean(grid[factor]))
    found = bound([mine - theirs for mine, theirs in zip(contest.nats("tsrste"), grid[factor], strict=True)])
    return Measured(found.upper, f"best of the grid: {factor:g}", found.interval)


def ratio(low: bool, contest: Contest) -> Measured:
    """The flip rate of sparse runs over that of dense ones, in the first quarter of the steps after the search."""
    rate = contest.rates["tsrste"]
    ratios, factors = [], []
    for seed in SEEDS:
        mine = contest.run("tsrste", METHODS["tsrste"], rate, seed)
        dense = contest.run("watched", {"tsrste": OFTEN | {"tail": 0.999999}}, rate, seed)
        steps = [step for step in mine["flips"] if contest.steps // 20 < int(step) <= contest.steps // 4]
        ratios.append(statistics.fmean(mine["flips"][step] / dense["flips"][step] for step in steps))
        factors.append(mine["decay"])
    mean = statistics.fmean(ratios)
    each = ", ".join(f"{value:.2f} at factor {factor:.2g}" for value, factor in zip(ratios, factors, strict=True))
    note = f"mean ratio {mean:.3f}; {each}"
    least, most = of_mean(ratios).interval or (mean, mean)
    if low:
        return Measured(0.60 / mean, note, (0.60 / most, 0.60 / least))
    return Measured(mean / 0.95, note, (least / 0.95, most / 0.95))
