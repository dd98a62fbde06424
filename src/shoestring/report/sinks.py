"""The interface of metric sinks (`Sink`), and the JSON lines sink of every run; `trackers.py` has all other sinks.

A sink whose data outlives the process may also have a method `truncate_after(step)`: a resumed run calls this method so
that repeated steps do not appear twice. A sink may also have a method `show(step, findings)`, which receives the tables
and pictures of an evaluation by name (see `findings.py`).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from shoestring.storage import foreign
from shoestring.storage.whole import write_atomic

_END = 1 << 16  # bytes to read from the end of a JSON lines file, enough for its last row


class Sink(Protocol):
    """Receives the metrics of each step. `close` is called exactly once, even after an exception."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """Appends one line of JSON per step to `path` and flushes it: step, time (unix seconds) and the values.

    If a crash has truncated the last line, a line break is added first, so that the next row starts a new line.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._file = self._open()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append the values of `step`; a value with key `time` replaces the current time."""
        self.append({"step": step, "time": time.time()} | {key: float(value) for key, value in values.items()})

    def append(self, row: Mapping[str, Any]) -> None:
        """Append a row, which must consist of JSON types and have an entry `step`."""
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def truncate_after(self, step: int) -> None:
        """Atomically remove all rows of steps later than `step`, and all lines that are not rows."""
        self._file.close()
        try:
            with self.path.open(encoding="utf-8", errors="replace") as old:  # own file: `_open` looked at it
                write_atomic(self.path, (line.encode() for line in old if _step(line) <= step))
        finally:
            self._file = self._open()

    def close(self) -> None:
        """Close the file; `write` then raises an error."""
        self._file.close()

    def _open(self) -> Any:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.is_symlink() or self.path.exists():  # the run folder may belong to someone else, so check the file
            foreign.open_file(self.path, self.path.parent).close()
        file = self.path.open("a+b")  # own file: looked at above
        if file.seek(0, os.SEEK_END) > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.close()
        return self.path.open("a", encoding="utf-8", newline="\n")


def newest_step(path: Path) -> int:
    """The step of the last row of a JSON lines file, of which only the end is read; 0 if there is no row."""
    try:
        with foreign.open_file(path) as file:
            file.seek(-min(_END, file.seek(0, os.SEEK_END)), os.SEEK_END)
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return 0
    return int(next((step for step in map(_step, reversed(lines)) if step < float("inf")), 0))


def seconds_since(path: Path, step: int) -> float:
    """Total seconds of `step` and all later steps in a JSON lines file; 0 if there is no file."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            rows = [json.loads(line) for line in file if step <= _step(line) < float("inf")]
    except OSError:
        return 0.0
    times = [row.get("step_seconds", 0.0) for row in rows]
    return float(sum(seconds for seconds in times if isinstance(seconds, int | float) and seconds > 0))


def evaluations_of(path: Path, step: int) -> int:
    """Number of evaluation rows of `step` in a JSON lines file; such a row has no training loss."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return sum("loss" not in json.loads(line) for line in file if _step(line) == step)
    except OSError:
        return 0


def _step(line: str) -> float:
    """The step of a line; infinity if the line is not a row."""
    try:
        return int(foreign.parse_json(line)["step"])
    except (ValueError, TypeError, KeyError, OverflowError):
        return float("inf")
