"""Writing files so that a crash leaves all of one or nothing."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def write_atomic(path: Path, data: bytes) -> None:
    """Put `data` at `path`: write aside, flush, fsync, rename, fsync the folder. An exception leaves nothing behind."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("wb") as file:
            file.write(data)
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
