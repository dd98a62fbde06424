"""Reads and writes trace files, and merges the traces of all ranks onto one time axis."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import get_args

from shoestring.core.errors import ConfigError
from shoestring.core.trace import Kind, Span, Total, Trace
from shoestring.storage import foreign

FORMAT = 1
KNOWN = ("ranks", "parameters", "gradient_bytes", "steps", "training_seconds")  # run facts in a trace's header


def dumps(trace: Trace) -> str:
    """A trace as JSON lines: a header with the totals, then one line per span."""
    spans, totals = trace.snapshot()
    head = {
        "trace": FORMAT,
        "rank": trace.rank,
        "host": trace.host,
        **{name: getattr(trace, name) for name in KNOWN},
        "facts": trace.facts,
        "totals": [
            {"name": name, "kind": kind, "count": total.count, "seconds": total.seconds, "bytes": total.nbytes}
            for (name, kind), total in totals.items()
        ],
    }
    return "".join(json.dumps(line) + "\n" for line in (head, *(span._asdict() for span in spans)))


def read(path: Path) -> Trace:
    """Read a trace from a file that `dumps` has produced.

    Raises:
        ConfigError: the file is not a trace of this format.
    """
    try:
        head, *lines = [foreign.parse_json(line) for line in foreign.read_lines(path)]
        if head["trace"] != FORMAT:
            raise ValueError(f"format {head['trace']}")
        totals = {(t["name"], t["kind"]): Total(t["count"], t["seconds"], t["bytes"]) for t in head["totals"]}
        spans = [Span(**line) for line in lines]
        if any(span.kind not in get_args(Kind) for span in spans):
            raise ValueError("unknown kind of span")
        facts = {name: head[name] for name in ("rank", "host", "facts")}
        facts |= {name: head[name] for name in KNOWN if name in head}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"`{path}` is not a trace of format {FORMAT}: {error}") from error
    trace = Trace(totals=totals, keep=max(len(spans), 1), **facts)
    trace.spans.extend(spans)
    return trace


def merge(traces: Iterable[Trace]) -> list[tuple[int, Span]]:
    """All spans of several ranks as (rank, span), ordered by start; assumes that all traces began simultaneously."""
    return sorted(((trace.rank, span) for trace in traces for span in trace.spans), key=lambda pair: pair[1].start)


def chrome(traces: Iterable[Trace]) -> Mapping[str, object]:
    """The traces in Chrome's trace event format (microseconds, one process per rank), which Perfetto opens."""
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
