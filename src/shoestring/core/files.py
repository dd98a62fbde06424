"""Writing files so that a crash leaves all of one or nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def write_atomic(path: Path, data: bytes | Iterable[bytes | memoryview]) -> None:
    """Put `data`, or its pieces in a row, at `path`: write aside, flush, fsync, rename, fsync the folder.

    An exception leaves nothing behind.
    """
    aside = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("wb") as file:
            file.writelines([data] if isinstance(data, bytes) else data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
        sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            aside.unlink()
        raise


def sync_folder(folder: Path) -> None:
    """Make the folder's entries (a rename, say) durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
