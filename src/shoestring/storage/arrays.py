"""Reads and writes .npz files of named arrays, without pickled objects; the array `head` holds a table as JSON."""

from __future__ import annotations

import io
import json
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from shoestring.core.errors import DataError
from shoestring.storage.foreign import parse_json, printable, read_bytes

Read = TypeVar("Read")

LARGEST_FILE = 256 << 20
"""Maximum size of a file in bytes; larger files are refused."""
_LARGEST_ARRAYS = 512 << 20
"""Maximum total size of the numeric arrays in a file, in bytes, counting 8 bytes for each number."""
_LARGEST_TEXT = 64 << 20
"""Maximum total size of the uint8 arrays in a file, which hold text, in bytes."""
_MOST_ARRAYS = 1000
_HEADER = re.compile(
    rb"\{'descr': '([<>|]?[biuf][1248])', 'fortran_order': (False|True),"
    rb" 'shape': \((\d{0,12}|\d{1,12}, ?\d{0,12}),?\), ?\} *\n?"
)
"""Matches the header that numpy writes for a numeric array with at most two dimensions:
https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html"""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_DAMAGED = (
    *(OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, EOFError),
    *(zipfile.BadZipFile, zlib.error, struct.error, NotImplementedError, RuntimeError),
)
"""Exceptions that zipfile, numpy and `Format.make` raise for damaged files; zipfile raises RuntimeError for
encrypted files."""


class Format(NamedTuple, Generic[Read]):
    """A file format: its name, its version, and the function that builds an object from a file's content."""

    what: str
    """Name of such a file in error messages: a noun with its article."""
    name: str
    version: int
    make: Callable[[dict[str, Any], Mapping[str, np.ndarray]], Read]
    """Builds the object from the table and the arrays; may raise errors such as KeyError or TypeError if entries are
    missing or have a wrong type."""

    def content(self, table: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bytes:
        """Return the bytes of a file with this table and these arrays."""
        head = json.dumps({"format": self.name, "version": self.version, **table})
        room = io.BytesIO()
        np.savez_compressed(room, **arrays, head=text(head))  # pyrefly: ignore[bad-argument-type]
        return room.getvalue()

    def load(self, path: Path) -> Read:
        """Read the object in a file.

        Raises:
            DataError: the file is missing, damaged, of another format, or written by a newer version of shoestring.
        """
        try:
            return self.read(read_bytes(path, LARGEST_FILE), str(path))
        except FileNotFoundError as error:
            raise DataError(f"there is no {self.what.partition(' ')[2]} {path}") from error
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror or error}") from error

    def read(self, content: bytes, path: str) -> Read:
        """Read the object in the bytes of a file.

        Args:
            path: name of the file in error messages.

        Raises:
            DataError: the file is damaged, of another format, too large, or written by a newer version of shoestring.
        """
        try:
            arrays = _unpacked(content)
            table = read_json(arrays["head"])
            if table["format"] != self.name:
                raise DataError(f"{path} is not {self.what} of shoestring")
            if not isinstance(table["version"], int) or table["version"] > self.version:
                raise DataError(f"{path} was written by a newer version of shoestring", hint="update shoestring")
            return self.make(table, arrays)
        except _DAMAGED as error:
            reason = str(error) or type(error).__name__
            raise DataError(f"{path} is not {self.what}, or damaged: {printable(reason[:200])}") from error


def text(content: str) -> np.ndarray:
    """Encode a string as UTF-8 in an array of bytes."""
    return np.frombuffer(content.encode(errors="replace"), np.uint8)


def read_json(array: np.ndarray) -> Any:
    """Parse the JSON text in an array of bytes; lone surrogates, which cannot be written as UTF-8, are replaced.

    Raises:
        ValueError: the text is not JSON, not UTF-8, or nested too deeply.
    """
    content = array.tobytes().decode()
    value = parse_json(content)
    return _whole(value) if _SURROGATE.search(content) else value


def _whole(value: Any) -> Any:
    """Replace the lone surrogates in all strings of a JSON value."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [_whole(entry) for entry in value]
    return {_whole(key): _whole(entry) for key, entry in value.items()} if isinstance(value, dict) else value


def integers(array: np.ndarray) -> NDArray[np.int64]:
    """Convert an array of integers or booleans to int64.

    Raises:
        ValueError: the array has another data type.
    """
    if array.dtype.kind not in "iub":
        raise ValueError(f"a column of whole numbers has the data type {array.dtype}")
    return array.astype(np.int64)


def _unpacked(content: bytes) -> dict[str, np.ndarray]:
    """Decompress the arrays of a file, after checking the headers of all arrays for sizes beyond the limits.

    Raises:
        ValueError: two arrays have the same name, an entry is not a numeric array, or there are too many arrays or
            bytes.
    """
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = archive.infolist()
        names = [entry.filename.removesuffix(".npy") for entry in entries]
        if len(set(names)) < len(names) or len(names) > _MOST_ARRAYS:
            raise ValueError("it has too many arrays, or two arrays with the same name")
        shapes = {}
        for name, entry in zip(names, entries, strict=True):
            with archive.open(entry) as file:
                shapes[name] = _shape(file, entry.file_size)
        sizes = {
            kind: sum(
                math.prod(shape) for dtype, shape, _ in shapes.values() if (dtype == np.uint8) == (kind == "text")
            )
            for kind in ("text", "numbers")
        }
        if sizes["text"] > _LARGEST_TEXT or sizes["numbers"] * 8 > _LARGEST_ARRAYS:
            raise ValueError("its arrays exceed the maximum size")
        arrays = {}
        for name, entry in zip(names, entries, strict=True):
            dtype, shape, start = shapes[name]
            data = archive.read(entry)  # zipfile reads at most the size that was checked
            arrays[name] = np.frombuffer(data, dtype, offset=start, count=math.prod(shape)).reshape(shape)
        return arrays


def _shape(file: IO[bytes], size: int) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    """Read an array's header: its data type, its shape, and the offset of its numbers in the ZIP entry, in bytes.

    Raises:
        ValueError: numpy does not write such a header for a numeric array, or the header does not match the entry's
            size.
    """
    version = np.lib.format.read_magic(file)
    width = 2 if version == (1, 0) else 4
    length = int.from_bytes(file.read(width), "little")
    header = _HEADER.fullmatch(file.read(min(length, 1 << 12)))
    if header is None:
        raise ValueError("an array is not numeric")
    dtype, shape = np.dtype(header[1].decode()), tuple(int(part) for part in header[3].split(b",") if part.strip())
    start = np.lib.format.MAGIC_LEN + width + length
    if start + math.prod(shape) * dtype.itemsize != size or (header[2] == b"True" and len(shape) > 1):
        raise ValueError("the size of an array differs from the size in its header")
    return dtype, shape, start
