"""Sources of documents and records: files, Python's standard library, data sets of Hugging Face."""

from __future__ import annotations

import glob
import hashlib
import os
import re
import stat
import sysconfig
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoestring.core.errors import DataError, nearest, nearest_path
from shoestring.data import parquet
from shoestring.data.chat_formats import columns_of, format_of
from shoestring.data.record_files import PlacedRecord, kind_of, read_records, readable
from shoestring.storage import foreign
from shoestring.storage.compressed import open_text

STDLIB = "python-stdlib"
_MANY_FILES = 32
"""Minimum number of text files for which each file is one document. With fewer files, large files are cut into
documents whose size in bytes lies between `_SMALLEST_PART` and `_LARGEST_PART`."""
_SMALLEST_PART, _LARGEST_PART = 1 << 12, 1 << 16
_PROSE = (".txt", ".text", "")
"""Suffixes of text files whose content is not expected to be JSON."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text that is either trained on or held out as a whole."""

    key: int
    """64-bit hash of the document's name or text; decides whether the document is held out."""
    text: str


class Source(ABC):
    """A source of documents in a fixed order; the documents can be read repeatedly and are never all in memory."""

    skipped: int = 0
    """Number of files that the latest call of `documents()` left out."""

    @abstractmethod
    def identity(self) -> list[Any]:
        """A JSON value that changes if the documents may have changed, such as a list of files with sizes and times."""

    @abstractmethod
    def documents(self) -> Iterator[Document]:
        """Iterate over the documents that are not empty."""

    def records(self, field: str = "") -> Iterator[PlacedRecord]:
        """Iterate over the records of the source, such as chats; `field` is the setting `data.field`. Raises DataError
        for a source of plain text."""
        raise DataError(f"{type(self).__name__} is a source of text", hint="give .jsonl or .parquet files with records")


def open_source(source: str, field: str) -> Source:
    """Open the source that `source` names: `python-stdlib`, `hf:NAME[@CONFIG][:SPLIT]`, or comma-separated paths and
    globs.

    Raises:
        DataError: there is no such source.
    """
    if source == STDLIB:
        return StandardLibrary(Path(sysconfig.get_path("stdlib")))
    if source.startswith("hf:"):
        return HuggingFace(source.removeprefix("hf:"), field)
    return TextFiles(source, field)


def is_mnist(source: str) -> bool:
    """Whether a source is a folder that contains one of MNIST's files."""
    return any(Path(source).glob("*-idx?-ubyte*")) if ":" not in source else False


def key_of(name: str) -> int:
    """64-bit hash of `name`, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(os.fsencode(name), digest_size=8).digest(), "little")


def _listing(paths: list[Path]) -> list[Any]:
    """Path, size and modification time of each file."""
    return [[str(path), stat.st_size, stat.st_mtime_ns] for path in paths for stat in [path.stat()]]


class TextFiles(Source):
    """A source of text files and of files of records: JSON lines, JSON, CSV, TSV or Parquet; all except Parquet may be
    compressed.

    Each record of a file is a document. If there are many text files, each is one document, which is read in chunks to
    limit memory. If there are few text files, large files are cut at line breaks into several documents, so that some
    of the text can be held out. The hash of a record's text, or of a file's path from the first wildcard on, decides
    whether a document is held out.
    """

    def __init__(self, source: str, field: str) -> None:
        pairs = [pair for pattern in source.split(",") for pair in _matches(pattern.strip())]
        named = dict(sorted(pairs, key=lambda pair: pair[1]))
        # A file with two names would be trained on twice, or held out under one name and trained on under the other.
        self.paths = {path: named[path] for path in foreign.distinct(named)}
        self.field = field

    def identity(self) -> list[Any]:
        return [self.field, *_listing(list(self.paths))]

    def documents(self) -> Iterator[Document]:
        for path, name in self.paths.items():
            if kind_of(path):
                for record in read_records(path, [self.field]):
                    if text := _field(record.values, self.field, record.where):
                        yield Document(key_of(text), text)
            else:
                yield from self._parts(path, name)

    def _parts(self, path: Path, name: str) -> Iterator[Document]:
        many = len(self.paths) >= _MANY_FILES
        size = _LARGEST_PART
        if not many:
            size = min(max(path.stat().st_size // 64, _SMALLEST_PART), _LARGEST_PART)
        for number, (offset, block) in enumerate(_pieces(path, size)):
            text = _text(path, block, offset)
            if number == 0 and path.suffix.lower() in _PROSE and (suffix := _suffix_of_records(text)):
                hint = f"end its name in {suffix}; otherwise quotes and braces would be learnt as text"
                raise DataError(f"{path}:1: it looks like records of JSON in a file of text", hint=hint)
            yield Document(key_of(name if many else f"{name}#{number}"), text)

    @property
    def holds_records(self) -> bool:
        """Whether all file names have a suffix of record files, such as .jsonl."""
        return all(map(kind_of, self.paths))

    def records(self, field: str = "") -> Iterator[PlacedRecord]:
        for path in self.paths:
            if not kind_of(path):
                _, beginning = next(_pieces(path, _LARGEST_PART), (0, b""))
                suffix = _suffix_of_records(beginning.decode(errors="replace"))
                hint = f"it looks like records of JSON: end its name in {suffix}"
                if not suffix:
                    hint = "records are in .jsonl, .ndjson, .json, .csv, .tsv and .parquet files, and in data sets"
                raise DataError(f"{path} does not have the suffix of a file of records", hint=hint)
            yield from read_records(path, columns_of(field))


def _suffix_of_records(text: str) -> str:
    """The suffix that a file should have, judged by its first lines: a suffix of records if they look like records,
    otherwise empty."""
    lines = [line for line in text.splitlines() if line.strip()][:2]
    cut = len(lines) == 1 and re.match(r"\s*\{\s*\"[^\"]*\"\s*:", text)  # a line longer than the text that was read
    try:
        if cut or (lines and all(isinstance(foreign.parse_json(line), dict) for line in lines)):
            return ".jsonl"
    except ValueError:  # a line that is not JSON
        pass
    return ".json" if re.match(r"\s*\[\s*\{\s*\"", text) else ""


def _matches(pattern: str) -> list[tuple[Path, str]]:
    """The files that match `pattern`, each with its path relative to the folder before the pattern's first wildcard."""
    if Path(pattern).is_dir():
        raise DataError(f"{pattern} is a folder", hint=f'give a pattern of files, such as "{pattern}/**/*.txt"')
    if Path(pattern).is_file():
        return [(Path(pattern), Path(pattern).name)]
    if Path(pattern).exists():
        raise DataError(f"{pattern} is a pipe or a device, not a file", hint="name a pipe as a separate source")
    literal = re.split(r"[*?\[]", pattern)[0]
    if literal == pattern:
        close = nearest(pattern, [STDLIB])
        hint = close if close.startswith("did") else f'give files, a glob, "{STDLIB}" or "hf:NAME"'
        if there := nearest_path(Path(pattern)):
            hint = f"did you mean `{there}`?"
        raise DataError(f"no file {pattern!r}", hint=hint)
    root = Path(literal if literal.endswith("/") else Path(literal).parent)
    files = [path for path in map(Path, sorted(_glob(pattern))) if path.is_file()]
    if not files:
        raise DataError(f"no file matches {pattern!r}", hint=f"the working folder is {Path.cwd()}")
    return [(path, path.relative_to(root).as_posix()) for path in files]


def _glob(pattern: str) -> Iterator[str]:
    """Like `glob.glob` with `recursive`, but `**` enters each folder only once, because links may form cycles."""
    before, wildcard, after = (
        re.split(r"((?:^|(?<=/))\*\*(?:/|$))", pattern, maxsplit=1) if "**" in pattern else (pattern, "", "")
    )
    if not wildcard:
        yield from glob.glob(pattern)  # noqa: PTH207
        return
    visited: set[tuple[int, int]] = set()
    waiting = deque(glob.glob(before) if before else [""])  # noqa: PTH207
    while waiting:
        folder = waiting.popleft()
        with suppress(OSError):  # a folder without permission, or removed meanwhile
            status = os.stat(folder or ".")  # noqa: PTH116
            if (status.st_dev, status.st_ino) in visited:
                continue
            visited.add((status.st_dev, status.st_ino))
            entries = sorted(os.scandir(folder or "."), key=lambda entry: (entry.is_symlink(), entry.name))
            inside = [os.path.join(folder, entry.name) for entry in entries if not entry.name.startswith(".")]  # noqa: PTH118
            waiting.extend(path for path in inside if os.path.isdir(path))  # noqa: PTH112
            prefix = glob.escape(os.path.join(folder, ""))  # noqa: PTH118
            yield from _glob(f"{prefix}{after}") if after else inside


def _pieces(path: Path, size: int) -> Iterator[tuple[int, bytes]]:
    """Iterate over a file in chunks of at most `size` bytes, cut after a line break or between characters; each comes
    with its offset."""
    with readable(path), open_text(path) as file:
        offset, rest = 0, b""
        while block := rest + file.read(size - len(rest)):
            end = len(block) if len(block) < size else block.rfind(b"\n") + 1
            if not end:  # no line break: cut before the last character, which may be incomplete
                # Bytes 10xxxxxx continue a UTF-8 character, which has at most four.
                starts = (at for at in range(len(block) - 1, max(0, len(block) - 4), -1) if block[at] & 0xC0 != 0x80)
                end = next(starts, len(block))
            yield offset, block[:end]
            offset, rest = offset + end, block[end:]


def _text(path: Path, block: bytes, offset: int) -> str:
    hint = "text must be UTF-8; leave binary files out of the pattern"
    if (at := block.find(b"\0")) >= 0:
        raise DataError(f"{path} is not text: a zero byte at offset {offset + at}", hint=hint)
    try:
        return block.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not text: invalid UTF-8 at offset {offset + error.start}", hint=hint) from error


def _field(record: Mapping[str, Any], field: str, where: str) -> str:
    if field not in record:
        hint = f"data.field: {nearest(field, record)}"
        if format_of(record) not in ("", "text"):
            hint = 'these are chats: set data.form = "chat"'
        raise DataError(f"{where}: no field {field!r}", hint=hint)
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
    """The source files of Python's standard library, read in place: a corpus that every machine already has.

    Installed packages, test suites, generated tables (codecs, help topics) and files that are specific to one build are
    left out. Test suites are half of all bytes, full of near-duplicates, and a separate package in many distributions.
    Files that are not UTF-8 are skipped and counted.
    """

    folders = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
    generated = frozenset({"encodings", "pydoc_data"})
    """Names of folders with generated tables."""

    def __init__(self, root: Path) -> None:
        self.root = root
        paths = []
        for folder, folders, files in os.walk(root):
            left_out = self.folders
            if folder == str(root):
                left_out = left_out | self.generated | {name for name in folders if name.startswith("config-")}
            folders[:] = [name for name in folders if name not in left_out]  # `os.walk` enters only these
            python = (name for name in files if name.endswith(".py") and not name.startswith("_sysconfigdata"))
            paths += [Path(folder, name) for name in python]
        self.paths = sorted(paths)
        if not self.paths:
            raise DataError(f"no source of the standard library under {root}", hint="give text files instead")

    def identity(self) -> list[Any]:
        return [STDLIB, *_listing(self.paths)]

    def documents(self) -> Iterator[Document]:
        self.skipped = 0
        for path in self.paths:
            try:
                text = _text(path, foreign.read_bytes(path), 0)
            except DataError:
                self.skipped += 1
                continue
            if text:
                yield Document(key_of(path.relative_to(self.root).as_posix()), text)


class HuggingFace(Source):
    """A data set of the `datasets` library, `NAME[@CONFIG][:SPLIT]`; the split defaults to `train`."""

    def __init__(self, name: str, field: str) -> None:
        self.name, self.field = name, field
        path, config, split = _parts_of(name)
        datasets = _datasets()
        _check_local(path)
        try:
            self.rows = datasets.load_dataset(path, config, split=split)  # own file: checked above
        except Exception as error:  # `datasets`, pyarrow and other readers have no common base class of errors
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            hint = "check the name, the split and the network"
            raise DataError(f"cannot load hf:{path}: {reason}", hint=hint) from error
        if field and "=" not in field and field not in self.rows.column_names:
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

    def records(self, field: str = "") -> Iterator[PlacedRecord]:
        names = [name for name in self.rows.column_names if name in columns_of(field)]
        if not names:
            hint = f"data.field: the columns are {', '.join(self.rows.column_names)}"
            raise DataError(f"hf:{self.name}: no column of a known format of chats", hint=hint)
        for number, row in enumerate(self.rows.select_columns(names)):
            yield PlacedRecord(f"hf:{self.name}, row {number}", row, self.name)


def _parts_of(name: str) -> tuple[str, str | None, str]:
    """Split the text after `hf:` into the folder or name of the data set, the configuration (None if not given) and the
    split."""
    path, _, split = name.partition(":")
    path, _, config = path.partition("@")
    return path, config or None, split or "train"


def look_at_huggingface(name: str) -> None:
    """Check without loading a data set that the package `datasets` is installed and, if the data set is a folder, that
    its files are valid.

    Raises:
        DataError: `datasets` is not installed, or as for `_check_local`.
    """
    _datasets()
    _check_local(_parts_of(name)[0])


def local_size(name: str) -> int | None:
    """Size in bytes of a data set that is a local folder; None for a data set on the hub."""
    folder = Path(_parts_of(name)[0])
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else None


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError("hf: data sets need the `datasets` package", hint="pip install shoestring[hf]") from error
    return datasets


def _check_local(name: str) -> None:
    """Check the files of a data set that is a local folder, before `datasets` reads them.

    Raises:
        DataError: a file is not a regular file, or a .parquet file decodes to far more than its size.
    """
    for folder, _, files in os.walk(name):
        for path in (Path(folder, file) for file in files):
            with suppress(FileNotFoundError):  # a dangling link
                if not stat.S_ISREG(path.stat().st_mode):
                    raise DataError(f"`{path}` is not a regular file", hint="remove it from the data set")
                if path.suffix == ".parquet":
                    parquet.check(path)
