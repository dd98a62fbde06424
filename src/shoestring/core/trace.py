"""What happened, and how long it took: spans on any thread, bounded in memory however long the run.

`span` costs about a microsecond, so it may stand on hot paths. It records into every trace that is open
(`with trace:`), on whatever thread it runs, and tells every listener (`with listening(profiler):`) when it begins and
ends; with none of either it does nothing.
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

# The traces that are open in this process. Work is marked on threads that were started long before or outside of
# any run (autograd's, a communication library's), so a context variable would not reach them.
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
    """All spans of one name and kind added up."""

    count: int = 0
    seconds: float = 0.0
    nbytes: int = 0


@dataclass(eq=False)
class Trace:
    """The totals of all spans, and the newest `keep` of them one by one."""

    rank: int = 0
    host: str = ""
    keep: int = 16384
    step: int = 0
    ranks: int = 1
    parameters: int = 0
    """Trained parameters, in elements; gathered, where they are sharded."""
    gradient_bytes: int = 0
    """Bytes of all their gradients."""
    steps: int = 0
    """Optimizer steps of the run, once it has ended."""
    training_seconds: float = 0.0
    """Seconds that the loop took, once it has ended."""
    aside: float = 0.0
    """Seconds inside of steps that were not training: trials, which rates must not count."""
    facts: dict[str, float] = field(default_factory=dict)
    """Numbers of features' own, which `Feature.reduction` and `Feature.report_items` read."""
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
        """Make now the origin: called on all ranks right after a barrier, it puts their clocks on one line."""
        with self._lock:
            self.origin = time.perf_counter()
            self.spans.clear()

    def record(self, name: str, kind: Kind, start: float, stop: float, nbytes: int = 0) -> None:
        """Add one span; `start` and `stop` are readings of `time.perf_counter`."""
        with self._lock:
            total = self.totals.get((name, kind))
            if total is None:
                total = self.totals[name, kind] = Total()
            total.count += 1
            total.seconds += stop - start
            total.nbytes += nbytes
            thread = threading.get_ident()
            self.spans.append(Span(name, kind, start - self.origin, stop - self.origin, nbytes, thread, self.step))

    def seconds(self, kind: Kind) -> float:
        """Seconds of all spans of one kind; those that overlap count each."""
        return sum(total.seconds for (_, of), total in self.totals.items() if of == kind)

    def snapshot(self) -> tuple[list[Span], dict[tuple[str, Kind], Total]]:
        """Spans and totals as they are now, while other threads continue to record."""
        with self._lock:
            return list(self.spans), {key: replace(total) for key, total in self.totals.items()}


class Listener(Protocol):
    """Hears each span begin and end, on the span's own thread; the end of those only that it heard begin."""

    def begin(self, work: span, /) -> None: ...

    def end(self, work: span, /) -> None: ...


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call `listener` at both ends of every span in this process, outside of its time. Spans may nest."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


class span:  # noqa: N801  (reads as a statement: `with span("forward", "compute"):`)
    """Marks the work inside a `with` block; `nbytes` may be set while it runs."""

    __slots__ = ("_notified", "began", "kind", "name", "nbytes")

    def __init__(self, name: str, kind: Kind, nbytes: int = 0) -> None:
        self.name = name
        self.kind: Kind = kind
        self.nbytes = nbytes

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
