"""Stores the bytes of files as chunks, each in its project's folder and named by its SHA-256.

Projects never share chunks, even if the bytes are equal, so that the answer "already there" reveals nothing about other
projects. A chunk is written completely or not at all, so every chunk that exists is complete. A chunk to which
no file and no clip refers is removed after a day without use; until then, a push may still refer to it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from django.conf import settings

from shoestring.storage import foreign
from shoestring.storage.whole import write_atomic
from shoestring_hub.protocol import CHUNK
from shoestring_hub.server.models import File, HubClip

UNUSED_FOR = 24 * 3600.0
"""Seconds without use after which a chunk to which nothing refers is removed."""


def path_of(project: int, digest: str) -> Path:
    """The path of a chunk of a project, whether or not the chunk exists."""
    return settings.HUB.chunks / str(project) / digest[:2] / digest


def put(project: int, digest: str, data: bytes) -> None:
    """Store a chunk whose digest the caller has computed; does nothing if the project already has the chunk.

    Raises:
        OSError: the disk is full or has failed; nothing is stored.
    """
    if not touch(project, digest):
        write_atomic(path_of(project, digest), data)


def touch(project: int, digest: str) -> bool:
    """Whether a project has a chunk; if so, mark the chunk as used now."""
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


def add_up(project: int, digests: Sequence[str], size: int) -> bool:
    """Whether chunks, all of which exist, make up a file of this size; only the last one may be shorter."""
    sizes = [path_of(project, digest).stat().st_size for digest in digests]
    return sum(sizes) == size and all(one == CHUNK for one in sizes[:-1])


def stream(project: int, digests: Iterable[str]) -> Iterator[bytes]:
    """Yield the bytes of a file, chunk by chunk."""
    return (read(project, digest) for digest in digests)


def remove_unused(now: float | None = None) -> int:
    """Remove chunks to which nothing refers and that were not sent or requested within a day; returns their number."""
    removed, limit = 0, (time.time() if now is None else now) - UNUSED_FOR
    for folder in settings.HUB.chunks.glob("*/"):
        named: set[str] = set()
        project = int(folder.name)
        for rows in (File.objects.filter(run__project=project), HubClip.objects.filter(project=project)):
            for chunks in rows.values_list("chunks", flat=True).iterator():
                named.update(chunks)
        for path in folder.glob("*/*"):
            with suppress(OSError):
                if path.name not in named and path.stat().st_mtime < limit:
                    path.unlink()
                    removed += 1
    return removed
