"""Copies sources that can be read only once (pipes and the standard input) into the run folder; the run reads the copy,
also after a resume.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from shoestring.core.errors import DataError
from shoestring.data.record_files import kind_of
from shoestring.storage.compressed import COMPRESSIONS, compression_of, open_text

log = logging.getLogger("shoestring.data")

STANDARD_INPUT = "-"
_DESCRIPTORS = re.compile(r"/dev/(stdin|fd/\d+)|/proc/self/fd/\d+")
_RECORDS = re.compile(r'\s*(\[\s*)?\{\s*"')


def is_piped(source: str) -> bool:
    """Whether a source is a pipe, or a file descriptor of this process such as /dev/stdin."""
    return source == STANDARD_INPUT or bool(_DESCRIPTORS.fullmatch(source)) or Path(source).is_fifo()


def spool(source: str, folder: Path) -> str:
    """Copy a piped source into a folder, unless the copy exists already; returns the path of the copy. Any other source
    is returned unchanged.

    The copy has the same suffixes as the pipe's name (such as `chats.csv.gz`). If the name has no suffix, the copy's
    suffix is chosen by content: .json for records, .txt for text.

    Raises:
        DataError: the source cannot be read, or is a terminal.
    """
    if not is_piped(source):
        return source
    name = f"piped-{hashlib.blake2b(source.encode(), digest_size=4).hexdigest()}"
    if copy := next(iter(sorted(folder.glob(f"{name}.*"))), None):
        log.info("data: %s is what %s gave when it was first read", copy, source)
        return str(copy)
    log.info("data: reading %s to its end", "the standard input" if source == STANDARD_INPUT else source)
    folder.mkdir(parents=True, exist_ok=True)
    origin, hint = "/dev/stdin" if source == STANDARD_INPUT else source, "pipe data into it, or name a file"
    try:
        descriptor = os.open(origin, os.O_RDONLY | os.O_CLOEXEC)  # own file: a pipe that the user names
    except OSError as error:
        raise DataError(f"cannot read {origin}: {error.strerror}", hint=hint) from error
    part = folder / f".{name}-{secrets.token_hex(4)}"
    try:
        with os.fdopen(descriptor, "rb") as stream, part.open("xb") as file:
            if stream.isatty():
                raise DataError(f"{origin} is a terminal", hint=hint)
            shutil.copyfileobj(stream, file)
        pipe = Path(source)
        if kind_of(pipe) or pipe.suffix.lower() in COMPRESSIONS:
            suffixes = "".join(pipe.suffixes[-2:])
        else:
            compressed, head = compression_of(part), b""
            with suppress(OSError, ValueError), open_text(part, compressed) as file:
                head = file.read(1 << 12)
            suffixes = (".json" if _RECORDS.match(head.decode("utf-8", "replace")) else ".txt") + compressed
        copy = folder / f"{name}{suffixes}"
        part.replace(copy)
    finally:
        part.unlink(missing_ok=True)
    return str(copy)
