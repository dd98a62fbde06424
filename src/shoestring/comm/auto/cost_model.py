"""Predicts the time of a step with DDP or with a codec's exchange, from one traced step.

This is the cost model of HiPress (Bai et al., SOSP 2021), with a simulator instead of closed-form formulas.

In a traced step, each span with `nbytes` > 0 ends when the gradient of one parameter has been computed; the gradient
has `nbytes` bytes. The spans up to the last gradient are the forward and the backward pass. Spans after the last
gradient wait until all gradients are averaged. The cost of coding a gradient depends on the gradient's byte position in
the coordinator's order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np

from shoestring.comm.auto.probes import CodecTiming
from shoestring.core.trace import Trace
from shoestring.planning.cluster import Cluster
from shoestring.planning.links import fit_line
from shoestring.planning.simulate import Task, simulate

MAIN = "main"  # name of the thread or stream that computes the step


@dataclass(frozen=True)
class PricedBucket:
    """A bucket of DDP: its gradients are available together, when task number `ready` ends."""

    names: tuple[str, ...]
    nbytes: int
    ready: int


@dataclass(frozen=True)
class PricedCohort:
    """Gradients that are exchanged together: bytes `start` to `stop` in the coordinator's order. The last of these
    gradients is available when task number `ready` ends."""

    start: float
    stop: float
    ready: int


@dataclass(frozen=True)
class CodecCost:
    """Seconds and bytes that a codec takes for a range of gradients in the coordinator's order, interpolated between
    `knots`.

    Shapes: knots (k,) in bytes; seconds (stages + 1, k) and nbytes[collective] (stages, k) are prefix sums; latency
    (stages + 1,) in seconds is paid once per exchange.
    """

    knots: np.ndarray
    seconds: np.ndarray
    nbytes: dict[str, np.ndarray]
    latency: np.ndarray

    @classmethod
    def fit(cls, sizes: Sequence[int], pieces: Sequence[CodecTiming], whole: CodecTiming) -> CodecCost:
        """Fit the cost to timed exchanges: one exchange of each piece, in order, and one of all gradients together.

        Args:
            sizes: bytes of each piece.
        """
        timings = (*pieces, whole)
        stages = max(len(timing.nbytes) for timing in timings)
        seconds = np.array([_pad(timing.seconds, stages + 1) for timing in timings])
        both = [*sizes, sum(sizes)]
        latency = np.array([fit_line(both, np.maximum(column, 1e-9).tolist())[0] for column in seconds.T])
        own = np.maximum(seconds[:-1] - latency, 0.0)
        scale = np.maximum(seconds[-1] - latency, 0.0) / np.maximum(own.sum(0), 1e-12)
        own *= np.clip(scale, 0.5, 2.0)  # timing pieces separately and together gives slightly different totals
        kinds = {kind for piece in pieces for stage in piece.nbytes for kind in stage}
        sent = {
            kind: np.array([_pad([stage.get(kind, 0) for stage in piece.nbytes], stages) for piece in pieces])
            for kind in sorted(kinds)
        }
        return cls(
            knots=np.array([0, *accumulate(sizes)], float),
            seconds=_prefix_sums(own),
            nbytes={kind: _prefix_sums(rows) for kind, rows in sent.items()},
            latency=latency,
        )

    def computing(self, start: float, stop: float) -> list[float]:
        """Seconds of computation before each request and after the last request, (stages + 1,)."""
        return [float(a + self._between(row, start, stop)) for a, row in zip(self.latency, self.seconds, strict=True)]

    def sending(self, stage: int, start: float, stop: float) -> dict[str, float]:
        """Bytes that a stage sends, by kind of collective."""
        sent = {kind: self._between(rows[stage], start, stop) for kind, rows in self.nbytes.items()}
        return {kind: nbytes for kind, nbytes in sent.items() if nbytes > 0}

    def _between(self, sums: np.ndarray, start: float, stop: float) -> float:
        before, after = np.interp([start, stop], self.knots, sums)
        return float(after - before)


def _pad(values: Sequence[float], length: int) -> list[float]:
    return [*values, *[0.0] * (length - len(values))]


def _prefix_sums(rows: np.ndarray) -> np.ndarray:
    """Prefix sums over the pieces: rows (pieces, stages) -> (stages, pieces + 1)."""
    return np.concatenate([np.zeros((1, rows.shape[1])), rows.cumsum(0)]).T


@dataclass(frozen=True)
class PricedDDP:
    """DDP without a communication hook: one all-reduce per bucket, `lanes` of them at a time (Gloo runs two threads per
    process group)."""

    over: tuple[str, ...]
    bucket: float  # bytes
    lanes: int = 1

    def predict(self, trace: Trace, cluster: Cluster) -> Trace:
        tasks, buckets = split_compute(trace, self.bucket)
        ring = cluster.collective("all-reduce", self.over)
        for index, bucket in enumerate(buckets):
            lane = f"lane {index % self.lanes}"
            tasks.append(Task("all-reduce", "wait", ring.latency, lane, (bucket.ready,)))
            tasks.append(Task("all-reduce", "wire", bucket.nbytes / ring.bandwidth, lane, nbytes=bucket.nbytes))
        return simulate([*tasks, *finish_step(trace, len(tasks))], cluster.slowdown)


@dataclass(frozen=True)
class PricedExchange:
    """An exchange by the coordinator, with one or several codecs.

    Args:
        costs: the cost of each cohort's codec; the last entry also applies to all later cohorts.
        cohorts: the names of the gradients in each cohort.
        bucket: bytes of DDP's buckets; 0 if gradients are exchanged only after the backward pass.
        shard: number of ranks per host under a 2D torus, where each rank codes one shard and sends it to other hosts;
            else 1.
        inner: the mesh axis inside hosts.
    """

    over: tuple[str, ...]
    costs: tuple[CodecCost, ...]
    cohorts: Sequence[Sequence[str]]
    channels: int
    bucket: float
    inner: tuple[str, ...] = ()
    shard: int = 1

    def predict(self, trace: Trace, cluster: Cluster) -> Trace:
        tasks, buckets = split_compute(trace, self.bucket or float("inf"))
        parts = place_cohorts(self.cohorts, buckets, trace)
        # A cohort is submitted when its last gradient has arrived.
        for index, part in enumerate(sorted(range(len(parts)), key=lambda part: (parts[part].ready, part))):
            cohort, cost = parts[part], self.costs[min(part, len(self.costs) - 1)]
            channel = f"channel {index % self.channels}"
            cohort_tasks = [*self._price_codec(cluster, cost, cohort, channel)]
            if self.shard > 1:  # a torus: a reduce-scatter before and an all-gather after, inside of each host
                ring = cluster.collective("all-reduce", self.inner)
                half = (ring.latency + (cohort.stop - cohort.start) / ring.bandwidth) / 2  # of an all-reduce's time
                cohort_tasks.insert(0, Task("reduce-scatter", "copy", half, channel))
                cohort_tasks.append(Task("all-gather", "copy", half, channel))
            first, *rest = cohort_tasks
            tasks += [replace(first, after=(cohort.ready,)), *rest]
        return simulate([*tasks, *finish_step(trace, len(tasks))], cluster.slowdown)

    def _price_codec(self, cluster: Cluster, cost: CodecCost, cohort: PricedCohort, channel: str) -> Iterator[Task]:
        """Yield the tasks of a cohort: computation, latency and transfer of each stage, then computation after the last
        stage."""
        for stage, seconds in enumerate(cost.computing(cohort.start, cohort.stop)):
            yield Task("code", "compute", seconds / self.shard, channel)
            if stage == len(cost.latency) - 1:
                return
            sent = cost.sending(stage, cohort.start, cohort.stop)
            links = {kind: cluster.collective(kind, self.over) for kind in sent}
            yield Task("latency", "wait", max((link.latency for link in links.values()), default=0.0), channel)
            transfer = sum(nbytes / self.shard / links[kind].bandwidth for kind, nbytes in sent.items())
            yield Task("exchange", "wire", transfer, channel, nbytes=int(sum(sent.values()) / self.shard))


def split_compute(trace: Trace, bucket: float) -> tuple[list[Task], list[PricedBucket]]:
    """Convert the spans of a traced step up to the last gradient into tasks, and group the gradients into buckets of
    `bucket` bytes."""
    tasks: list[Task] = []
    buckets: list[PricedBucket] = []
    names: list[str] = []
    nbytes, last = 0, _count_arrived(trace) - 1
    for index, span in enumerate(list(trace.spans)[: last + 1]):
        tasks.append(Task(span.name, span.kind, span.stop - span.start, MAIN))
        if span.nbytes:
            names.append(span.name)
            nbytes += span.nbytes
        if nbytes >= bucket or index == last:
            buckets.append(PricedBucket(tuple(names), nbytes, index))
            names, nbytes = [], 0
    return tasks, buckets


def finish_step(trace: Trace, before: int) -> list[Task]:
    """Build the tasks after the last gradient; each waits for the first `before` tasks of the step."""
    spans = list(trace.spans)[_count_arrived(trace) :]
    return [Task(span.name, span.kind, span.stop - span.start, MAIN, tuple(range(before))) for span in spans] or [
        Task("end", "compute", 0.0, MAIN, tuple(range(before)))
    ]


def _count_arrived(trace: Trace) -> int:
    """Number of spans up to and including the span of the last gradient."""
    return 1 + max(index for index, span in enumerate(trace.spans) if span.nbytes)


def place_cohorts(
    cohorts: Sequence[Sequence[str]], buckets: Sequence[PricedBucket], trace: Trace
) -> list[PricedCohort]:
    """Assign consecutive byte ranges to the cohorts. A cohort is ready once all buckets that hold its gradients are
    ready."""
    ready = {name: bucket.ready for bucket in buckets for name in bucket.names}
    nbytes = {span.name: span.nbytes for span in trace.spans if span.nbytes}
    ends = [0, *accumulate(sum(nbytes[name] for name in names) for names in cohorts)]
    return [
        PricedCohort(start, stop, max(ready[name] for name in names))
        for names, (start, stop) in zip(cohorts, pairwise(ends), strict=True)
    ]
