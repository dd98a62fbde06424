"""Reads untrusted text files as streams: decompresses .gz, .bz2, .xz and .zst, and omits a byte order mark.

A few compressed bytes may expand to gigabytes. So the decompressed size is limited in proportion to the file's size,
and only a few megabytes are in memory at a time. As in the module `foreign`, a file that cannot be read raises OSError,
and malformed content raises ValueError.
"""

from __future__ import annotations

import bz2
import codecs
import errno
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from shoestring import figures
from shoestring.storage.guarded import open_regular

SMALLEST, GROWTH = 256 << 20, 300
"""The decompressed size of a file is limited to the larger of `SMALLEST` bytes and `GROWTH` times the compressed
size."""
_WINDOW = 128 << 20
"""Maximum memory of a decompressor in bytes; zstd needs this much for its longest window."""
_BLOCK = 1 << 20


class _Compression(NamedTuple):
    """A compression format, and how to decompress it in small blocks."""

    name: str
    new: Callable[[], Any]
    """Creates a decompressor for one member of a file, with the interface of `bz2.BZ2Decompressor`."""
    piece: int
    """Number of compressed bytes that are given to the decompressor at a time."""
    bounded: bool
    """Whether the decompressor can limit the size of its output. A decompressor without a limit gets a small `piece`,
    so that its output stays small."""


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise ValueError("it needs the `zstandard` package: pip install shoestring[zstd]") from error
    return zstandard.ZstdDecompressor(max_window_size=_WINDOW).decompressobj()


COMPRESSIONS = {
    ".gz": _Compression("gzip", lambda: zlib.decompressobj(wbits=31), 1 << 14, bounded=False),
    ".bz2": _Compression("bzip2", bz2.BZ2Decompressor, 1 << 16, bounded=True),
    ".xz": _Compression("xz", lambda: lzma.LZMADecompressor(memlimit=_WINDOW), 1 << 16, bounded=True),
    ".zst": _Compression("zstd", _zstandard, 1 << 10, bounded=False),
}
"""Maps the suffix of a file's name, in lower case, to its compression."""


class _NoText(NamedTuple):
    """A file format that is not plain text: its name, advice to the user, and its suffix if this module can decompress
    it."""

    name: str
    advice: str
    suffix: str = ""


_MAGIC = {
    b"\x1f\x8b": _NoText("compressed by gzip", "end its name in .gz", ".gz"),
    b"BZh": _NoText("compressed by bzip2", "end its name in .bz2", ".bz2"),
    b"\xfd7zXZ\0": _NoText("compressed by xz", "end its name in .xz", ".xz"),
    b"\x28\xb5\x2f\xfd": _NoText("compressed by zstd", "end its name in .zst", ".zst"),
    b"PK\x03\x04": _NoText("a ZIP archive", "unpack it first"),
    b"PAR1": _NoText("a Parquet file", "end its name in .parquet"),
    b"ARROW1": _NoText("an Arrow file", "write it as Parquet"),
    b"FEA1": _NoText("an Arrow file", "write it as Parquet"),
}
"""Maps the first bytes of files that are not plain text to their format."""


def compression_of(path: Path) -> str:
    """Recognise a file's compression by its first bytes; returns a suffix in `COMPRESSIONS`, or "" for any other file.

    Raises:
        OSError: the file cannot be read or is not a regular file.
    """
    with open_regular(path) as file:
        head = file.read(8)
    return next((kind.suffix for magic, kind in _MAGIC.items() if kind.suffix and head.startswith(magic)), "")


def open_text(path: Path, suffix: str | None = None) -> BinaryIO:
    """Open a text file for reading as bytes, decompressed according to its suffix and without a UTF-8 byte order mark.

    Args:
        suffix: suffix that selects the compression; None means the path's suffix.

    Raises:
        OSError: the file cannot be opened or is not a regular file. Reading from the stream raises OSError if the
            decompressed content exceeds the limit.
        ValueError: the file is not plain text in UTF-8. Reading from the stream raises ValueError if the file is
            damaged.
    """
    file = open_regular(path)
    try:
        if compression := COMPRESSIONS.get(path.suffix.lower() if suffix is None else suffix):
            limit = max(SMALLEST, GROWTH * file.seek(0, 2))
            file.seek(0)
            file = cast(BinaryIO, io.BufferedReader(_Expanded(file, compression, limit, path), _BLOCK))
        head = cast(io.BufferedReader, file).peek(8)[:8]
        if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)):
            raise ValueError("it is UTF-16 or UTF-32; save it as UTF-8")
        if kind := next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), None):
            raise ValueError(f"it is {kind.name}; {kind.advice}")
        if head.startswith(codecs.BOM_UTF8):
            file.read(len(codecs.BOM_UTF8))
    except BaseException:
        file.close()
        raise
    return file


class _Expanded(io.RawIOBase):
    """A stream of the decompressed content of a file; closing the stream closes the file."""

    def __init__(self, file: BinaryIO, compression: _Compression, limit: int, path: Path) -> None:
        self._file, self._path, self._limit, self._room = file, path, limit, limit
        self._blocks = _expand(file, compression)
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._room -= len(block)
            if self._room < 0:
                raise OSError(errno.EFBIG, f"it expands to more than {figures.size(self._limit)}", str(self._path))
            self._rest = memoryview(block)
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _expand(file: BinaryIO, compression: _Compression) -> Iterator[bytes]:
    """Yield the decompressed content of a file in blocks; the file may consist of several compressed members."""
    decoder, data = None, b""
    while data := data or file.read(compression.piece):
        decoder = decoder or compression.new()
        yield _decompress(decoder, data, compression)
        while compression.bounded and not decoder.eof and not decoder.needs_input:
            yield _decompress(decoder, b"", compression)
        data = b""
        if decoder.eof:
            decoder, data = None, decoder.unused_data.lstrip(b"\0")
    if decoder is not None:
        raise ValueError(f"it is cut short: its last {compression.name} member is incomplete")


def _decompress(decoder: Any, data: bytes, compression: _Compression) -> bytes:
    try:
        return decoder.decompress(data, _BLOCK) if compression.bounded else decoder.decompress(data)
    except Exception as error:  # may be OSError, zlib.error, LZMAError or ZstdError
        if isinstance(error, MemoryError):
            raise
        raise ValueError(f"it is not compressed by {compression.name}, or damaged: {error}") from error
