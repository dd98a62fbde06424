"""The disk level of the sample cache, on this host; it persists after the run."""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shoestring.storage.guarded import open_regular, read_regular

log = logging.getLogger("shoestring.data")

_FILE = struct.Struct("<II")  # checksum and length, stored before an entry's bytes


class OnDisk:
    """A cache that maps numbers to byte strings, in one file each, in a folder that processes of this host share."""

    def __init__(self, folder: Path, room: int) -> None:
        self.folder, self.room = folder, room
        self.full, self.damaged = False, 0
        folder.mkdir(parents=True, exist_ok=True)
        self._thread = threading.Lock()
        self._file = open_regular(folder / "bytes", write=True)
        self._count = self._file.fileno()
        with self._counting() as taken:
            if not taken:
                self._recount()

    @contextmanager
    def _counting(self) -> Iterator[int]:
        """Context that holds the lock on the number of bytes used, which all processes share; yields this number."""
        with self._thread:
            fcntl.lockf(self._count, fcntl.LOCK_EX)
            try:
                yield int.from_bytes(os.pread(self._count, 8, 0), "little")
            finally:
                fcntl.lockf(self._count, fcntl.LOCK_UN)

    def _recount(self) -> int:
        """Count the bytes of all files again, because a damaged file may have another size than when it was written."""
        taken = 0
        for path in self.folder.glob("*/*"):
            with suppress(OSError):
                taken += path.stat().st_size
        os.pwrite(self._count, taken.to_bytes(8, "little"), 0)
        return taken

    def _add(self, nbytes: int) -> None:
        taken = int.from_bytes(os.pread(self._count, 8, 0), "little")
        os.pwrite(self._count, max(taken + nbytes, 0).to_bytes(8, "little"), 0)

    def path(self, number: int) -> Path:
        return self.folder / f"{number % 256:02x}" / str(number)

    def __contains__(self, number: int) -> bool:
        return self.path(number).exists()

    def get(self, number: int) -> bytes | None:
        """Read an entry; None if it is absent or damaged. A damaged entry is removed."""
        try:
            raw = read_regular(self.path(number), max(self.room, _FILE.size))
        except OSError:
            return None
        if len(raw) >= _FILE.size:
            crc, length = _FILE.unpack_from(raw)
            content = raw[_FILE.size :]
            if length == len(content) and crc == zlib.crc32(content):
                return content
        log.log(logging.DEBUG if self.damaged else logging.WARNING, "`%s` is damaged: fetched again", self.path(number))
        self.damaged += 1
        with suppress(OSError), self._counting():
            self.path(number).unlink()
            self._add(-len(raw))
            self.full = False
        return None

    def put(self, number: int, raw: bytes) -> bool:
        """Store an entry if there is room; returns whether the entry is now stored. No fsync is needed, because the
        checksum detects torn writes."""
        if self.full:
            return False
        size = _FILE.size + len(raw)
        with self._counting() as taken:
            if taken + size > self.room and self._recount() + size > self.room:
                self.full = True
                return False
            self._add(size)
        path = self.path(number)
        aside = path.with_name(f".{path.name}-{os.getpid()}-{threading.get_ident()}")
        try:
            path.parent.mkdir(exist_ok=True)
            aside.write_bytes(_FILE.pack(zlib.crc32(raw), len(raw)) + raw)
            aside.rename(path)
        except OSError as error:  # a full disk
            log.warning("the cache of samples stops growing: %s", error)
            self.full = True
            aside.unlink(missing_ok=True)
            with self._counting():
                self._add(-size)
            return False
        return True

    def close(self) -> None:
        self._file.close()
