"""The bytes of files: chunks, each in the folder of its project and named by its SHA-256.

A project has chunks of its own even if another project has the same bytes, so that "already there" says nothing of
other projects. A chunk is written whole or not at all, so whichever exists is complete. Chunks that no file names are
removed once they have been unused for a day: until then a push may still name them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from django.conf import settings

from shoestring.storage import foreign
from shoestring.storage.whole import write_atomic
from shoestring_hub.protocol import CHUNK
from shoestring_hub.server.models import File

UNUSED_FOR = 24 * 3600.0
"""Seconds after which a chunk that no file names is removed."""


def path_of(project: int, digest: str) -> Path:
    """Where a chunk of a project lies, or would lie."""
    return settings.HUB.chunks / str(project) / digest[:2] / digest


def put(project: int, digest: str, data: bytes) -> None:
    """Store a chunk whose digest the caller has computed; nothing happens if it is there.

    Raises:
        OSError: the disk is full or has failed; nothing is stored.
    """
    if not touch(project, digest):
        write_atomic(path_of(project, digest), data)


def touch(project: int, digest: str) -> bool:
    """Whether a project has a chunk, which then counts as used now."""
    with suppress(FileNotFoundError):
        os.utime(path_of(project, digest))
        return True
    return False


def read(project: int, digest: str) -> bytes:
    """The bytes of a chunk.

    Raises:
        OSError: the chunk is missing or cannot be read.
    """
    return foreign.read_bytes(path_of(project, digest), CHUNK)


def stream(project: int, digests: Iterable[str]) -> Iterator[bytes]:
    """Yield the bytes of a file, chunk by chunk."""
    return (read(project, digest) for digest in digests)


def remove_unused(now: float | None = None) -> int:
    """Remove the chunks that no file names and that nobody has sent or asked for within a day; returns their number."""
    removed, limit = 0, (time.time() if now is None else now) - UNUSED_FOR
    for folder in settings.HUB.chunks.glob("*/"):
        named: set[str] = set()
        for chunks in File.objects.filter(run__project=int(folder.name)).values_list("chunks", flat=True).iterator():
            named.update(chunks)
        for path in folder.glob("*/*"):
            with suppress(OSError):
                if path.name not in named and path.stat().st_mtime < limit:
                    path.unlink()
                    removed += 1
    return removed
