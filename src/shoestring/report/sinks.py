"""The interface of metric sinks (`Sink`), and the JSON lines file of every run; `trackers.py` has the others.

A sink that outlives a process may also have `truncate_after(step)`: a resumed run calls it so that the steps it
repeats do not appear twice.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from shoestring.storage.whole import write_atomic

_END = 1 << 16  # bytes at the end of a file of JSON lines, in which its last whole row lies


class Sink(Protocol):
    """Takes the numbers of one step. `close` is called once, also after an exception."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """Appends one JSON object a line to `path`: step, time (unix seconds) and the values; each is flushed.

    A last line that a crash cut short is ended first, so that it cannot swallow the next one.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._file = self._open()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append the values of `step`; a `time` among them replaces the present time."""
        row = {"step": step, "time": time.time()} | {key: float(value) for key, value in values.items()}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def truncate_after(self, step: int) -> None:
        """Drop rows of steps later than `step`, and lines that are not rows; atomically."""
        self._file.close()
        try:
            with self.path.open(encoding="utf-8", errors="replace") as old:
                write_atomic(self.path, (line.encode() for line in old if _step(line) <= step))
        finally:
            self._file = self._open()

    def close(self) -> None:
        """Close the file; writing after this is an error."""
        self._file.close()

    def _open(self) -> Any:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("a+b")
        if file.seek(0, os.SEEK_END) > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.close()
        return self.path.open("a", encoding="utf-8", newline="\n")


def newest_step(path: Path) -> int:
    """The step of the last row in a file of JSON lines; 0 where there is none. Reads the end of the file only."""
    try:
        with path.open("rb") as file:
            file.seek(-min(_END, file.seek(0, os.SEEK_END)), os.SEEK_END)
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return 0
    return int(next((step for step in map(_step, reversed(lines)) if step < float("inf")), 0))


def _step(line: str) -> float:
    """The line's step; infinity for a line that is no row."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return float("inf")
