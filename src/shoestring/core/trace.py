"""What happened, and how long it took: spans on any thread, bounded in memory however long the run.

`span` costs about a microsecond, so it may stand on hot paths. It records into every trace that is open
(`with trace:`), on whatever thread it runs; with none open it does nothing.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple, Self, get_args

from shoestring.core.errors import ConfigError

Kind = Literal["compute", "wire", "copy", "disk", "wait"]
FORMAT = 1

# The traces that are open in this process. Work is marked on threads that were started long before or outside of
# any run (autograd's, a communication library's), so a context variable would not reach them.
_open: list[Trace] = []


class Span(NamedTuple):
    """One piece of work: `start` and `stop` in seconds since the trace's origin."""

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
    facts: dict[str, float] = field(default_factory=dict)
    """Numbers known about the run: parameters, gradient bytes, ranks, seconds …"""
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

    # -- files -------------------------------------------------------------------------------------------------------

    def dumps(self) -> str:
        """JSON lines: a head with the totals, then one line a span."""
        with self._lock:
            spans, totals = list(self.spans), list(self.totals.items())
        head = {
            "trace": FORMAT,
            "rank": self.rank,
            "host": self.host,
            "facts": self.facts,
            "totals": [
                {"name": name, "kind": kind, "count": total.count, "seconds": total.seconds, "bytes": total.nbytes}
                for (name, kind), total in totals
            ],
        }
        return "".join(json.dumps(line) + "\n" for line in (head, *(span._asdict() for span in spans)))

    @classmethod
    def read(cls, path: Path) -> Trace:
        """The inverse of `dumps`, from a file.

        Raises:
            ConfigError: the file is not a trace of this format.
        """
        try:
            head, *lines = [json.loads(line) for line in path.read_text().splitlines()]
            if head["trace"] != FORMAT:
                raise ValueError(f"format {head['trace']}")
            totals = {(t["name"], t["kind"]): Total(t["count"], t["seconds"], t["bytes"]) for t in head["totals"]}
            spans = [Span(**line) for line in lines]
            if any(span.kind not in get_args(Kind) for span in spans):
                raise ValueError("unknown kind of span")
            rank, host, facts = head["rank"], head["host"], head["facts"]
        except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"`{path}` is not a trace of format {FORMAT}: {error}") from error
        trace = cls(rank=rank, host=host, facts=facts, totals=totals, keep=max(len(spans), 1))
        trace.spans.extend(spans)
        return trace


class span:  # noqa: N801  (reads as a statement: `with span("forward", "compute"):`)
    """Marks the work inside a `with` block; `nbytes` may be set while it runs."""

    __slots__ = ("began", "kind", "name", "nbytes")

    def __init__(self, name: str, kind: Kind, nbytes: int = 0) -> None:
        self.name = name
        self.kind: Kind = kind
        self.nbytes = nbytes

    def __enter__(self) -> Self:
        self.began = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if _open:
            ended = time.perf_counter()
            for trace in _open:
                trace.record(self.name, self.kind, self.began, ended, self.nbytes)
