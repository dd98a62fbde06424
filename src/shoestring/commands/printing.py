"""Prints the output of verbs. Control characters are escaped, because texts from untrusted files must not send control
sequences to the terminal."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from typing import TextIO

from shoestring.storage.foreign import one_line, printable


def say(text: object, stream: TextIO | None = None) -> None:
    """Print a text and a line break, flushed, with control characters escaped."""
    print(printable(str(text)), file=stream or sys.stdout, flush=True)


def say_lines(lines: Iterable[str]) -> None:
    """Print lines, with line breaks and control characters inside them escaped."""
    print("\n".join(map(one_line, lines)), flush=True)


def write_text(text: str) -> None:
    """Write generated text: unchanged to a file or a pipe, with control characters escaped to a terminal."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)


class PrintableFormatter(logging.Formatter):
    """Formats log messages with control characters escaped."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))
