"""Who is ahead: settings chosen on a seed of their own, curves on fresh seeds, times on slow links."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean
from typing import Any

from benchmarks.comm.curves import efficiency, final, step_bytes, step_seconds, steps_to
from benchmarks.comm.methods import BF16, DDP, EPFML, NONE, TORCH, Method, local, ours
from benchmarks.comm.peers import has_epfml
from benchmarks.comm.setting import Setting
from benchmarks.comm.spec import Spec
from benchmarks.comm.store import Store
from shoestring.testing.netlab.links import bits_per_second

RATES = ("100mbit", "10mbit", "1mbit")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How long everything is; smaller ones for a trial."""

    steps: int = 100
    """What DDP is given; the loss that it has then is everybody's target."""
    length: int = 130
    """Of all reported runs, so that a method that needs more steps than DDP can show how many."""
    look: int = 10
    seeds: tuple[int, ...] = (1, 2, 3)
    tuning_seed: int = 100
    tuning_steps: int = 50
    tuning_length: int = 60
    slow_steps: int = 24
    """Steps at a rate; fewer where they would take longer than `patience`."""
    patience: float = 150.0
    setting: Setting = field(default_factory=Setting)

    def __post_init__(self) -> None:
        assert self.length % self.look == self.tuning_length % self.look == 0


TRIAL = Sizes(
    steps=8,
    length=12,
    look=2,
    seeds=(1, 2),
    tuning_steps=4,
    tuning_length=8,
    slow_steps=6,
    patience=20.0,
    setting=Setting(dim=32, layers=2, hidden=64, sequence=32, held_out=16),
)


@dataclass(frozen=True)
class Family:
    """Settings of one method that are tried against each other, all families as long: the rates, then the others."""

    name: str
    bases: tuple[Method, ...]
    lrs: tuple[float, ...] = (1.5e-3, 3e-3, 6e-3)


BASELINE = Family("DDP fp32", (DDP,), lrs=(7.5e-4, 1.5e-3, 3e-3, 6e-3))
PEERS = (
    Family("torch's PowerSGD hook", (TORCH, TORCH.but(rank=8), TORCH.but(rank=2))),
    Family("epfml's powersgd", (EPFML, EPFML.but(iterations=1), EPFML.but(rank=8, iterations=1))),
    Family("DiLoCo", tuple(local("DiLoCo", "DiLoCo", every=every) for every in (25, 10, 50))),
)
PER_STEP = Family(
    "per-step codec",
    (
        ours("Quantize 4 feedback", "Quantize", bits=4, rounding="nearest", feedback=True, parts=12, channels=3),
        ours("PowerSGD r4", "PowerSGD", rank=4),
        ours("PowerSGD r8 alternate bf16", "PowerSGD", rank=8, alternate=True, wire="bf16"),
    ),
)
LOCAL = Family(
    "local steps",
    (
        local("LocalSGD H=8 4bit", "LocalSGD", every=8, codec="4bit"),
        local("LocalSGD H=20 4bit", "LocalSGD", every=20, codec="4bit"),
        local("LocalSGD H=40 4bit", "LocalSGD", every=40, codec="4bit", delay=36),
    ),
)


@dataclass(frozen=True)
class Figure:
    """A method's time-to-loss efficiency at a rate, and what it is made of."""

    method: Method
    value: float
    shares: tuple[float, ...]
    """DDP's steps over its own, by seed; 0 where the loss was not reached."""
    free: float
    seconds: float

    def __str__(self) -> str:
        if not min(self.shares):
            return f"{self.method.name} lr {self.method.lr:g}: does not reach DDP's loss in the steps that it is given"
        shares = ", ".join(f"{share:.3f}" for share in self.shares)
        times = f"{self.free:.3g} s a step without communication, {self.seconds:.3g} s with"
        return f"{self.method.name} lr {self.method.lr:g}: DDP's steps over its own {shares} by seed; {times}"


@dataclass
class Contest:
    """The comparison; all runs come out of the store."""

    store: Store
    sizes: Sizes = field(default_factory=Sizes)

    # -- runs ----------------------------------------------------------------------------------------------------------

    def curve_spec(self, method: Method, seed: int) -> Spec:
        tuning = seed == self.sizes.tuning_seed
        length = self.sizes.tuning_length if tuning else self.sizes.length
        return self._spec(method, turn=length, look=self.sizes.look, seed=seed, horizon=length)

    def _spec(self, *methods: Method, **more: Any) -> Spec:
        return Spec(methods=methods, setting=self.sizes.setting, **more)

    def curve(self, method: Method, seed: int) -> list[tuple[int, float]]:
        """Steps and held-out losses."""
        return [(step, loss) for step, loss in self._log(method, seed)[0]["held_out"]]

    def _log(self, method: Method, seed: int) -> list[dict[str, Any]]:
        return self.store.get(self.curve_spec(method, seed))["logs"][0]

    # -- choosing ------------------------------------------------------------------------------------------------------

    @cached_property
    def dense(self) -> Method:
        """DDP with its best learning rate."""
        seed, at = self.sizes.tuning_seed, self.sizes.tuning_steps
        tried = [DDP.at(lr) for lr in BASELINE.lrs]
        return min(tried, key=lambda method: final(self.curve(method, seed), at))

    def chosen(self, family: Family, rate: str) -> Method:
        """The best of a family at a rate, on the seed for choosing: the learning rate of the first base, then a base.

        Times are not measured for this, but computed from bytes: what a delay hides is left out.
        """
        rated = [self._promise(family.bases[0].at(lr), rate) for lr in family.lrs]
        best = max(rated, key=lambda pair: pair[0])[1]
        return max([self._promise(base.at(best.lr), rate) for base in family.bases], key=lambda pair: pair[0])[1]

    def _promise(self, method: Method, rate: str) -> tuple[tuple[float, float], Method]:
        """(computed efficiency, minus the loss) on the seed for choosing."""
        seed, at = self.sizes.tuning_seed, self.sizes.tuning_steps
        target, points = final(self.curve(self.dense, seed), at), self.curve(method, seed)
        log, needed = self._log(method, seed), steps_to(points, target)
        free = step_seconds(self._log(self.dense, seed), self.sizes.look)  # one for all, whatever else ran then
        hidden = float(method.settings.get("delay", 0)) * free
        wire = step_bytes(log) * 8 / bits_per_second(rate) * method.period
        seconds = free + max(0.0, wire - hidden) / method.period
        return (at / needed / seconds if needed else 0.0, -final(points, self.sizes.tuning_length)), method

    # -- figures -------------------------------------------------------------------------------------------------------

    def shares(self, method: Method) -> tuple[float, ...]:
        """DDP's steps over this method's, by seed; none after one on which the loss is not reached."""
        found: list[float] = []
        for seed in self.sizes.seeds:
            if found and not found[-1]:
                break
            target = final(self.curve(self.dense, seed), self.sizes.steps)
            needed = steps_to(self.curve(method, seed), target)
            dense = steps_to(self.curve(self.dense, seed), target) or self.sizes.steps
            found.append(dense / needed if needed else 0.0)
        return tuple(found)

    def slow_spec(self, method: Method, rate: str) -> Spec:
        """The method and no communication in turns, at a rate."""
        method = method.at(3e-3)  # steps of any rate of learning take as long
        every = self._wire_seconds(method, rate) + 1.0
        afford = max(1, int(self.sizes.patience / every))
        if method.local:
            turn = method.period * max(1, min(2, afford // method.period))
            return self._spec(NONE, method, turn=turn, rounds=2, warm=0, rate=rate, horizon=4 * turn)
        steps = max(3, min(self.sizes.slow_steps, afford))
        turn = 4 if steps >= 12 else 2
        return self._spec(NONE, method, turn=turn, rounds=-(-steps // turn), warm=4, rate=rate)

    def _wire_seconds(self, method: Method, rate: str) -> float:
        """What the bytes of a step take at a rate, without anything else."""
        spec = self._spec(method, turn=2 * method.period, warm=4, horizon=1000)
        return step_bytes(self.store.get(spec)["logs"][0]) * 8 / bits_per_second(rate)

    def slow(self, method: Method, rate: str) -> tuple[float, float]:
        """Seconds a step without communication, and with this method at a rate."""
        spec = self.slow_spec(method, rate)
        free, logs = self.store.get(spec)["logs"]
        if method.local and spec.turn * spec.rounds > 2 * method.period:  # nothing lands in the first period
            logs = [{**log, "seconds": log["seconds"][method.period :]} for log in logs]
        stretch = method.period if method.local else spec.turn
        return step_seconds(free, stretch), step_seconds(logs, stretch)

    def figure(self, method: Method, rate: str) -> Figure:
        shares = self.shares(method)
        if not min(shares):
            return Figure(method, 0.0, shares, 0.0, 0.0)
        free, seconds = self.slow(method, rate)
        mean = math.exp(fmean(map(math.log, shares)))
        return Figure(method, efficiency((mean, free), (1.0, seconds)), shares, free, seconds)

    def best(self, family: Family, rate: str) -> Figure:
        return self.figure(self.chosen(family, rate), rate)

    def dense_figures(self, rate: str) -> list[Figure]:
        """DDP's, and of its bf16 hook, which is taken to need no more steps.

        Both with torch's buckets of 25 MB and with small ones, which ours sets by itself: with them the exchange of a
        model of this size overlaps with the backward pass.
        Where a step of them would take longer than ten seconds it is not measured: the wire alone, at the full
        rate, is taken for its time, which flatters them.
        """
        alike = (1.0,) * len(self.sizes.seeds)
        found = []
        usual = (self.dense, BF16.at(self.dense.lr))
        small = (replace(each, name=f"{each.name}, 1 MB buckets", bucket_mb=1.0) for each in usual)
        for method in (*usual, *small):
            wire = self._wire_seconds(method, rate)
            if wire <= 10.0:
                free, seconds = self.slow(method, rate)
            else:
                free = self.slow(method, "100mbit")[0]
                seconds = max(free, wire)
            found.append(Figure(method, free / seconds, alike, free, seconds))
        return found

    def peers(self, rate: str, families: Sequence[Family] = PEERS) -> list[Figure]:
        """All peers that are installed, the best first."""
        there = [family for family in families if family.bases[0].kind != "epfml" or has_epfml()]
        found = [*self.dense_figures(rate), *(self.best(family, rate) for family in there)]
        return sorted(found, key=lambda figure: -figure.value)
