"""history.jsonl of a run folder: every start of the run's ranks, and how it ended.

Every event is one line {"event", "time" (unix seconds), "host", "rank", "step"}: `started`, `resumed` where it
continues a checkpoint, then `finished` or `stopped` (by a signal), or `failed` with the error. A process that is killed
writes nothing: the next start finds its `started` without an end and adds `lost`, with "ended", when it last wrote a
metric.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

FILE = "history.jsonl"


def add(folder: Path, event: str, *, rank: int, step: int, **more: Any) -> None:
    """Append one event; a single write, so that the lines of several ranks do not mix."""
    row = {"event": event, "time": time.time(), "host": socket.gethostname(), "rank": rank, "step": step} | more
    descriptor = os.open(Path(folder) / FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, b"\n" * _cut_short(Path(folder) / FILE) + json.dumps(row).encode() + b"\n")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(folder: Path) -> list[dict[str, Any]]:
    """All events that can be read, oldest first."""
    try:
        lines = (Path(folder) / FILE).read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return []
    events = []
    for line in lines:
        with suppress(ValueError, RecursionError):
            event = json.loads(line)
            if isinstance(event, dict) and isinstance(event.get("event"), str):
                events.append(event)
    return events


def lost(events: Sequence[dict[str, Any]]) -> bool:
    """Whether the newest start has no end."""
    return bool(events) and events[-1]["event"] in ("started", "resumed")


def newest(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The newest start and what followed; all events where there is no start."""
    starts = [index for index, event in enumerate(events) if event["event"] == "started"]
    return list(events[starts[-1] :]) if starts else list(events)


def spent_before(events: Sequence[dict[str, Any]]) -> float:
    """Seconds of all starts but the newest, each to its end, of one that was lost to the last metric that it wrote."""
    seconds, began = 0.0, math.nan
    for event in events[: len(events) - len(newest(events))]:
        if event["event"] == "started":
            began = _moment(event, "time")
        elif event["event"] != "resumed":
            took = _moment(event, "ended" if event["event"] == "lost" else "time") - began
            seconds, began = seconds + (max(took, 0.0) if math.isfinite(took) else 0.0), math.nan
    return seconds


def _moment(event: dict[str, Any], key: str) -> float:
    value = event.get(key)
    return float(value) if isinstance(value, int | float) else math.nan


def cause(events: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The event that says best why the newest start failed: ranks that only lost another one say the least."""
    ends = [event for event in newest(events) if event["event"] in ("failed", "lost")]
    return min(ends, key=lambda event: event.get("error") == "PeerError", default=None)


def _cut_short(path: Path) -> bool:
    """Whether the last line has no end, because a machine went down while it was written."""
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
