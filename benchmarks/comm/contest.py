"""Who is ahead: rates of learning chosen on a seed of their own, curves on fresh seeds, times on slow links.

The target is DDP's held-out loss at step 600; its losses at earlier steps are read from the same curve. A method is
given three times as many steps, and one that does not get there in them is said to be worth at most a third of DDP's.
Curves are of a small model, once for all rates. Bytes and seconds are those of a larger one on hosts with slow links,
whose frames pass by the millisecond: a cable takes nothing from processors, but its emulation does.

Constant rates of learning flatter what averages weights. So the best of ours and of the peers at each rate are run with
a cool-down, too, and a step of theirs is worth as many as DDP needs to the same loss with a cool-down of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

import numpy as np

from benchmarks.comm.curves import WINDOW, final, step_bytes, step_seconds, steps_to
from benchmarks.comm.families import OURS, PEERS, Family
from benchmarks.comm.figure import Figure
from benchmarks.comm.methods import BF16, DDP, NONE, Method, muon
from benchmarks.comm.pace import Pace
from benchmarks.comm.peers import has_epfml
from benchmarks.comm.setting import Setting
from benchmarks.comm.spec import Spec
from benchmarks.comm.store import Store
from shoestring.testing.netlab.links import COALESCED, bits_per_second

RATES = ("100mbit", "10mbit", "1mbit")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How long everything is; smaller ones for a trial."""

    marks: tuple[int, ...] = (100, 200, 400, 600)
    """Steps of DDP; the losses that it has then are everybody's targets, the last one that of the bars."""
    most: int = 3
    """Times as many steps that a method is given."""
    look: int = 20
    seeds: tuple[int, ...] = (13, 14, 15)
    tuning_seed: int = 100
    tuning_steps: int = 200
    cool: float = 0.4
    """Part of a run with a cool-down in which the rate of learning falls to zero."""
    slow_steps: int = 24
    """Steps at a rate; fewer where they would take longer than `patience`."""
    patience: float = 150.0
    learner: Setting = field(default_factory=lambda: Setting(dim=96, layers=4, hidden=264))
    """Whose curves count: 0.6 M parameters."""
    setting: Setting = field(default_factory=Setting)
    """Whose bytes and seconds count."""

    @property
    def steps(self) -> int:
        return self.marks[-1]

    @property
    def margin(self) -> int:
        """Steps beyond those of which the smoothed loss is wanted."""
        return WINDOW // 2 * self.look


TINY = Setting(dim=32, layers=2, hidden=64, sequence=32, held_out=16)
TRIAL = Sizes(
    marks=(8, 16),
    look=2,
    seeds=(1, 2),
    tuning_steps=8,
    slow_steps=6,
    patience=20.0,
    learner=TINY,
    setting=TINY,
)


LRS = (1.5e-3, 3e-3, 6e-3)
"""Rates of learning that each setting is tried at; the grid grows until the best is inside it."""


@dataclass
class Contest:
    """The comparison; runs come out of the store, and what figures need of them out of a folder that git keeps."""

    store: Store
    sizes: Sizes = field(default_factory=Sizes)
    folder: Path | None = None
    """Of curves and times; by default inside of the store."""

    @cached_property
    def _kept(self) -> Store:
        return Store(self.folder or self.store.folder / "kept", self.store.check, ignored=self.folder is None)

    def timed(self, spec: Spec) -> list[list[dict[str, Any]]]:
        """Seconds and bytes of the steps of a launch, by method and rank."""

        def make() -> dict[str, Any]:
            run = self.store.get(spec)
            logs = [[{name: log[name] for name in ("seconds", "sent")} for log in ranks] for ranks in run["logs"]]
            names = [method.name for method in spec.methods]
            return {
                "tree": run.get("tree"),
                "sources": run.get("sources"),
                "methods": names,
                "rate": spec.rate,
                "logs": logs,
            }

        logs: list[list[dict[str, Any]]] = self._kept.kept(spec.key, make)["logs"]
        return logs

    # -- curves --------------------------------------------------------------------------------------------------------

    def _curve(self, method: Method, seed: int, length: int, *, until: float = 0.0, cool: float = 0.0) -> Any:
        """Steps and held-out losses of a run of the learner; only at the end of one with a cool-down."""
        spec = Spec(
            methods=(method,), turn=length, look=length if cool else self.sizes.look, seed=seed, horizon=length,
            setting=self.sizes.learner, until=until, cool=cool,
        )  # fmt: skip

        def make() -> dict[str, Any]:
            run = self.store.get(spec)
            log = run["logs"][0][0]
            return {
                "tree": run.get("tree"),
                "sources": run.get("sources"),
                "method": method.name,
                "held_out": log["held_out"],
            }

        return [(step, loss) for step, loss in self._kept.kept(spec.key, make)["held_out"]]

    def curve(self, method: Method, seed: int) -> list[tuple[int, float]]:
        """To DDP's loss at the last mark, or as far as a method is given steps."""
        sizes = self.sizes
        if seed == sizes.tuning_seed:  # DDP's twice as far, for what learns faster
            return self._curve(method, seed, sizes.tuning_steps * (1 + (method == DDP.at(method.lr))))
        if method == self.dense:
            return self._curve(method, seed, sizes.steps + sizes.margin)
        target = final(self.curve(self.dense, seed), sizes.steps)
        return self._curve(method, seed, sizes.most * sizes.steps + sizes.margin, until=target)

    # -- choosing ------------------------------------------------------------------------------------------------------

    def tuned(self, base: Method) -> Method:
        """At its best rate of learning, on the seed for choosing: that with the lowest loss."""
        seed, at = self.sizes.tuning_seed, self.sizes.tuning_steps
        losses = {lr: final(self.curve(base.at(lr), seed), at) for lr in LRS}
        while (best := min(losses, key=losses.__getitem__)) in (min(losses), max(losses)):
            lr = best * (2 if best == max(losses) else 0.5)
            losses[lr] = final(self.curve(base.at(lr), seed), at)
        return base.at(best)

    @cached_property
    def dense(self) -> Method:
        """DDP with its best rate of learning."""
        return self.tuned(DDP)

    @cached_property
    def dense_muon(self) -> Method:
        """The same with Muon, to tell what the optimizer gains from what an exchange loses."""
        return self.tuned(muon(DDP))

    def learner(self, method: Method) -> Method:
        """The method whose curve is this one's: that of DDP for all that exchange whole gradients at every step."""
        return {"adamw": self.dense, "muon": self.dense_muon}[method.optimizer] if method.dense else method

    def chosen(self, family: Family, rate: str) -> Method:
        """The best of a family at a rate, on the seed for choosing.

        Times are not measured for this, but computed from bytes: what a delay hides is left out.
        """
        return max(map(self.tuned, family.bases), key=lambda method: self._promise(method, rate))

    def _promise(self, method: Method, rate: str) -> float:
        """The efficiency that the seed for choosing and the bytes promise."""
        seed, at = self.sizes.tuning_seed, self.sizes.tuning_steps
        dense = self.curve(self.dense, seed)
        worth = (steps_to(dense, final(self.curve(method, seed), at)) or 2 * at) / at
        return worth * self.free * at / self.pace(method, rate, self._computed_seconds).elapsed(at)

    def _computed_seconds(self, method: Method, rate: str) -> float:
        settings = method.settings
        hidden = min(settings.get("delay", 0) * settings.get("fragments", 1), method.period) * self.free
        wire = self._wire_seconds(method, rate) * method.period
        arithmetic = self._muons_arithmetic if method.optimizer == "muon" else 0.0
        return self.free + arithmetic + max(0.0, wire - hidden) / method.period

    @cached_property
    def free(self) -> float:
        """Seconds of a step without communication; one for all, whatever else ran then."""
        return step_seconds(self.timed(self._spec(NONE, turn=8, warm=4))[0], 4)

    @cached_property
    def _muons_arithmetic(self) -> float:
        plain, other = self.timed(self._spec(NONE, muon(NONE), turn=4, rounds=6, warm=4))
        return step_seconds(other, 4) - step_seconds(plain, 4)

    # -- times ---------------------------------------------------------------------------------------------------------

    def _spec(self, *methods: Method, **more: Any) -> Spec:
        return Spec(methods=methods, setting=self.sizes.setting, **more)

    def slow_spec(self, method: Method, rate: str) -> Spec:
        """The method and no communication in turns, at a rate."""
        method = method.at(3e-3)  # steps of any rate of learning take as long
        link = {"rate": rate, "coalesce": bits_per_second(rate) > COALESCED}
        every = self._wire_seconds(method, rate) + 1.0
        afford = max(1, int(self.sizes.patience / every))
        if method.local:
            # At least two periods and 12 steps where that can be afforded: short periods say little alone.
            turn = method.period * max(1, min(max(2, 12 // method.period), afford // method.period))
            rounds = 4 if 4 * turn <= afford else 2
            return self._spec(NONE, method, turn=turn, rounds=rounds, warm=0, **link, horizon=2 * rounds * turn)
        steps = max(3, min(self.sizes.slow_steps, afford))
        turn = 4 if steps >= 12 else 2
        return self._spec(NONE, method, turn=turn, rounds=-(-steps // turn), warm=4, **link)

    def _wire_seconds(self, method: Method, rate: str) -> float:
        """What the bytes of a step take at a rate, without anything else."""
        short = method.shortened
        spec = self._spec(short, turn=2 * short.period, warm=4, horizon=1000)
        return step_bytes(self.timed(spec)[0]) * short.period / method.period * 8 / bits_per_second(rate)

    def slow(self, method: Method, rate: str) -> tuple[float, float]:
        """Seconds a step without communication, and with this method at a rate.

        Where a merge of replicas alone would take longer than `patience` it is not measured: the wire alone, at the
        full rate, is taken for its time, which flatters the method.
        """
        if method.local and self._wire_seconds(method, rate) * method.period > self.sizes.patience:
            return self.free, self._computed_seconds(method, rate)
        spec = self.slow_spec(method, rate)
        free, logs = self.timed(spec)
        if method.local and spec.turn * spec.rounds > 2 * method.period:  # nothing lands in the first period
            logs = [{**log, "seconds": log["seconds"][method.period :]} for log in logs]
        stretch = method.period * -(-4 // method.period) if method.local else spec.turn
        return step_seconds(free, stretch), step_seconds(logs, stretch)

    def pace(self, method: Method, rate: str, seconds: Callable[[Method, str], float]) -> Pace:
        """Of a run with this method, from the `seconds` of a step of it; of one with a schedule, from its parts."""
        if not method.scheduled:
            return Pace(seconds(method, rate))
        settings = dict(method.settings)
        start, final_every = settings.pop("start", 0), settings.pop("final_every", 0)
        fixed = replace(method, settings=settings, horizon=0)
        slower = replace(fixed, settings=settings | {"every": final_every}, period=final_every)
        gradients = replace(fixed, settings=settings | {"start": 10**6}, period=1)
        return Pace(
            first=seconds(fixed, rate),
            last=seconds(slower, rate) if final_every else 0.0,
            every=settings["every"],
            final_every=final_every,
            horizon=method.horizon,
            starting=seconds(gradients, rate) if start else 0.0,
            start=start,
        )

    # -- figures -------------------------------------------------------------------------------------------------------

    def worth(self, method: Method) -> tuple[dict[int, tuple[float, ...]], frozenset[int]]:
        """Steps of DDP over this method's, by mark and seed, and the marks at which this is a bound."""
        found: dict[int, tuple[float, ...]] = {}
        bounded = set()
        for mark in self.sizes.marks:
            of_seeds = []
            for seed in self.sizes.seeds:
                target = final(self.curve(self.dense, seed), mark)
                needed = steps_to(self.curve(method, seed), target)
                if needed is None:
                    bounded.add(mark)
                dense = steps_to(self.curve(self.dense, seed), target) or mark
                of_seeds.append(dense / (needed or self.sizes.most * self.sizes.steps))
            found[mark] = tuple(of_seeds)
        return found, frozenset(bounded)

    def figure(self, method: Method, rate: str) -> Figure:
        pairs: list[float] = []

        def measured(part: Method, at: str) -> float:
            free, seconds = self.slow(part, at)
            pairs.append(free)
            return seconds

        pace = self.pace(method, rate, measured)
        return Figure(method, *self.worth(method), fmean(pairs), pace, *self._optimizer(method))

    def _optimizer(self, method: Method) -> tuple[float, float]:
        """What the optimizer alone is worth, and the seconds that it adds to a step; see `Figure`."""
        if method.optimizer == "adamw":
            return 1.0, 0.0
        return geometric_mean(self.worth(self.dense_muon)[0][self.sizes.steps]), self._muons_arithmetic

    def best(self, family: Family, rate: str) -> Figure:
        return self.figure(self.chosen(family, rate), rate)

    def ours(self, rate: str) -> list[Figure]:
        """The best of each family, the best first."""
        return _sorted(self.best(family, rate) for family in OURS)

    def peers(self, rate: str, families: Sequence[Family] = PEERS) -> list[Figure]:
        """All peers that are installed, the best first."""
        return _sorted([*self.dense_figures(rate), *(self.best(family, rate) for family in there(families))])

    def prepare(self) -> None:
        """Make the curves that the figures need, seed by seed. Of all that takes hours, they alone may be made beside
        other work."""
        families = there((*OURS, *PEERS))
        chosen = [self.chosen(family, rate) for rate in RATES for family in families]
        for seed in self.sizes.seeds:
            for method in (self.dense_muon, *chosen):
                self.curve(self.learner(method), seed)

    def dense_figures(self, rate: str) -> list[Figure]:
        """DDP's, with Muon too, and of its bf16 hook, which is taken to need no more steps.

        All with torch's buckets of 25 MB and with small ones, which ours sets by itself: with them the exchange of a
        model of this size overlaps with the backward pass.
        Where a step of them would take longer than ten seconds it is not measured: the wire alone, at the full
        rate, is taken for its time, which flatters them.
        """
        alike = {mark: (1.0,) * len(self.sizes.seeds) for mark in self.sizes.marks}, frozenset[int]()
        found = []
        usual = (self.dense, BF16.at(self.dense.lr), self.dense_muon)
        small = (replace(each, name=f"{each.name}, 1 MB buckets", bucket_mb=1.0) for each in usual)
        for method in (*usual, *small):
            wire = self._wire_seconds(method, rate)
            if wire <= 10.0:
                free, seconds = self.slow(method, rate)
            else:
                free = self.slow(method, "100mbit")[0]
                seconds = max(free, wire)
            worth = alike if method.optimizer == "adamw" else self.worth(self.dense_muon)
            found.append(Figure(method, *worth, free, Pace(seconds), *self._optimizer(method)))
        return found

    def loss_at(self, figure: Figure, seconds: float) -> float | None:
        """The mean held-out loss after a time; None where no run is that long."""
        curves = [self.curve(self.learner(figure.method), seed) for seed in self.sizes.seeds]
        step = figure.pace.steps(seconds)
        if step > min(curve[-1][0] for curve in curves):
            return None
        return fmean(float(np.interp(step, *np.array(curve).T)) for curve in curves)

    # -- with a cool-down ----------------------------------------------------------------------------------------------

    def cooled(self, method: Method) -> tuple[float, ...]:
        """Steps of DDP with a cool-down to the loss that this method has with one, over its own, by seed.

        DDP's are interpolated between runs as long as the marks; beyond the longest they count as that.
        """
        found = []
        for seed in self.sizes.seeds:
            losses = [self._cooled_loss(self.dense, seed, mark) for mark in self.sizes.marks]
            own = self._cooled_loss(method, seed, self.sizes.steps)
            found.append(float(np.interp(-own, np.negative(losses), self.sizes.marks)) / self.sizes.steps)
        return tuple(found)

    def _cooled_loss(self, method: Method, seed: int, length: int) -> float:
        return self._curve(method, seed, length, cool=self.sizes.cool)[-1][1]


def there(families: Iterable[Family]) -> list[Family]:
    """Those that are installed."""
    return [family for family in families if family.bases[0].kind != "epfml" or has_epfml()]


def _sorted(figures: Iterable[Figure]) -> list[Figure]:
    return sorted(figures, key=lambda figure: -figure.value)
