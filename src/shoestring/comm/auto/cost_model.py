"""Predicts the time of a step under DDP or an exchange from one traced step.

This is the cost model of HiPress (Bai et al., SOSP 2021) with a simulator in place of its closed forms.

In a traced step, each span with bytes ends when the gradient of one parameter, of that many bytes, arrives. Spans
before the first gradient and between gradients are the forward and the backward pass. Spans after the last gradient
wait until all gradients are averaged. The cost of coding gradients depends on their position in the coordinator's
order, in bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np

from shoestring.comm.auto.probes import CodecTiming, fit_line
from shoestring.core.trace import Trace
from shoestring.planning.cluster import Cluster
from shoestring.planning.simulate import Task, simulate

MAIN = "main"  # the thread, or the stream, that computes the step


@dataclass(frozen=True)
class PricedBucket:
    """Gradients that arrive together, when task `ready` ends."""

    names: tuple[str, ...]
    nbytes: int
    ready: int


@dataclass(frozen=True)
class PricedCohort:
    """Gradients that are exchanged together, bytes `start` to `stop` of all; they arrive by the end of task `ready`."""

    start: float
    stop: float
    ready: int


@dataclass(frozen=True)
class CodecCost:
    """The time and the bytes of a codec for a range of the coordinator's order, by interpolation between `knots`.

    Shapes: knots (k,) in bytes; seconds (stages + 1, k) and nbytes[collective] (stages, k) are prefix sums; latency
    (stages + 1,) is paid once an exchange.
    """

    knots: np.ndarray
    seconds: np.ndarray
    nbytes: dict[str, np.ndarray]
    latency: np.ndarray

    @classmethod
    def fit(cls, sizes: Sequence[int], pieces: Sequence[CodecTiming], whole: CodecTiming) -> CodecCost:
        """Fit to one exchange of each piece, in their order, and one of all gradients together; sizes are in bytes."""
        timings = (*pieces, whole)
        stages = max(len(timing.nbytes) for timing in timings)
        seconds = np.array([_pad(timing.seconds, stages + 1) for timing in timings])
        both = [*sizes, sum(sizes)]
        latency = np.array([fit_line(both, np.maximum(column, 1e-9).tolist())[0] for column in seconds.T])
        own = np.maximum(seconds[:-1] - latency, 0.0)
        scale = np.maximum(seconds[-1] - latency, 0.0) / np.maximum(own.sum(0), 1e-12)
        own *= np.clip(scale, 0.5, 2.0)  # pieces do not cost quite the same alone as together
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
        """Seconds of computing before each request and after the last, (stages + 1,)."""
        return [float(a + self._between(row, start, stop)) for a, row in zip(self.latency, self.seconds, strict=True)]

    def sending(self, stage: int, start: float, stop: float) -> dict[str, float]:
        """Bytes of a stage by collective."""
        sent = {kind: self._between(rows[stage], start, stop) for kind, rows in self.nbytes.items()}
        return {kind: nbytes for kind, nbytes in sent.items() if nbytes > 0}

    def _between(self, sums: np.ndarray, start: float, stop: float) -> float:
        before, after = np.interp([start, stop], self.knots, sums)
        return float(after - before)


def _pad(values: Sequence[float], length: int) -> list[float]:
    return [*values, *[0.0] * (length - len(values))]


def _prefix_sums(rows: np.ndarray) -> np.ndarray:
    """Rows (pieces, stages) as prefix sums over the pieces, (stages, pieces + 1)."""
    return np.concatenate([np.zeros((1, rows.shape[1])), rows.cumsum(0)]).T


@dataclass(frozen=True)
class PricedDDP:
    """DDP without a hook: one all-reduce a bucket, `lanes` of them at once (Gloo has two threads a process group)."""

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
    """The coordinator's exchange.

    Args:
        costs: the codec's cost for each cohort; the last one also holds for all cohorts after it.
        cohorts: the names of the gradients in each cohort.
        bucket: bytes of DDP's buckets; 0 where no gradient is exchanged before the backward pass ends.
        shard: ranks of a host under a 2D torus, each of which codes and sends its own shard between hosts.
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
            scatter, gather = self._price_torus(cluster, cohort, channel)
            first, *rest = [*scatter, *self._price_codec(cluster, cost, cohort, channel), *gather]
            tasks += [replace(first, after=(cohort.ready,)), *rest]
        return simulate([*tasks, *finish_step(trace, len(tasks))], cluster.slowdown)

    def _price_torus(self, cluster: Cluster, cohort: PricedCohort, channel: str) -> tuple[list[Task], list[Task]]:
        """Reduce-scatter and all-gather inside a host, each half of an all-reduce; empty without a torus."""
        if self.shard == 1:
            return [], []
        ring = cluster.collective("all-reduce", self.inner)
        seconds = (ring.latency + (cohort.stop - cohort.start) / ring.bandwidth) / 2
        return [Task("reduce-scatter", "copy", seconds, channel)], [Task("all-gather", "copy", seconds, channel)]

    def _price_codec(self, cluster: Cluster, cost: CodecCost, cohort: PricedCohort, channel: str) -> Iterator[Task]:
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
    """The traced step up to its last gradient, and its gradients in buckets that are full at `bucket` bytes."""
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
    """Tasks after the last gradient; they wait for all `before` tasks."""
    spans = list(trace.spans)[_count_arrived(trace) :]
    return [Task(span.name, span.kind, span.stop - span.start, MAIN, tuple(range(before))) for span in spans] or [
        Task("end", "compute", 0.0, MAIN, tuple(range(before)))
    ]


def _count_arrived(trace: Trace) -> int:
    return 1 + max(index for index, span in enumerate(trace.spans) if span.nbytes)


def place_cohorts(
    cohorts: Sequence[Sequence[str]], buckets: Sequence[PricedBucket], trace: Trace
) -> list[PricedCohort]:
    """Place cohorts one after the other in bytes; each is ready with the last bucket that holds some of it."""
    ready = {name: bucket.ready for bucket in buckets for name in bucket.names}
    nbytes = {span.name: span.nbytes for span in trace.spans if span.nbytes}
    ends = [0, *accumulate(sum(nbytes[name] for name in names) for names in cohorts)]
    return [
        PricedCohort(start, stop, max(ready[name] for name in names))
        for names, (start, stop) in zip(cohorts, pairwise(ends), strict=True)
    ]
