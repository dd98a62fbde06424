"""Tracing: timed spans of work on any thread, in bounded memory.

`span` costs about a microsecond, so hot paths may use it. When a span begins and ends, on any thread, it is recorded in
all open traces (`with trace:`), and all listeners (`with listening(profiler):`) are notified. Without traces and
listeners a span does nothing.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Literal, NamedTuple, Protocol, Self

Kind = Literal["compute", "wire", "copy", "disk", "wait"]

# The traces that are open in this process. The list is global and not a context variable, because spans also run on
# threads that autograd or a communication library started before the trace was opened.
_open: list[Trace] = []
_listeners: list[Listener] = []


class Span(NamedTuple):
    """One timed section: `start` and `stop` in seconds since the trace's origin."""

    name: str
    kind: Kind
    start: float
    stop: float
    nbytes: int
    thread: int
    step: int


@dataclass(slots=True)
class Total:
    """Number, total duration and total bytes of all spans with one name and kind."""

    count: int = 0
    seconds: float = 0.0
    nbytes: int = 0


@dataclass(eq=False)
class Trace:
    """Record of a run on one rank: totals over all spans, the newest `keep` spans, and numbers that features record."""

    rank: int = 0
    host: str = ""
    keep: int = 16384
    step: int = 0
    ranks: int = 1
    parameters: int = 0
    """Number of trained parameters over all shards."""
    gradient_bytes: int = 0
    """Bytes of the gradients of all trained parameters."""
    steps: int = 0
    """Number of optimizer steps of the run; set when the run ends."""
    training_seconds: float = 0.0
    """Duration of the training loop in seconds; set when the run ends."""
    aside: float = 0.0
    """Seconds within steps that were spent on trial measurements instead of training; not counted in throughput."""
    facts: dict[str, float] = field(default_factory=dict)
    """Name -> number; features record these and read them in their `reduction` and `report_items`."""
    totals: dict[tuple[str, Kind], Total] = field(default_factory=dict)
    spans: deque[Span] = field(default_factory=deque)
    origin: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.spans = deque(self.spans, maxlen=self.keep)
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        _open.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        _open.remove(self)

    def align(self) -> None:
        """Set the origin of time to now, and drop earlier spans. All ranks call `align` right after a barrier."""
        with self._lock:
            self.origin = time.perf_counter()
            self.spans.clear()

    def record(self, name: str, kind: Kind, start: float, stop: float, nbytes: int = 0) -> None:
        """Add one span; `start` and `stop` are readings of `time.perf_counter`."""
        with self._lock:
            if (total := self.totals.get((name, kind))) is None:
                total = self.totals[name, kind] = Total()
            total.count += 1
            total.seconds += stop - start
            total.nbytes += nbytes
            thread = threading.get_ident()
            self.spans.append(Span(name, kind, start - self.origin, stop - self.origin, nbytes, thread, self.step))

    def seconds(self, kind: Kind) -> float:
        """Sum of the durations of all spans of one kind; if spans overlap, the shared time counts several times."""
        return sum(total.seconds for (_, other), total in self.totals.items() if other == kind)

    def snapshot(self) -> tuple[list[Span], dict[tuple[str, Kind], Total]]:
        """Consistent copies of spans and totals, even while other threads record."""
        with self._lock:
            return list(self.spans), {key: replace(total) for key, total in self.totals.items()}


class Listener(Protocol):
    """The interface that `listening` calls when a span begins and ends, on the span's thread.

    `end` is called only for a span whose `begin` was called.
    """

    def begin(self, work: span, /) -> None: ...

    def end(self, work: span, /) -> None: ...


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call `listener` when any span in this process begins and ends. A span's duration excludes the listener's time.

    Spans may be nested.
    """
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


class span:  # noqa: N801  (reads as a statement: `with span("forward", "compute"):`)
    """Times the work inside a `with` block; the work may set `nbytes`, the number of bytes it moved."""

    __slots__ = ("_notified", "began", "kind", "name", "nbytes")

    def __init__(self, name: str, kind: Kind, nbytes: int = 0) -> None:
        self.name, self.kind, self.nbytes = name, kind, nbytes

    def __enter__(self) -> Self:
        self._notified = None
        if _listeners:
            self._notified = tuple(_listeners)
            for listener in self._notified:
                listener.begin(self)
        self.began = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if _open:
            ended = time.perf_counter()
            for trace in _open:
                trace.record(self.name, self.kind, self.began, ended, self.nbytes)
        if self._notified:
            for listener in reversed(self._notified):
                if listener in _listeners:
                    listener.end(self)
