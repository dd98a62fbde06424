"""Reads untrusted files, such as the files of a model's folder, a data set, a profile or a study.

Only regular files are opened, since reading a pipe would block and reading a device may never end. File sizes are
limited. Callers need to handle only two exceptions: malformed content (nesting beyond the parser's stack, numbers of a
million digits, text that is not UTF-8) raises ValueError, and a file that cannot be read raises OSError. The module
`fields` checks the parsed values.

A file of an untrusted folder is read only if it really lies in that folder (`within`). A link in the folder could point
to any file of the user. The content of that file would then be printed in an error, or copied to a place where others
can read it.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import tomllib
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from shoestring import figures
from shoestring.storage.guarded import open_regular, read_regular

CONFIG_LIMIT = 16 << 20
"""Maximum size of a configuration, chat template or weight index, in bytes; known files are below 1 MB."""
TOKENIZER_LIMIT = 256 << 20
"""Maximum size of a tokenizer file in bytes; known tokenizers have up to 35 MB."""
COMPANION_LIMIT = 256 << 20
"""Maximum size of a file that is copied together with a model's weights, in bytes."""
LINE_LIMIT = 64 << 20
"""Maximum length of a line of JSON or a record, in bytes."""
_BLOBS = "blobs"
"""Name of the folder to which the links in `snapshots/REVISION/` point, in Hugging Face's cache of a repository."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Escape control characters, which could change what a terminal shows; newlines and tabs stay."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """Replace newlines by spaces and escape control characters."""
    return printable(text.replace("\n", " "))


# -- files ------------------------------------------------------------------------------------------------------------


def open_file(path: Path, within: Path | None = None) -> BinaryIO:
    """Open a regular file for reading.

    Args:
        within: the untrusted folder that must contain the file; None allows any folder.

    Raises:
        OSError: the file cannot be opened or is not a regular file, or a link leads out of the folder.
    """
    if within is not None:
        check_within(path, within)
    return open_regular(path)


def check_within(path: Path, folder: Path) -> None:
    """Refuse a path whose links lead out of a folder; links to the same repository in Hugging Face's cache are allowed.

    Raises:
        OSError: a link leads out of the folder, or the file does not exist.
    """
    real, home = Path(os.path.realpath(path, strict=True)), folder.resolve()  # OSError if links form a cycle
    if not real.is_relative_to(home) and real.parent not in (home.parent / _BLOBS, home.parent.parent / _BLOBS):
        raise PermissionError(errno.EPERM, f"it is a link that leads out of `{folder}`", str(path))


def read_bytes(path: Path, limit: int = CONFIG_LIMIT, *, within: Path | None = None) -> bytes:
    """Read a regular file of at most `limit` bytes.

    Raises:
        OSError: the file cannot be read, is not a regular file, exceeds `limit` bytes, or lies outside the folder
            `within`.
    """
    if within is not None:
        check_within(path, within)
    return read_regular(path, limit)


def read_text(path: Path, limit: int = CONFIG_LIMIT, *, within: Path | None = None) -> str:
    """Read a UTF-8 file of at most `limit` bytes; a byte order mark is omitted.

    Raises:
        OSError: as for `read_bytes`.
        ValueError: the file is not UTF-8.
    """
    return read_bytes(path, limit, within=within).decode("utf-8-sig")


def read_lines(path: Path, limit: int = LINE_LIMIT) -> Iterator[bytes]:
    """Yield the lines of a file with their line ends; only one line is in memory at a time.

    Raises:
        OSError: the file cannot be read or is not a regular file.
        ValueError: a line is longer than `limit` bytes.
    """
    with open_regular(path) as file:
        yield from lines_of(file, limit)


def lines_of(file: BinaryIO, limit: int = LINE_LIMIT) -> Iterator[bytes]:
    """Yield the lines of an open file with their line ends; a line longer than `limit` bytes raises ValueError."""
    while line := file.readline(limit + 1):
        if len(line) > limit:
            raise ValueError(f"it is longer than {figures.size(limit)}")
        yield line


def read_gzip(path: Path, limit: int) -> bytes:
    """Read and decompress a .gz file that has at most `limit` bytes, both before and after decompression.

    Raises:
        OSError: the file cannot be read, is not a regular file, or exceeds `limit` bytes.
        ValueError: the file is not compressed by gzip, or is damaged.
    """
    data, parts, room = read_regular(path, limit), list[bytes](), limit
    while data:  # a file may consist of several members
        stream = zlib.decompressobj(wbits=31)
        try:
            parts.append(stream.decompress(data, room + 1))
        except zlib.error as error:
            raise ValueError(f"it is damaged: {error}") from error
        room -= len(parts[-1])
        if room < 0:
            raise OSError(errno.EFBIG, f"it holds more than {figures.size(limit)}", str(path))
        if not stream.eof:
            raise ValueError("it is cut short")
        data = stream.unused_data.lstrip(b"\0")
    return b"".join(parts)


def distinct(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the paths of distinct files; omits a path that leads, by a link, to the same file as an earlier path.

    Raises:
        OSError: a path does not exist.
    """
    known: set[tuple[int, int]] = set()
    for path in paths:
        status = path.stat()
        if (identity := (status.st_dev, status.st_ino)) not in known:
            known.add(identity)
            yield path


def copy_file(source: Path, target: Path, *, within: Path, limit: int = COMPANION_LIMIT) -> None:
    """Copy a file of the untrusted folder `within` to a place where others may read it.

    Raises:
        OSError: the file cannot be read, is not a regular file of that folder, or is larger than `limit` bytes.
    """
    with open_file(source, within) as file:
        if (size := file.seek(0, 2)) > limit:
            raise OSError(errno.EFBIG, f"it is too large: {figures.size(size)}", str(source))
        file.seek(0)
        with target.open("xb") as new:
            shutil.copyfileobj(file, new)


# -- formats ----------------------------------------------------------------------------------------------------------


def parse_json(text: str | bytes) -> Any:
    """Parse untrusted JSON.

    Raises:
        ValueError: the text is not JSON, not UTF-8, or nested deeper than the parser's stack.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_json(path: Path, limit: int = CONFIG_LIMIT, *, within: Path | None = None) -> Any:
    """Parse a JSON file of at most `limit` bytes.

    Raises:
        OSError, ValueError: as for `read_bytes` and `parse_json`.
    """
    return parse_json(read_bytes(path, limit, within=within))


def read_json_object(path: Path, limit: int = CONFIG_LIMIT, *, within: Path | None = None) -> dict[str, Any]:
    """Parse a JSON file that holds an object.

    Raises:
        OSError, ValueError: as for `read_json`, or the value is not an object.
    """
    value = read_json(path, limit, within=within)
    if not isinstance(value, dict):
        kinds = {list: "a list", str: "a string", bool: "true or false", type(None): "null"}
        raise ValueError(f"it holds {kinds.get(type(value), 'a number')}, not a JSON object")
    return value


def read_toml(path: Path, limit: int = CONFIG_LIMIT, *, within: Path | None = None) -> dict[str, Any]:
    """Parse a TOML file of at most `limit` bytes.

    Raises:
        OSError: as for `read_bytes`.
        ValueError: the file is not UTF-8, not TOML, or nested deeper than the parser's stack.
    """
    try:
        return tomllib.loads(read_text(path, limit, within=within))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def open_safetensors(path: Path, framework: str = "pt", *, within: Path | None = None) -> Any:
    """Open a safetensors file by `safetensors.safe_open` after checking that it is a regular file.

    Raises:
        OSError: the file cannot be opened, is not a regular file, or lies outside the folder `within`.
        SafetensorError: the file's header is damaged or does not match the file's size.
    """
    from safetensors import safe_open  # imported here: the command line reads run files without safetensors

    open_file(path, within).close()
    return safe_open(str(path), framework=framework)


def tensor_shapes(paths: Iterable[Path], *, within: Path | None = None) -> dict[str, tuple[int, ...]]:
    """Map the names of all tensors in safetensors files to their shapes, read from the files' headers.

    Raises:
        OSError, SafetensorError: as for `open_safetensors`.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for path in paths:
        with open_safetensors(path, within=within) as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return shapes
