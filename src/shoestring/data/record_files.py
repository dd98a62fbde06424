"""Reads files of records: JSON lines, JSON, CSV, TSV and Parquet; all except Parquet may be compressed."""

from __future__ import annotations

import codecs
import csv
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from shoestring import figures
from shoestring.core.errors import DataError
from shoestring.data import parquet
from shoestring.data.chat_formats import KEYS, format_of
from shoestring.storage import foreign
from shoestring.storage.compressed import COMPRESSIONS, open_text

PARQUET = ".parquet"
_BLOCK = 1 << 20
_LONGEST_WORD = 16
"""Maximum length in characters of JSON tokens other than strings; the longest are `-Infinity` and escapes of
characters. A syntax error within this distance of the end of the text read so far may only mean that a token is cut
off."""
_LINES = "each line of a .jsonl file is one object"
_ARRAY = "a .json file is an array of objects, or one object after the other"
_SPACE = re.compile(r"[ \t\r\n]*")
_TEXTS = ("input", "output", "prompt", "completion", "instruction", "text", "system", "chosen", "rejected")
"""Columns of a table in which an empty cell is an empty text; in other columns an empty cell is an absent value."""
_SIDES = ("prompt", "completion", "chosen", "rejected")
"""Columns whose cells hold a text, or messages as JSON."""
_ROLE = {"role", "from"}
_Placed = tuple[str, Mapping[str, Any]]
"""A pair: the place of a record in its file, and the record."""


class PlacedRecord(NamedTuple):
    """A record of a file or a data set."""

    where: str
    """The record's place, for error messages."""
    values: Mapping[str, Any]
    file: str
    """The file or data set that the record is from."""


def kind_of(path: Path) -> str:
    """The suffix that determines how a file's records are read, in lower case and without the suffix of its
    compression; empty for a text file.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in (*_READERS, PARQUET) else ""


def read_records(path: Path, keys: Sequence[str]) -> Iterator[PlacedRecord]:
    """Iterate over the records of a file, with only a few in memory at a time. From a Parquet file, only those columns
    of `keys` that exist are read.

    Raises:
        DataError: the file cannot be read, is damaged, or is not a file of records.
    """
    kind = kind_of(path)
    if kind == PARQUET:
        if path.suffix.lower() in COMPRESSIONS:
            hint = "Parquet compresses by itself; unpack the file"
            raise DataError(f"{path}: a Parquet file cannot be read in compressed form", hint=hint)
        for number, row in enumerate(parquet.records(path, keys), 1):
            yield PlacedRecord(f"{path}, row {number}", row, str(path))
        return
    own = set(keys) - set(KEYS)
    with readable(path), open_text(path) as file:
        for where, values in _json(file, path, own) if kind == ".json" else _READERS[kind](file, path):
            yield PlacedRecord(where, values, str(path))


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Context that converts errors of opening or reading a file to a DataError that names the file."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise DataError(f"{path}: {reason}", hint="write the file again, or leave it out") from error


# -- JSON --------------------------------------------------------------------------------------------------------------


def _json_lines(file: BinaryIO, path: Path) -> Iterator[_Placed]:
    for number, line in _lines(file, path):
        if line.strip():
            yield f"{path}:{number}", _object(line, f"{path}:{number}")


def _lines(file: BinaryIO, path: Path) -> Iterator[tuple[int, bytes]]:
    """Iterate over the lines of a file with their numbers, with only one line in memory at a time."""
    number = 0
    try:
        for number, line in enumerate(foreign.lines_of(file), 1):
            yield number, line
    except ValueError as error:
        raise DataError(f"{path}:{number + 1}: {error}", hint=_LINES) from error


def _object(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        record = foreign.parse_json(line)
    except ValueError as error:  # this includes a line that is not UTF-8
        raise DataError(f"{where}: not JSON: {error}", hint=_LINES) from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: not an object", hint='each record is like {"text": "..."}')
    return record


def _json(file: BinaryIO, path: Path, own: Collection[str] = ()) -> Iterator[_Placed]:
    """Iterate over the records of a .json file, which holds an array of objects, or objects one after the other. A
    single object is a record if it has the keys of a known format or a key in `own`. Otherwise the object may contain
    one list of records.
    """
    text = _Stream(file, path)
    if text.peek() == "[":
        text.at += 1
        while text.peek() != "]":
            yield text.where, text.object()
            if text.peek() == ",":
                text.at += 1
                if text.peek() != "]":
                    continue
            if text.peek() != "]":
                raise DataError(f"{text.where}: not JSON: `,` or `]` is missing after a record", hint=_ARRAY)
        text.at += 1
        if text.peek():
            raise DataError(f"{text.where}: not JSON: something follows the array", hint=_ARRAY)
        return
    first = True
    while text.peek():
        where, record = text.where, text.object()
        lists = [value for value in record.values() if isinstance(value, list) and value]
        lists = [entries for entries in lists if all(isinstance(entry, dict) for entry in entries)]
        is_record = format_of(record) or not record.keys().isdisjoint(own)
        if first and not text.peek() and not is_record and len(lists) == 1:
            yield from ((f"{where}, record {number}", entry) for number, entry in enumerate(lists[0], 1))
            return
        yield where, record
        first = False


class _Stream:
    """Reads the text of a JSON file in chunks, with about one record in memory."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path = file, path
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._json = json.JSONDecoder()
        self._line, self._ended = 1, False
        self._text = ""
        self.at = 0
        """Position of the next character."""

    @property
    def where(self) -> str:
        """Place of the next character."""
        return f"{self._path}:{self._line + self._text.count(chr(10), 0, self.at)}"

    def peek(self) -> str:
        """Skip white space; returns the next character without consuming it, or an empty string at the end of the
        file."""
        while True:
            space = _SPACE.match(self._text, self.at)
            self.at = space.end() if space else self.at
            if self.at < len(self._text):
                return self._text[self.at]
            if not self._read(_BLOCK):
                return ""

    def object(self) -> dict[str, Any]:
        """Parse the object that begins at the current position."""
        if self.peek() != "{":
            raise DataError(f"{self.where}: not an object", hint=_ARRAY)
        while True:
            try:
                record, self.at = self._json.raw_decode(self._text, self.at)
                return record
            except json.JSONDecodeError as error:
                cut_short = error.msg.startswith("Unterminated") or error.pos > len(self._text) - _LONGEST_WORD
                if len(self._text) - self.at > foreign.LINE_LIMIT:
                    message = f"a record is longer than {figures.size(foreign.LINE_LIMIT)}"
                    raise DataError(f"{self.where}: {message}", hint=_ARRAY) from error
                if cut_short and self._read(max(_BLOCK, len(self._text) - self.at)):
                    continue
                self.at = min(error.pos, len(self._text))
                raise DataError(f"{self.where}: not JSON: {error.msg}", hint=_ARRAY) from error
            except (RecursionError, ValueError) as error:  # ValueError is raised for a number with thousands of digits
                reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
                raise DataError(f"{self.where}: not JSON: {reason}", hint=_ARRAY) from error

    def _read(self, size: int) -> bool:
        """Read more text and discard the text that was parsed; returns whether there was more text."""
        if self._ended:
            return False
        try:
            block = self._file.read(size)
            self._line += self._text.count("\n", 0, self.at)
            self._text = self._text[self.at :] + self._decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.where}: not JSON: invalid UTF-8 after this place", hint="save the file as UTF-8"
            ) from error
        self.at, self._ended = 0, not block
        return not self._ended


# -- tables of text ----------------------------------------------------------------------------------------------------


def _table(delimiter: str) -> Callable[[BinaryIO, Path], Iterator[_Placed]]:
    """Make a reader of tables whose first row names the columns."""

    def rows(file: BinaryIO, path: Path) -> Iterator[_Placed]:
        csv.field_size_limit(foreign.LINE_LIMIT)
        # The line number of csv.reader includes line breaks inside cells, so it is correct for error messages.
        reader = csv.reader(_decoded(file, path), delimiter=delimiter, strict=True)
        names: list[str] = []
        line = 1
        try:
            for cells in reader:
                where, line = f"{path}:{line}", reader.line_num + 1
                if not names:
                    names = [name.strip() for name in cells]
                    if len(set(names)) < len(names) or not all(names):
                        hint = "the first row names the columns, each another name"
                        raise DataError(f"{where}: a column has no name, or two columns have the same name", hint=hint)
                elif cells and len(cells) != len(names):
                    hint = f"a row is split at {'tabs' if delimiter != ',' else 'commas'} outside of double quotes"
                    raise DataError(f"{where}: {len(cells)} cells in a table of {len(names)} columns", hint=hint)
                elif cells:
                    yield where, {name: _cell(name, cell) for name, cell in zip(names, cells, strict=True)}
        except csv.Error as error:
            raise DataError(f"{path}:{line}: {error}", hint="write it again with quotes around all texts") from error

    return rows


def _decoded(file: BinaryIO, path: Path) -> Iterator[str]:
    for number, line in _lines(file, path):
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            raise DataError(f"{path}:{number}: not UTF-8", hint="save the table as UTF-8") from error


def _cell(name: str, cell: str) -> Any:
    """Parse a cell: an empty cell is None except in text columns; messages are parsed from JSON."""
    if name not in _TEXTS and not cell:
        return None
    if name in _SIDES and cell.startswith(("[{", "{")):
        try:
            messages = foreign.parse_json(cell)
        except ValueError:
            return cell
        listed = messages if isinstance(messages, list) else [messages]
        return messages if all(isinstance(entry, dict) and _ROLE & entry.keys() for entry in listed) else cell
    return cell


_READERS: dict[str, Callable[[BinaryIO, Path], Iterator[_Placed]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".csv": _table(","),
    ".tsv": _table("\t"),
}
