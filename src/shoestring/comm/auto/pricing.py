"""What a step would take under DDP or an exchange, from one traced step (HiPress's cost model, Bai et al., SOSP 2021,
with a simulator in place of its closed forms).

A traced step is a Trace in which each span with bytes ends when a parameter's gradient of so many bytes is there.
Spans before the first and between them are the forward and backward pass; those after wait for all gradients to be
averages. What is asked of a codec is found by its position in the coordinator's order, in bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np

from shoestring.comm.auto.probing import Coded, fitted
from shoestring.core.trace import Trace
from shoestring.planning.cluster import Cluster
from shoestring.planning.simulate import Task, simulate

MAIN = "main"  # the thread, or the stream, that computes the step


@dataclass(frozen=True)
class Bucket:
    """Gradients that arrive together, when task `ready` is done."""

    names: tuple[str, ...]
    nbytes: int
    ready: int


@dataclass(frozen=True)
class Cohort:
    """Gradients that are exchanged together: bytes `start` to `stop` of all, there when task `ready` is done."""

    start: float
    stop: float
    ready: int


@dataclass(frozen=True)
class Cost:
    """What a codec does to gradients `start` to `stop` of the coordinator's order, by interpolation between `knots`.

    Shapes: knots (k,) bytes; seconds (stages + 1, k) and nbytes[kind] (stages, k) are sums from the first on;
    latency (stages + 1,) is paid for every exchange.
    """

    knots: np.ndarray
    seconds: np.ndarray
    nbytes: dict[str, np.ndarray]
    latency: np.ndarray

    @classmethod
    def of(cls, sizes: Sequence[int], pieces: Sequence[Coded], whole: Coded) -> Cost:
        """From one exchange of each of the pieces, in their order, and one of all gradients together."""
        stages = max(len(each.nbytes) for each in (*pieces, whole))
        seconds = np.array([_padded(each.seconds, stages + 1) for each in (*pieces, whole)])
        both = [*sizes, sum(sizes)]
        latency = np.array([fitted(both, np.maximum(column, 1e-9).tolist())[0] for column in seconds.T])
        own = np.maximum(seconds[:-1] - latency, 0.0)
        scale = np.maximum(seconds[-1] - latency, 0.0) / np.maximum(own.sum(0), 1e-12)
        own *= np.clip(scale, 0.5, 2.0)  # what pieces cost apart is not quite what they cost together
        kinds = {kind for each in pieces for stage in each.nbytes for kind in stage}
        sent = {
            kind: np.array([_padded([s.get(kind, 0) for s in each.nbytes], stages) for each in pieces])
            for kind in sorted(kinds)
        }
        return cls(
            knots=np.array([0, *accumulate(sizes)], float),
            seconds=_summed(own),
            nbytes={kind: _summed(each) for kind, each in sent.items()},
            latency=latency,
        )

    def computing(self, start: float, stop: float) -> list[float]:
        """Seconds before each request and after the last, (stages + 1,)."""
        return [float(a + self._between(row, start, stop)) for a, row in zip(self.latency, self.seconds, strict=True)]

    def sending(self, stage: int, start: float, stop: float) -> dict[str, float]:
        """Bytes of each kind of request in that stage."""
        found = {kind: self._between(rows[stage], start, stop) for kind, rows in self.nbytes.items()}
        return {kind: nbytes for kind, nbytes in found.items() if nbytes > 0}

    def _between(self, sums: np.ndarray, start: float, stop: float) -> float:
        one, other = np.interp([start, stop], self.knots, sums)
        return float(other - one)


def _padded(values: Sequence[float], length: int) -> list[float]:
    return [*values, *[0.0] * (length - len(values))]


def _summed(rows: np.ndarray) -> np.ndarray:
    """(pieces, stages) as sums from the first piece on, (stages, pieces + 1)."""
    return np.concatenate([np.zeros((1, rows.shape[1])), rows.cumsum(0)]).T


@dataclass(frozen=True)
class DDP:
    """DDP as it is: one all-reduce a bucket; `lanes` of them travel at once (Gloo has two threads a group)."""

    over: tuple[str, ...]
    bucket: float  # bytes
    lanes: int = 1

    def predict(self, trace: Trace, cluster: Cluster) -> Trace:
        tasks, buckets = computed(trace, self.bucket)
        ring = cluster.collective("all-reduce", self.over)
        for index, each in enumerate(buckets):
            lane = f"lane {index % self.lanes}"
            tasks.append(Task("all-reduce", "wait", ring.latency, lane, (each.ready,)))
            tasks.append(Task("all-reduce", "wire", each.nbytes / ring.bandwidth, lane, nbytes=each.nbytes))
        return simulate([*tasks, *finished(trace, len(tasks))], cluster.slowdown)


@dataclass(frozen=True)
class Exchange:
    """The coordinator's exchange: `costs[i]` is the codec of cohort i, and the last one that of all after it.

    Args:
        cohorts: the names of the gradients in each.
        bucket: bytes of DDP's buckets; 0 where nothing is handed over before the backward pass has ended.
        shard: under a torus the ranks of a host, of which each codes and sends its part between hosts; `inner` is the
            mesh dimension inside hosts.
    """

    over: tuple[str, ...]
    costs: tuple[Cost, ...]
    cohorts: Sequence[Sequence[str]]
    channels: int
    bucket: float
    inner: tuple[str, ...] = ()
    shard: int = 1

    def predict(self, trace: Trace, cluster: Cluster) -> Trace:
        tasks, buckets = computed(trace, self.bucket or float("inf"))
        parts = arranged(self.cohorts, buckets, trace)
        # A cohort is submitted when its last gradient has arrived.
        for index, part in enumerate(sorted(range(len(parts)), key=lambda part: (parts[part].ready, part))):
            each, cost = parts[part], self.costs[min(part, len(self.costs) - 1)]
            channel = f"channel {index % self.channels}"
            sums = list(self._inside(cluster, each, channel))
            coded = list(self._coded(cluster, cost, each, channel))
            first = replace((sums[:1] + coded)[0], after=(each.ready,))
            tasks += [first, *(sums[:1] + coded)[1:], *sums[1:]]
        return simulate([*tasks, *finished(trace, len(tasks))], cluster.slowdown)

    def _inside(self, cluster: Cluster, cohort: Cohort, channel: str) -> Iterator[Task]:
        """Reduce-scatter and all-gather inside a host: together they do what an all-reduce does."""
        if self.shard > 1:
            half = cluster.collective("all-reduce", self.inner)
            seconds = (half.latency + (cohort.stop - cohort.start) / half.bandwidth) / 2
            for name in ("reduce-scatter", "all-gather"):
                yield Task(name, "copy", seconds, channel)

    def _coded(self, cluster: Cluster, cost: Cost, cohort: Cohort, channel: str) -> Iterator[Task]:
        for stage, seconds in enumerate(cost.computing(cohort.start, cohort.stop)):
            yield Task("code", "compute", seconds / self.shard, channel)
            if stage == len(cost.latency) - 1:
                return
            sent = cost.sending(stage, cohort.start, cohort.stop)
            ways = {kind: cluster.collective(kind, self.over) for kind in sent}
            yield Task("latency", "wait", max((way.latency for way in ways.values()), default=0.0), channel)
            moving = sum(nbytes / self.shard / ways[kind].bandwidth for kind, nbytes in sent.items())
            yield Task("exchange", "wire", moving, channel, nbytes=int(sum(sent.values()) / self.shard))


def computed(trace: Trace, bucket: float) -> tuple[list[Task], list[Bucket]]:
    """The traced step up to its last gradient, and its gradients in buckets that close at `bucket` bytes."""
    tasks: list[Task] = []
    buckets: list[Bucket] = []
    names: list[str] = []
    nbytes, last = 0, _arrived(trace) - 1
    for index, span in enumerate(list(trace.spans)[: last + 1]):
        tasks.append(Task(span.name, span.kind, span.stop - span.start, MAIN))
        if span.nbytes:
            names.append(span.name)
            nbytes += span.nbytes
        if nbytes >= bucket or index == last:
            buckets.append(Bucket(tuple(names), nbytes, index))
            names, nbytes = [], 0
    return tasks, buckets


def finished(trace: Trace, before: int) -> list[Task]:
    """What comes after the last gradient: it waits for everything before."""
    spans = list(trace.spans)[_arrived(trace) :]
    return [Task(span.name, span.kind, span.stop - span.start, MAIN, tuple(range(before))) for span in spans] or [
        Task("end", "compute", 0.0, MAIN, tuple(range(before)))
    ]


def _arrived(trace: Trace) -> int:
    return 1 + max(index for index, span in enumerate(trace.spans) if span.nbytes)


def arranged(cohorts: Sequence[Sequence[str]], buckets: Sequence[Bucket], trace: Trace) -> list[Cohort]:
    """Each cohort with the bytes of those before it, and when the last bucket that has some of it is there."""
    ready = {name: bucket.ready for bucket in buckets for name in bucket.names}
    nbytes = {span.name: span.nbytes for span in trace.spans if span.nbytes}
    ends = [0, *accumulate(sum(nbytes[name] for name in names) for names in cohorts)]
    return [
        Cohort(start, stop, max(ready[name] for name in names))
        for names, (start, stop) in zip(cohorts, pairwise(ends), strict=True)
    ]
