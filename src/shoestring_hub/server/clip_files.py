"""Stores converted clips and their posters, each in its project's folder and named by its SHA-256.

A file is stored whole, unlike the files of runs, so that parts of it can be read and a proxy can send it. Projects
share no files, as they share no chunks. A file to which no clip refers is removed after a day.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from django.conf import settings

from shoestring.storage import foreign
from shoestring.storage.whole import make_folder, sync_folder
from shoestring_hub.server.chunks import UNUSED_FOR
from shoestring_hub.server.models import HubClip

BLOCK = 1 << 20


def path_of(project: int, digest: str) -> Path:
    """The path of a video or poster of a project, whether or not it exists."""
    return settings.HUB.clips / str(project) / digest[:2] / digest


def put(project: int, source: Path, within: Path, tick: Callable[[], None]) -> str:
    """Move a finished file to its place, and return its digest.

    Args:
        within: folder of the sandbox that has written the file. A malicious clip may have made ffmpeg put a link there,
            to a file of the hub.
        tick: called before each block that is read, so that the caller can keep a lease.

    Raises:
        OSError: the disk is full or has failed, or the file is a link; nothing is stored.
    """
    if source.is_symlink():
        raise OSError(errno.ELOOP, "ffmpeg has left a link in place of a file", str(source))
    foreign.check_within(source, within)
    digest = hashlib.sha256()
    for block in read_blocks(source):
        tick()
        digest.update(block)
    target = path_of(project, digest.hexdigest())
    sync_folder(source)
    make_folder(target.parent)
    os.utime(source)  # a file that nothing refers to yet stays for a day
    source.replace(target)
    sync_folder(target.parent)
    return digest.hexdigest()


def read_blocks(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file, without reading all of it into memory."""
    with foreign.open_file(path) as file:
        while block := file.read(BLOCK):
            yield block


def remove_unused(now: float | None = None) -> int:
    """Remove files to which no clip refers, and folders of workers that were killed, if they are older than a day.

    Returns:
        The number of files and folders.
    """
    removed, limit = 0, (time.time() if now is None else now) - UNUSED_FOR
    for folder in settings.HUB.clips.glob("*/"):
        clips = HubClip.objects.filter(project=int(folder.name))
        named = {digest for pair in clips.values_list("video", "poster") for digest in pair}
        for path in folder.glob("*/*"):
            with suppress(OSError):
                if path.name not in named and path.stat().st_mtime < limit:
                    path.unlink()
                    removed += 1
    for folder in settings.HUB.work.glob("*/"):
        if folder.stat().st_mtime < limit:
            shutil.rmtree(folder, ignore_errors=True)
            removed += 1
    return removed
