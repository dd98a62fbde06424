"""Chooses an exchange from the measurements of all ranks: lists candidates, predicts their times, and picks the
fastest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import mean
from typing import Any

from shoestring import figures
from shoestring.comm.auto.cost_model import CodecCost, PricedDDP, PricedExchange
from shoestring.comm.auto.probes import CodecTiming
from shoestring.comm.exchange.coordinator import deal_cohorts
from shoestring.comm.exchange.ddp_hook import SMALLEST
from shoestring.core.feature import DATA, HOSTS, LOCAL
from shoestring.core.trace import Trace
from shoestring.planning.cluster import Cluster, Collective
from shoestring.planning.simulate import Decision, Priced, choose, makespan

WIDE = 2.0  # ratio of slowest to fastest pass above which a prediction counts as rough
MARGIN = 0.05  # fraction of DDP's time by which a candidate must be faster than DDP
PARTS, CHANNELS = (1, 2, 4, 8), (1, 2)


@dataclass(frozen=True)
class Candidate:
    """A way to exchange gradients: by the codec named `codec`, or by DDP with buckets of `bucket` bytes if `codec` is
    empty."""

    codec: str
    parts: int
    channels: int
    bucket: int
    whole: tuple[str, ...] = ()
    """Names of parameters whose gradients are not compressed."""

    @classmethod
    def from_json(cls, table: Mapping[str, Any]) -> Candidate:
        values: dict[str, Any] = {**table, "whole": tuple(table["whole"])}
        return cls(**values)

    def __str__(self) -> str:
        if not self.codec:
            return f"DDP, buckets of {figures.memory(self.bucket)}"
        parts = f"{self.parts} part{'s' * (self.parts > 1)}"
        channels = ", 2 channels" * (self.channels > 1)
        return f"{self.codec} in {parts}{channels}{', the first part uncompressed' if self.whole else ''}"


@dataclass(frozen=True, kw_only=True)
class RankMeasurements:
    """Measurements of one rank, in seconds.

    Args:
        marks: time from the start of a forward pass to its end, to each gradient, and to the end of the backward pass.
        coded: timings of each codec, one for each piece (consecutive gradients), then one for all gradients together.
        slowdown: factors by which computation and communication slow each other down.
    """

    marks: Mapping[str, float]
    coded: Mapping[str, Sequence[CodecTiming]]
    slowdown: Mapping[str, float]
    passes: Sequence[float] = ()
    """Seconds of each timed pass; the marks are medians over these passes."""

    @classmethod
    def from_json(cls, table: Mapping[str, Any]) -> RankMeasurements:
        coded = {
            call: [CodecTiming(tuple(timing["seconds"]), tuple(timing["nbytes"])) for timing in timings]
            for call, timings in table["coded"].items()
        }
        return cls(marks=table["marks"], coded=coded, slowdown=table["slowdown"], passes=table["passes"])


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """Measurements of all ranks.

    Args:
        sizes: bytes of each gradient, in the order of a forward pass.
        arrival: names of the gradients in the order in which the backward pass computes them.
        pieces: bytes of each group of consecutive gradients (in the coordinator's order) on which codecs were timed.
        bucket, lanes: DDP's bucket size in bytes, and the number of all-reduces that DDP runs at a time.
        shard: number of ranks per host under a 2D torus, else 1.
    """

    sizes: dict[str, int]
    arrival: Sequence[str]
    pieces: Sequence[int]
    links: tuple[Collective, ...]
    ranks: Sequence[RankMeasurements]
    bucket: int
    lanes: int
    shard: int = 1

    @property
    def total(self) -> int:
        return sum(self.sizes.values())

    def trace(self) -> Trace:
        """The step of the slowest rank as a trace of consecutive spans."""
        marks = max((rank.marks for rank in self.ranks), key=lambda marks: marks["end"])
        trace, before = Trace(origin=0.0), marks["forward"]
        trace.record("forward", "compute", 0.0, before)
        for name in self.arrival:
            stop = max(marks[name], before)
            trace.record(name, "compute", before, stop, self.sizes[name])
            before = stop
        trace.record("end", "compute", before, max(before, marks["end"]))
        return trace

    def cluster(self) -> Cluster:
        """The measured links and slowdown factors of concurrent work, averaged over ranks. Two channels share one link,
        so each slows the other down by a factor of 2."""
        factors = {key: mean(rank.slowdown[key] for rank in self.ranks) for key in self.ranks[0].slowdown}
        return Cluster(collectives=self.links, slowdown=factors | {"wire beside wire": 2.0})

    def costs(self) -> dict[str, CodecCost]:
        """Cost of each codec, by the codec's call, computed from the slowest rank's time in each stage."""
        costs = {}
        for call in self.ranks[0].coded:
            slowest = [
                CodecTiming(tuple(map(max, zip(*[timing.seconds for timing in same], strict=True))), same[0].nbytes)
                for same in zip(*[rank.coded[call] for rank in self.ranks], strict=True)
            ]
            costs[call] = CodecCost.fit(self.pieces, slowest[:-1], slowest[-1])
        return costs


def decide(measured: Measurements, worth: Mapping[str, float] | None = None) -> tuple[Decision, Candidate]:
    """Choose the candidate that reaches a given loss fastest, if it beats unchanged DDP by more than `MARGIN`; else
    DDP.

    If the exchange of the first parts of the gradients is fully overlapped with computation, these parts stay
    uncompressed, because compression would save no time.
    """
    trace, cluster, costs = measured.trace(), measured.cluster(), measured.costs()
    ddp, *others = list_candidates(measured)
    candidates = {"DDP": ddp} | {str(candidate): candidate for candidate in others}
    prices = {name: price(candidate, measured, costs) for name, candidate in candidates.items()}
    worths = {name: (worth or {}).get(candidate.codec, 1.0) for name, candidate in candidates.items()}
    decision = choose(prices, trace, cluster, margin=MARGIN, worth=worths)
    candidate = candidates[decision.choice]
    for variant, seconds in leave_first_parts_whole(candidate, measured, costs, trace, cluster):
        if seconds <= decision.seconds * (1 + MARGIN / 2):
            predicted = decision.predicted | {str(variant): seconds}
            worths |= {str(variant): worths[decision.choice]}
            return replace(decision, choice=str(variant), predicted=predicted, worth=worths), variant
    return decision, candidate


def explain_spread(measured: Measurements) -> str:
    """Text that explains why the predicted times are rough; empty if they are precise."""
    passes = [seconds for rank in measured.ranks for seconds in rank.passes]
    if not passes or max(passes) <= WIDE * min(passes):
        return ""
    return (
        f"this prediction is rough: equal forward and backward passes took {min(passes):.2g} to {max(passes):.2g} s, "
        "because other programs use these hosts, or the ranks are unequal"
    )


def list_candidates(measured: Measurements) -> Iterator[Candidate]:
    """Yield unchanged DDP, DDP with smaller buckets, then each codec with 1 to 8 parts; preferred candidates come
    first."""
    total, bucket = measured.total, measured.bucket
    yield Candidate("", 1, 1, bucket)
    for parts in PARTS[1:]:
        if SMALLEST <= total // parts < min(bucket, total):
            yield Candidate("", 1, 1, total // parts)
    for call in measured.ranks[0].coded:
        for parts in PARTS:
            if len(deal_cohorts(measured.sizes, parts)) == parts:
                fine = min(bucket, max(SMALLEST, total // (4 * parts)))
                for channels in CHANNELS[: 1 + (parts > 1)]:
                    yield Candidate(call, parts, channels, fine)


def price(candidate: Candidate, measured: Measurements, costs: Mapping[str, CodecCost], whole: int = 0) -> Priced:
    """Build the cost model of a candidate whose first `whole` parts are not compressed."""
    if not candidate.codec:
        return PricedDDP(DATA, candidate.bucket, measured.lanes)
    return PricedExchange(
        over=(HOSTS,) if measured.shard > 1 else DATA,
        costs=(*[costs["dense"]] * whole, costs[candidate.codec]),
        cohorts=deal_cohorts(measured.sizes, candidate.parts),
        channels=candidate.channels,
        bucket=candidate.bucket,
        inner=(LOCAL,),
        shard=measured.shard,
    )


def leave_first_parts_whole(
    candidate: Candidate, measured: Measurements, costs: Mapping[str, CodecCost], trace: Trace, cluster: Cluster
) -> Iterator[tuple[Candidate, float]]:
    """Yield variants of the candidate with uncompressed first parts, and their predicted seconds. The variant with the
    most uncompressed parts comes first."""
    if candidate.codec in ("", "dense"):
        return
    parts = deal_cohorts(measured.sizes, candidate.parts)
    for whole in range(len(parts) - 1, 0, -1):
        seconds = makespan(price(candidate, measured, costs, whole).predict(trace, cluster))
        yield replace(candidate, whole=tuple(chain(*parts[:whole]))), seconds
