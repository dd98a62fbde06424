"""Prints the output of verbs, as text or as JSON.

Control characters are escaped, so that text from untrusted files cannot send control sequences to the terminal.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from shoestring import figures
from shoestring.storage.foreign import one_line, printable


def say(text: object, stream: TextIO | None = None) -> None:
    """Print a text and a line break with control characters escaped, and flush the stream."""
    print(printable(str(text)), file=stream or sys.stdout, flush=True)


def say_lines(lines: Iterable[str]) -> None:
    """Print lines; escape control characters inside a line, line breaks included."""
    print("\n".join(map(one_line, lines)), flush=True)


def write_text(text: str) -> None:
    """Write generated text: unchanged to a file or a pipe; to a terminal, with control characters escaped."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)


@dataclass(frozen=True)
class Output:
    """Format of the output; a verb that nests it has the flag --json."""

    json: bool = False
    """Print JSON instead of text."""

    def show(self, value: object, lines: Iterable[str]) -> None:
        """Print a result: `value` as JSON, or else the lines for a reader."""
        if self.json:
            say(json.dumps(value, indent=2))
        else:
            say_lines(lines)


@dataclass(frozen=True, kw_only=True)
class PrintsResult:
    """Arguments of a verb that prints its result as text or as JSON."""

    output: Output = field(default_factory=Output)
    """Format of the output."""


def table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Lines of a table: a line with the names of the columns, then the rows; numbers are aligned to the right."""
    if not rows:
        return

    def cell(name: str, value: Any) -> str:
        if name == "bytes":
            return figures.size(value)
        return "; ".join(map(str, value)) if isinstance(value, list) else str(value)

    cells = [[cell(name, value) for name, value in row.items()] for row in rows]
    columns = list(zip(list(rows[0]), *cells, strict=True))
    numeric = [all(isinstance(row[column[0]], int | float) for row in rows) for column in columns]
    for line in zip(*columns, strict=True):
        widths = [max(map(len, column)) for column in columns]
        placed = [
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, numeric, strict=True)
        ]
        yield "  ".join(placed).rstrip()


class PrintableFormatter(logging.Formatter):
    """Formats log messages with control characters escaped."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))
