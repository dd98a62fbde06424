"""Where documents come from: text files, JSON lines, Parquet, the standard library, Hugging Face data sets."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoestring.core.errors import DataError, nearest

STDLIB = "python-stdlib"
_MANY_FILES = 32
_ROWS = 1024
"""Rows of a .parquet file read at a time."""
_SMALLEST_PART, _LARGEST_PART = 1 << 12, 1 << 16


@dataclass(frozen=True, slots=True)
class Document:
    """A text that is trained on or held out as a whole."""

    key: int
    """64-bit hash of what identifies the document; decides its side of the split."""
    text: str


class Source(ABC):
    """Documents in a fixed order, as often as asked, and never all in memory."""

    skipped: int = 0
    """Files left out by the latest `documents()`."""

    @abstractmethod
    def identity(self) -> list[Any]:
        """What changes when the documents may have changed, as JSON: files with their sizes and times."""

    @abstractmethod
    def documents(self) -> Iterator[Document]:
        """Every document that is not empty."""

    def records(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Every record as it is, and where it stands; DataError for a source of plain text."""
        raise DataError(f"{type(self).__name__} is a source of text", hint="give .jsonl or .parquet files with records")


def open_source(source: str, field: str) -> Source:
    """The source that `source` names: `python-stdlib`, `hf:NAME[@CONFIG][:SPLIT]`, or paths and globs with commas.

    Raises:
        DataError: it names nothing that exists.
    """
    if source == STDLIB:
        return StandardLibrary(Path(sysconfig.get_path("stdlib")))
    if source.startswith("hf:"):
        return HuggingFace(source.removeprefix("hf:"), field)
    return TextFiles(source, field)


def key_of(name: str) -> int:
    """64-bit hash of `name`, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def _listing(paths: list[Path]) -> list[Any]:
    return [[str(path), stat.st_size, stat.st_mtime_ns] for path in paths for stat in [path.stat()]]


class TextFiles(Source):
    """Text files, .jsonl files and .parquet files.

    Each line of a .jsonl file and each row of a .parquet file is a document. A text file is one too where there are
    many; a few large ones are cut at line breaks into parts, so that some of the text can be held out, and parts bound
    the memory in either case. The split follows the hash of a record's text, or of a file's path below the first
    wildcard.
    """

    def __init__(self, source: str, field: str) -> None:
        pairs = [pair for pattern in source.split(",") for pair in _matches(pattern.strip())]
        self.paths = dict(sorted(pairs, key=lambda pair: pair[1]))
        self.field = field

    def identity(self) -> list[Any]:
        return [self.field, *_listing(list(self.paths))]

    def documents(self) -> Iterator[Document]:
        for path, name in self.paths.items():
            if path.suffix in (".jsonl", ".parquet"):
                yield from self._records(path)
            else:
                yield from self._parts(path, name)

    def _parts(self, path: Path, name: str) -> Iterator[Document]:
        many = len(self.paths) >= _MANY_FILES
        size = _LARGEST_PART
        if not many:
            size = min(max(path.stat().st_size // 64, _SMALLEST_PART), _LARGEST_PART)
        for number, (offset, block) in enumerate(_pieces(path, size)):
            yield Document(key_of(name if many else f"{name}#{number}"), _text(path, block, offset))

    def _records(self, path: Path) -> Iterator[Document]:
        for where, record in self._rows(path):
            if text := _field(record, self.field, where):
                yield Document(key_of(text), text)

    def _rows(self, path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
        return _lines(path) if path.suffix == ".jsonl" else _rows(path, self.field)

    def records(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for path in self.paths:
            if path.suffix not in (".jsonl", ".parquet"):
                hint = "records are lines of .jsonl files, or rows of .parquet files and of data sets"
                raise DataError(f"{path} holds no records", hint=hint)
            yield from self._rows(path)


def _lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each object of a .jsonl file, and where it stands."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"{path}:{number}", _record(line, f"{path}:{number}")


def _rows(path: Path, field: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each row of a .parquet file with that column alone, and where it stands; a few rows at a time are in memory."""
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise DataError(f"{path}: Parquet needs pyarrow", hint="pip install shoestring[parquet]") from error
    number = 0
    try:
        with ParquetFile(path) as file:
            if field not in (columns := file.schema_arrow.names):
                raise DataError(f"{path}: no column {field!r}", hint=f"data.field: {nearest(field, columns)}")
            for batch in file.iter_batches(batch_size=_ROWS, columns=[field]):
                for text in batch.column(0).to_pylist():
                    number += 1
                    yield f"{path}, row {number}", {field: text}
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise DataError(f"{path}: not a Parquet file, or damaged: {reason}", hint="write it again") from error


def _matches(pattern: str) -> list[tuple[Path, str]]:
    """Files that `pattern` names, each with its path below the pattern's literal folder."""
    if Path(pattern).is_dir():
        raise DataError(f"{pattern} is a folder", hint=f'give a pattern of files, such as "{pattern}/**/*.txt"')
    if Path(pattern).is_file():
        return [(Path(pattern), Path(pattern).name)]
    literal = re.split(r"[*?\[]", pattern)[0]
    if literal == pattern:
        close = nearest(pattern, [STDLIB])
        known = close if close.startswith("did") else f'give files, a glob, "{STDLIB}" or "hf:NAME"'
        raise DataError(f"no file {pattern!r}", hint=known)
    root = Path(literal if literal.endswith("/") else Path(literal).parent)
    files = [path for path in map(Path, glob.glob(pattern, recursive=True)) if path.is_file()]  # noqa: PTH207
    if not files:
        raise DataError(f"no file matches {pattern!r}", hint=f"the working folder is {Path.cwd()}")
    return [(path, path.relative_to(root).as_posix()) for path in files]


def _pieces(path: Path, size: int) -> Iterator[tuple[int, bytes]]:
    """Offset and bytes of the pieces of at most `size` bytes, cut behind a line break or else between characters."""
    with path.open("rb") as file:
        offset, rest = 0, b""
        while block := rest + file.read(size - len(rest)):
            end = len(block) if len(block) < size else _cut(block)
            yield offset, block[:end]
            offset, rest = offset + end, block[end:]


def _cut(block: bytes) -> int:
    if end := block.rfind(b"\n") + 1:
        return end
    starts = (at for at in range(len(block) - 1, max(0, len(block) - 4), -1) if block[at] & 0xC0 != 0x80)
    return next(starts, len(block))  # before the last character, which may continue in the next block


def _text(path: Path, block: bytes, offset: int) -> str:
    hint = "text must be UTF-8; leave binary files out of the pattern"
    if (at := block.find(b"\0")) >= 0:
        raise DataError(f"{path} is not text: a zero byte at offset {offset + at}", hint=hint)
    try:
        return block.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not text: no UTF-8 at offset {offset + error.start}", hint=hint) from error


def _record(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:  # also of a line that is no UTF-8
        raise DataError(f"{where}: not JSON: {error}", hint="each line of a .jsonl file is one object") from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: not an object", hint='each line of a .jsonl file is like {"text": "..."}')
    return record


def _field(record: Mapping[str, Any], field: str, where: str) -> str:
    if field not in record:
        raise DataError(f"{where}: no field {field!r}", hint=f"data.field: {nearest(field, record)}")
    text = record[field]
    if not isinstance(text, str):
        raise DataError(
            f"{where}: field {field!r} is {type(text).__name__}, not text", hint="choose another data.field"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: half a surrogate pair in {field!r}", hint="repair the escape \\u....") from error
    return text


class StandardLibrary(Source):
    """The sources of Python's standard library, read in place: a corpus that every machine already has.

    Left out: installed packages, test suites (half of all bytes, in many distributions a package of their own, and
    thick with near-copies of one another), tables written by programs (codecs, the help topics), and what is
    particular to one build. Files that are not UTF-8 are skipped and counted.
    """

    folders = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
    generated = frozenset({"encodings", "pydoc_data"})
    """Folders of tables that programs have written."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.paths = sorted(self._found())
        if not self.paths:
            raise DataError(f"no source of the standard library under {root}", hint="give text files instead")

    def _found(self) -> Iterator[Path]:
        for folder, folders, files in os.walk(self.root):
            left_out = self.folders
            if folder == str(self.root):
                left_out = left_out | self.generated | {name for name in folders if name.startswith("config-")}
            folders[:] = [name for name in folders if name not in left_out]
            for name in files:
                if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                    yield Path(folder, name)

    def identity(self) -> list[Any]:
        return [STDLIB, *_listing(self.paths)]

    def documents(self) -> Iterator[Document]:
        self.skipped = 0
        for path in self.paths:
            try:
                text = _text(path, path.read_bytes(), 0)
            except DataError:
                self.skipped += 1
                continue
            if text:
                yield Document(key_of(path.relative_to(self.root).as_posix()), text)


class HuggingFace(Source):
    """A data set of the `datasets` library, `NAME[@CONFIG][:SPLIT]`; the split is `train` unless given."""

    def __init__(self, name: str, field: str) -> None:
        self.name, self.field = name, field
        path, _, split = name.partition(":")
        path, _, config = path.partition("@")
        self.rows = _load(path, config or None, split or "train")
        if field not in self.rows.column_names:
            raise DataError(
                f"hf:{name}: no field {field!r}", hint=f"data.field: {nearest(field, self.rows.column_names)}"
            )

    def identity(self) -> list[Any]:
        files = [Path(entry["filename"]) for entry in self.rows.cache_files]
        return [self.name, self.field, len(self.rows), *_listing(files)]

    def documents(self) -> Iterator[Document]:
        for number, row in enumerate(self.rows.select_columns([self.field])):
            if text := _field(row, self.field, f"hf:{self.name}, row {number}"):
                yield Document(key_of(text), text)

    def records(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for number, row in enumerate(self.rows):
            yield f"hf:{self.name}, row {number}", row


def _load(path: str, config: str | None, split: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError("hf: data sets need the `datasets` package", hint="pip install shoestring[hf]") from error
    try:
        return datasets.load_dataset(path, config, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"cannot load hf:{path}: {reason}", hint="check the name, the split and the network") from error
