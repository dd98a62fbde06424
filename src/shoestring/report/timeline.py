"""The traces of all ranks on one line of time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shoestring.core.trace import Span, Trace


def merge(traces: Iterable[Trace]) -> list[tuple[int, Span]]:
    """All spans of several ranks as (rank, span), in order of time; their origins are taken as one moment."""
    return sorted(((trace.rank, span) for trace in traces for span in trace.spans), key=lambda pair: pair[1].start)


def chrome(traces: Iterable[Trace]) -> Mapping[str, object]:
    """The traces in Chrome's trace event format (microseconds; a process per rank), as Perfetto and others read it."""
    traces = list(traces)
    names = [
        {"ph": "M", "name": "process_name", "pid": trace.rank, "args": {"name": f"rank {trace.rank} on {trace.host}"}}
        for trace in traces
    ]
    events = [
        {
            "ph": "X",
            "name": span.name,
            "cat": span.kind,
            "ts": span.start * 1e6,
            "dur": (span.stop - span.start) * 1e6,
            "pid": rank,
            "tid": span.thread,
            "args": {"step": span.step, "bytes": span.nbytes},
        }
        for rank, span in merge(traces)
    ]
    return {"traceEvents": names + events, "displayTimeUnit": "ms"}
