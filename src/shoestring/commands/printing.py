"""Prints the output of verbs. Control characters are escaped, so that text from untrusted files cannot send control
sequences to the terminal."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from typing import TextIO

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


class PrintableFormatter(logging.Formatter):
    """Formats log messages with control characters escaped."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))
