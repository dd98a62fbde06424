"""Reads untrusted Parquet files; checks limits of their decoded size before pyarrow reads them.

A file of a few hundred bytes may declare a page of 2 GB, or a run of a billion equal values. The header of each page,
in Thrift's compact protocol, states the page's size and number of values, which are checked here first. The format is
described at https://parquet.apache.org/docs/file-format/ and `parquet.thrift` of apache/parquet-format.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from shoestring.core.errors import DataError, nearest
from shoestring.storage import foreign

_PAGE = 512 << 20
"""Maximum size of a decompressed page in bytes; most writers make pages of about 1 MB, some make one page for each row
group."""
_MANY, _PER_BYTE = 1 << 20, 128
"""Limits of the number of values: a file may have `_MANY` values, or `_PER_BYTE` values for each of its bytes if that
is more."""
_TEXT, _GROWTH = 256 << 20, 300  # text in a natural language is compressed to a fifth, a repeated line to a hundredth
"""Limits of the decoded size: a file may decode to `_TEXT` bytes, or to `_GROWTH` times its size if that is more."""
_PAGES, _SMALLEST_PAGE = 10_000, 4096
"""Limits of the number of pages: a file may have `_PAGES` pages, or one for each `_SMALLEST_PAGE` bytes if that is
more."""
_BATCH, _ROWS = 128 << 20, 1024
"""Limits of a batch of rows: its size in bytes if every row held the longest value that can be repeated, and its number
of rows."""
_DICTIONARY_PAGE, _DELTA_BYTE_ARRAY = 2, 7
"""The page type and the encoding in which a few bytes may decode to many copies of a long value."""
_FOOTER, _HEADER = 256 << 20, 1 << 20
"""Maximum sizes of a footer and of a page header, in bytes; a page header may be large because it contains two values
as statistics."""
_DEPTH = 32
"""Maximum nesting depth of the schema and of Thrift structures."""


def rows(path: Path, field: str) -> Iterator[Any]:
    """The values of a column, in order, with only a few rows in memory at a time.

    Raises:
        DataError: the column is missing, or the file is damaged or decodes to far more than its size.
    """
    return (row[field] for row in records(path, [field]))


def records(path: Path, fields: Collection[str]) -> Iterator[Mapping[str, Any]]:
    """Iterate over the rows of a file, with those columns of `fields` that exist; only a few rows are in memory at a
    time.

    Raises:
        DataError: the file has none of the columns, is damaged, or decodes to far more than its size.
    """
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise DataError(f"{path}: Parquet needs pyarrow", hint="pip install shoestring[parquet]") from error
    try:
        with foreign.open_file(path) as file:
            size = file.seek(0, 2)
            columns = _columns(file, size)
            names = list(dict.fromkeys(column.path[0] for column in columns))
            read = [name for name in names if name in fields]
            if not read:
                one = len(fields) == 1
                missing = f"no column {next(iter(fields))!r}" if one else "no column of a known format of chats"
                hint = nearest(next(iter(fields)), names) if one else f"the columns are {', '.join(names)}"
                raise DataError(f"{path}: {missing}", hint=f"data.field: {hint}")
            largest = _check_pages([column for column in columns if column.path[0] in read], file, size)
            room, many = max(_TEXT, _GROWTH * size), max(_MANY, _PER_BYTE * size)
            with ParquetFile(file) as table:  # own file: checked above
                rows_at_once = max(1, min(_ROWS, _BATCH // max(1, largest)))
                for batch in table.iter_batches(batch_size=rows_at_once, columns=read):
                    room, many = room - batch.nbytes, many - len(batch)
                    if room < 0 or many < 0:
                        raise ValueError(f"it decodes to far more data than its {size:,} bytes can hold")
                    yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise DataError(f"{path}: not a Parquet file, or damaged: {reason}", hint="write it again") from error


def check(path: Path) -> None:
    """Check all columns of a file like `rows`, without reading values.

    Raises:
        DataError: the file is damaged or decodes to far more than its size.
    """
    try:
        with foreign.open_file(path) as file:
            size = file.seek(0, 2)
            _check_pages(_columns(file, size), file, size)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not a Parquet file, or damaged: {error}", hint="write it again") from error


class _Column(NamedTuple):
    """A column of one row group: its path in the schema, and the byte range of its pages."""

    path: tuple[str, ...]
    start: int
    end: int


def _columns(file: BinaryIO, size: int) -> list[_Column]:
    """The columns of all row groups, from the footer.

    Schema and columns are compared because pyarrow crashes the process if they disagree.

    Raises:
        ValueError: the footer is damaged, or its schema and its columns disagree.
    """
    file.seek(max(0, size - 8))
    tail = file.read(8)
    length = int.from_bytes(tail[:4], "little")
    if tail[4:] != b"PAR1" or not 0 < length <= min(size - 12, _FOOTER):
        raise ValueError("it has no footer")
    file.seek(size - 8 - length)
    footer = _Thrift(file.read(length)).struct()
    leaves = list(_leaves(_list(footer, 2)))
    columns: list[_Column] = []
    for group in _list(footer, 4):
        if len(chunks := _list(group, 1)) != len(leaves):
            raise ValueError(f"its row groups have {len(chunks)} columns, but its schema has {len(leaves)}")
        for chunk, (path, kind) in zip(chunks, leaves, strict=True):
            about = _table(chunk, 3)
            if 1 in chunk or about.get(1) != kind or _list(about, 3) != [name.encode() for name in path]:
                raise ValueError("its columns do not fit its schema")
            starts = [_number(about, key) for key in (9, 11) if about.get(key)]
            start = min(starts, default=0)
            end = start + _number(about, 7)
            if not end <= size:
                raise ValueError("its columns do not lie within it")
            columns.append(_Column(path, start, end))
    return columns


def _leaves(schema: list[Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Iterate over the leaves of a schema, which is a tree in depth-first order: each leaf's path, without the root,
    and its type."""
    above: list[tuple[str, int]] = []  # enclosing elements, each with the number of its children that are still to come
    for number, element in enumerate(schema):
        while above and above[-1][1] == 0:
            above.pop()
        if number and not above:
            raise ValueError("its schema has two roots")
        if above:
            above[-1] = (above[-1][0], above[-1][1] - 1)
        name = element[4].decode() if isinstance(element, dict) and isinstance(element.get(4), bytes) else ""
        children = _number(element, 5) if isinstance(element, dict) and 5 in element else 0
        has_type = isinstance(element, dict) and 1 in element
        if len(above) >= _DEPTH or has_type == (children > 0 or number == 0):
            raise ValueError("its schema is damaged, or nested too deeply")
        if children or number == 0:
            above.append((name, children))
        else:
            yield (*(outer for outer, _ in above[1:]), name), element.get(1)
    if any(left for _, left in above):
        raise ValueError("its schema is cut short")


def _table(struct: Any, key: int) -> dict[int, Any]:
    value = struct.get(key) if isinstance(struct, dict) else None
    if not isinstance(value, dict):
        raise ValueError("its footer is damaged")
    return value


def _list(struct: Any, key: int) -> list[Any]:
    value = struct.get(key) if isinstance(struct, dict) else None
    if not isinstance(value, list):
        raise ValueError("its footer is damaged")
    return value


def _number(struct: Any, key: int) -> int:
    value = struct.get(key) if isinstance(struct, dict) else None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError("its footer is damaged")
    return value


def _check_pages(columns: list[_Column], file: BinaryIO, size: int) -> int:
    """Refuse pages that are too large or have more values than the file can hold.

    Returns:
        An upper bound, in bytes, of the longest value that can be repeated at little cost in file size.

    Raises:
        ValueError: a page is too large, or its header is damaged.
    """
    largest, pages, many = 0, max(_PAGES, size // _SMALLEST_PAGE), max(_MANY, _PER_BYTE * size)
    values: dict[tuple[str, ...], int] = {}
    for path, at, end in columns:
        while at < end:
            file.seek(at)
            thrift = _Thrift(file.read(min(_HEADER, end - at)))
            header = thrift.struct()
            long, short = _number(header, 2), _number(header, 3)
            if long > _PAGE:
                raise ValueError(f"it has a page of {long:,} bytes")
            about = next((header[key] for key in (5, 7, 8) if isinstance(header.get(key), dict)), {})
            encoding = about.get(2 if 5 in header else 4)
            if header.get(1) == _DICTIONARY_PAGE or encoding == _DELTA_BYTE_ARRAY:
                largest = max(largest, long)
            values[path] = values.get(path, 0) + (_number(about, 1) if about else 0)
            pages, at = pages - 1, at + thrift.at + short
            if pages < 0 or values[path] > many:
                raise ValueError(f"it holds far more values than its {size:,} bytes can")
    return largest


class _Thrift:
    """Parses Thrift's compact protocol; a structure becomes a dict of numbers, bytes, lists and dicts by field id."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at, self.depth = data, 0, 0

    def struct(self, last: int = 0) -> dict[int, Any]:
        """The fields of a structure, up to field `last` if it is not 0."""
        self.depth += 1
        if self.depth > _DEPTH:
            raise ValueError("it is nested too deeply")
        fields: dict[int, Any] = {}
        number = 0
        while kind := self._byte():  # the upper 4 bits are the increment of the field id, or 0 if the id follows
            number = number + (kind >> 4) if kind >> 4 else self._signed()
            fields[number] = self._value(kind & 15, in_list=False)
            if number == last:
                break
        self.depth -= 1
        return fields

    def _byte(self) -> int:
        if self.at >= len(self.data):
            raise ValueError("it is cut short")
        self.at += 1
        return self.data[self.at - 1]

    def _unsigned(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
            if shift > 63:
                raise ValueError("it has a number that is too long")

    def _signed(self) -> int:
        value = self._unsigned()
        return (value >> 1) ^ -(value & 1)

    def _skip(self, nbytes: int) -> bytes:
        if nbytes > len(self.data) - self.at:
            raise ValueError("it is cut short")
        self.at += nbytes
        return self.data[self.at - nbytes : self.at]

    def _value(self, kind: int, *, in_list: bool) -> Any:
        if kind in (1, 2):  # booleans: in a field the type encodes the value, in a list a byte does
            return self._byte() == 1 if in_list else kind == 1
        if kind == 3:
            return self._byte()
        if kind in (4, 5, 6):
            return self._signed()
        if kind == 7:
            return self._skip(8)
        if kind == 8:
            return self._skip(self._unsigned())
        if kind in (9, 10):
            head = self._byte()
            count = self._unsigned() if head >> 4 == 15 else head >> 4
            if count > len(self.data) - self.at:
                raise ValueError("it is cut short")
            return [self._value(head & 15, in_list=True) for _ in range(count)]
        if kind == 12:
            return self.struct()
        raise ValueError(f"it has a field of type {kind}")
