"""The choice among exchanges, from what all ranks measured: candidates, their prices, and what is left whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import mean
from typing import Any

from shoestring.comm.auto import pricing
from shoestring.comm.auto.pricing import Cost
from shoestring.comm.auto.probing import Coded
from shoestring.comm.exchange.coordinator import dealt
from shoestring.comm.settings.auto import Selective, exchange
from shoestring.comm.settings.per_step import Exchange
from shoestring.core.feature import DATA, HOSTS, LOCAL
from shoestring.core.trace import Trace
from shoestring.planning.cluster import Cluster, Collective
from shoestring.planning.simulate import Plan, Priced, choose, makespan

WIDE = 2.0  # times that the slowest of equal passes may take of the fastest, for a prediction to mean something
MARGIN = 0.05  # by how much of its time DDP must be beaten
PARTS, CHANNELS = (1, 2, 4, 8), (1, 2)
FINEST = 1 << 20  # bytes of the smallest bucket: that of DDP's first, which torch.compile takes for it


@dataclass(frozen=True)
class Choice:
    """One candidate: DDP with such buckets where `codec` is empty, and an exchange in `parts` otherwise."""

    codec: str
    parts: int
    channels: int
    bucket: int
    whole: tuple[str, ...] = ()

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Choice:
        """From JSON types."""
        return cls(**{**table, "whole": tuple(table["whole"])})

    def __str__(self) -> str:
        if not self.codec:
            return f"DDP, buckets of {self.bucket / 2**20:.3g} MB"
        plain = ", the first part whole" if self.whole else ""
        plural = "s" * (self.parts > 1)
        return f"{self.codec} in {self.parts} part{plural}{', 2 channels' * (self.channels > 1)}{plain}"

    def settings(self, torus: bool) -> Exchange:
        """The feature that does it."""
        common: dict[str, Any] = {"parts": self.parts, "channels": self.channels, "torus": torus}
        if self.whole:
            return Selective(of=self.codec, whole=self.whole, **common)
        return replace(exchange(self.codec), **common)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one rank measured: seconds from the beginning of a forward pass to its end, to each gradient and to the end
    of the backward pass; each codec on each piece and on all gradients; and how kinds of work hinder each other."""

    marks: Mapping[str, float]
    coded: Mapping[str, Sequence[Coded]]
    slowdown: Mapping[str, float]
    passes: Sequence[float] = ()
    """Seconds of each pass of which the marks are the medians."""

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Seen:
        """From JSON types."""
        coded = {
            call: [Coded(tuple(each["seconds"]), tuple(each["nbytes"])) for each in runs]
            for call, runs in table["coded"].items()
        }
        return cls(marks=table["marks"], coded=coded, slowdown=table["slowdown"], passes=table["passes"])


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What all ranks measured.

    Args:
        sizes: bytes of the gradients, in the order of a forward pass. arrival: their names in the order of arrival.
        pieces: bytes of the runs of gradients, in the coordinator's order, on which codecs were timed.
        bucket, lanes: DDP's, see `pricing.DDP`. shard: the ranks of a host under a torus, else 1.
    """

    sizes: dict[str, int]
    arrival: Sequence[str]
    pieces: Sequence[int]
    links: tuple[Collective, ...]
    ranks: Sequence[Seen]
    bucket: int
    lanes: int
    shard: int = 1

    @property
    def total(self) -> int:
        return sum(self.sizes.values())

    def trace(self) -> Trace:
        """The slowest rank's step as spans one after the other."""
        marks = max((seen.marks for seen in self.ranks), key=lambda marks: marks["end"])
        trace, before = Trace(origin=0.0), marks["forward"]
        trace.record("forward", "compute", 0.0, before)
        for name in self.arrival:
            stop = max(marks[name], before)
            trace.record(name, "compute", before, stop, self.sizes[name])
            before = stop
        trace.record("end", "compute", before, max(before, marks["end"]))
        return trace

    def cluster(self) -> Cluster:
        """The links, and how work on one rank hinders other work there: the ranks' mean. Channels share a link."""
        factors = {key: mean(seen.slowdown[key] for seen in self.ranks) for key in self.ranks[0].slowdown}
        return Cluster(collectives=self.links, slowdown=factors | {"wire beside wire": 2.0})

    def costs(self) -> dict[str, Cost]:
        """What each codec costs, each number the slowest rank's."""
        return {call: self._cost([seen.coded[call] for seen in self.ranks]) for call in self.ranks[0].coded}

    def _cost(self, ranks: Sequence[Sequence[Coded]]) -> Cost:
        slowest = [
            Coded(tuple(map(max, zip(*[each.seconds for each in same], strict=True))), same[0].nbytes)
            for same in zip(*ranks, strict=True)
        ]
        return Cost.of(self.pieces, slowest[:-1], slowest[-1])


def decided(evidence: Evidence) -> tuple[Plan, Choice]:
    """DDP as it is, unless something is faster by more than `MARGIN`; then the fastest, with the parts left whole that
    travel while others compute, for compressing those gains nothing."""
    trace, cluster, costs = evidence.trace(), evidence.cluster(), evidence.costs()
    first, *others = candidates(evidence)
    choices = {"DDP": first} | {str(each): each for each in others}
    plan = choose(
        {name: priced(each, evidence, costs) for name, each in choices.items()}, trace, cluster, margin=MARGIN
    )
    choice = choices[plan.choice]
    for better, seconds in selective(choice, evidence, costs, trace, cluster):
        if seconds <= plan.seconds * (1 + MARGIN / 2):
            return replace(plan, choice=str(better), predicted=plan.predicted | {str(better): seconds}), better
    return plan, choice


def doubt(evidence: Evidence) -> str:
    """Why the predicted seconds are rough; empty where they are not."""
    passes = [seconds for rank in evidence.ranks for seconds in rank.passes]
    if not passes or max(passes) <= WIDE * min(passes):
        return ""
    return (
        f"this prediction is rough: equal forward and backward passes took {min(passes):.2g} to {max(passes):.2g} s, "
        "for other programs use these machines, or the ranks are unequal"
    )


def candidates(evidence: Evidence) -> Iterator[Choice]:
    """DDP as it is, DDP with smaller buckets, and each codec in parts; the preferred first."""
    total, bucket = evidence.total, evidence.bucket
    yield Choice("", 1, 1, bucket)
    for parts in PARTS[1:]:
        if FINEST <= total // parts < min(bucket, total):
            yield Choice("", 1, 1, total // parts)
    for call in evidence.ranks[0].coded:
        for parts in PARTS:
            if len(dealt(evidence.sizes, parts)) == parts:
                fine = min(bucket, max(FINEST, total // (4 * parts)))
                for channels in CHANNELS[: 1 + (parts > 1)]:
                    yield Choice(call, parts, channels, fine)


def priced(choice: Choice, evidence: Evidence, costs: Mapping[str, Cost], whole: int = 0) -> Priced:
    """`whole`: of so many of the first parts the gradients travel whole."""
    if not choice.codec:
        return pricing.DDP(DATA, choice.bucket, evidence.lanes)
    return pricing.Exchange(
        over=(HOSTS,) if evidence.shard > 1 else DATA,
        costs=(*[costs["dense"]] * whole, costs[choice.codec]),
        cohorts=dealt(evidence.sizes, choice.parts),
        channels=choice.channels,
        bucket=choice.bucket,
        inner=(LOCAL,),
        shard=evidence.shard,
    )


def selective(
    choice: Choice, evidence: Evidence, costs: Mapping[str, Cost], trace: Trace, cluster: Cluster
) -> Iterator[tuple[Choice, float]]:
    """The choice with its first parts whole and its seconds, as many as there are first."""
    if choice.codec in ("", "dense"):
        return
    parts = dealt(evidence.sizes, choice.parts)
    for whole in range(len(parts) - 1, 0, -1):
        seconds = makespan(priced(choice, evidence, costs, whole).predict(trace, cluster))
        yield replace(choice, whole=tuple(chain(*parts[:whole]))), seconds
