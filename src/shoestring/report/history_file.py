"""Reads and writes history.jsonl of a run folder, which records every start of the run's ranks and how it ended.

Every event is one line {"event", "time" (unix seconds), "host", "rank", "step"}: `started`, then `resumed` if the run
continues from a checkpoint, then `finished`, `stopped` (by a signal), or `failed` with the error. A killed process
writes no event. The next start therefore adds `lost` after a `started` event without an end; its entry "ended" is the
time of the killed process's last metric.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoestring.storage import foreign

FILE = "history.jsonl"
_LINE = 1 << 20
"""Maximum length of an event in bytes; the text of an error is the longest part."""


def add(folder: Path, event: str, *, rank: int, step: int, **more: Any) -> None:
    """Append one event in a single write, so that the lines of several ranks do not mix."""
    row = {"event": event, "time": time.time(), "host": socket.gethostname(), "rank": rank, "step": step} | more
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW  # does not block on a pipe or follow a link
    descriptor = os.open(Path(folder) / FILE, flags, 0o644)  # own file: it is written here
    try:
        cut_short = False  # whether the machine crashed while the last line was written
        with foreign.open_file(Path(folder) / FILE) as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                cut_short = file.read(1) != b"\n"
        os.write(descriptor, b"\n" * cut_short + json.dumps(row).encode() + b"\n")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(folder: Path) -> list[dict[str, Any]]:
    """Read all events that can be parsed, oldest first."""
    path = Path(folder) / FILE
    with suppress(OSError):  # the file does not exist
        foreign.check_within(path, Path(folder))
        return parse(foreign.read_lines(path, _LINE))
    return []


def parse(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """Parse the lines of a history to events; other lines are skipped, and a line that is too long ends the list."""
    events = []
    with suppress(OSError, ValueError):
        for line in lines:
            with suppress(ValueError):
                event = foreign.parse_json(line.decode("utf-8", "replace"))
                if isinstance(event, dict) and isinstance(event.get("event"), str):
                    events.append(event)
    return events


def lost(events: Sequence[dict[str, Any]]) -> bool:
    """Whether the newest start has no event that ends it."""
    return bool(events) and events[-1]["event"] in ("started", "resumed")


def newest(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The newest `started` event and all later events; all events if there is no `started`."""
    starts = [index for index, event in enumerate(events) if event["event"] == "started"]
    return list(events[starts[-1] :]) if starts else list(events)


def spent_before(events: Sequence[dict[str, Any]]) -> float:
    """Total run time, in seconds, of all starts before the newest; a lost start ends at its last metric."""
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
    """The event that best explains why the newest start failed; a rank's own error is preferred to a peer's loss."""
    ends = [event for event in newest(events) if event["event"] in ("failed", "lost")]
    return min(ends, key=lambda event: event.get("error") == "PeerError", default=None)
