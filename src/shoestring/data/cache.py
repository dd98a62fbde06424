"""A cache of the samples of a slow data set: on this host's disk, and in memory shared by this host's ranks.

Neither level evicts samples. Every epoch uses each sample once, in another order, so any set of cached samples is hit
equally often, and no eviction policy is better than keeping the first samples that fit. Entries have a checksum; if it
does not match, the sample is fetched again from the data set.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import mmap
import os
import struct
import threading
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch.utils.data import Dataset

from shoestring.core.errors import DataError
from shoestring.data.cache_on_disk import OnDisk
from shoestring.data.flattening import from_bytes, to_bytes
from shoestring.storage.guarded import private_folder

log = logging.getLogger("shoestring.data")

MEMORY = Path("/dev/shm")
THREADS = 4
"""Number of threads that fetch samples ahead of their use."""
_MAGIC = b"shoestr1"
_HEAD = struct.Struct("<8sQQQ")  # magic, number of samples, capacity in bytes, bytes used
_ENTRY = np.dtype([("offset", "<u8"), ("crc", "<u4"), ("length", "<u4")])
_FORMAT = "2"
"""Format version of the stored entries in memory and on disk; it is part of the cache's name, so another version uses
other files."""
_FOLD = 256
"""Number of 64-bit words in a block (2 KB); `folded_crc32` computes the sum of all blocks."""
_SPARE = 256 << 20
"""Number of bytes that the cache leaves free in /dev/shm, for the batches of worker processes and for checkpoints; at
most a quarter of /dev/shm is left free."""


class Slow(Protocol):
    """A slow data set whose samples are cached: any map-style data set.

    If the data set has `fetch(index) -> bytes` and `decode(bytes) -> sample`, the disk cache holds the raw bytes and
    the memory cache the decoded samples; otherwise both caches hold samples.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def folded_crc32(raw: np.ndarray[Any, np.dtype[np.uint8]]) -> int:
    """A checksum that is computed at memory bandwidth: the CRC of the sum of all 2 KB blocks and of the remainder.

    The checksum detects any single change. Two changes cancel only if they are at the same offset in two blocks and one
    adds exactly the value that the other subtracts.
    """
    whole = len(raw) // (8 * _FOLD) * 8 * _FOLD
    sums = raw[:whole].view(np.uint64).reshape(-1, _FOLD).sum(0, dtype=np.uint64)
    return zlib.crc32(raw[whole:].data, zlib.crc32(sums.data))


# -- levels ------------------------------------------------------------------------------------------------------------


class Shared:
    """A cache that maps numbers to byte strings, in memory that all processes of this user on this host share.

    The memory is a file that exists while any process has it open; the last process to close it removes it. A file that
    killed processes left behind is reused by the next run on the same data set, or removed by the next run on another
    data set. The table of entries is memory-mapped, after its memory has been reserved. Samples are read and written by
    system calls instead: if the file system is full, a system call fails, whereas access through a mapping would end
    the process with SIGBUS.

    Raises:
        OSError: there is no room for the table.
    """

    def __init__(self, name: str, samples: int, room: int, root: Path = MEMORY) -> None:
        folder = private_folder(root, f"shoestring-data-{os.geteuid()}")
        self.path = folder / f"{name}-{samples}-{room}"
        self._thread = threading.Lock()
        # Remove the files of other caches that no process has open any more: a process holds a shared lock on its
        # file.
        for path in folder.iterdir():
            if path != self.path:
                with suppress(OSError):
                    file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        path.unlink()
                    finally:
                        os.close(file)
        table = _HEAD.size + samples * _ENTRY.itemsize
        self.file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with self._alone():
                if os.fstat(self.file).st_size != table + room or self._freed_and_unused():
                    os.ftruncate(self.file, 0)
                    os.ftruncate(self.file, table + room)
                    os.pwrite(self.file, _HEAD.pack(_MAGIC, samples, room, 0), 0)
                os.posix_fallocate(self.file, 0, table)
        except OSError:
            self.path.unlink(missing_ok=True)
            os.close(self.file)
            raise
        fcntl.flock(self.file, fcntl.LOCK_SH)
        self.memory = mmap.mmap(self.file, table + room)
        self.table, self.room = table, room
        self.entries = np.frombuffer(self.memory, _ENTRY, samples, _HEAD.size)
        self.bytes = np.frombuffer(self.memory, np.uint8)

    def _freed_and_unused(self) -> bool:
        """Whether `give_back` has freed the memory and no other process has the file open any more."""
        with suppress(OSError):
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return not _HEAD.unpack(os.pread(self.file, _HEAD.size, 0))[2]
        return False

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Context that holds the lock on the file. A POSIX lock excludes only other processes, so a second lock
        excludes other threads."""
        with self._thread:
            fcntl.lockf(self.file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self.file, fcntl.LOCK_UN)

    def __contains__(self, number: int) -> bool:
        return bool(self.entries["length"][number])

    def get(self, number: int) -> memoryview | None:
        """A copy of an entry, so that the sample may be changed in place; None if the entry is absent or damaged."""
        offset, crc, length = self.entries[number].item()
        if not length:
            return None
        raw = np.empty(length, np.uint8)
        if os.preadv(self.file, [raw.data], self.table + offset) == length and folded_crc32(raw) == crc:
            return raw.data
        self.entries["length"][number] = 0
        return None

    def put(self, number: int, raw: bytes) -> bool:
        """Store an entry if there is room; returns whether the entry is now stored."""
        with self._alone():
            if number in self:
                return True
            magic, samples, room, taken = _HEAD.unpack_from(self.memory)
            if taken + len(raw) > room or not raw:
                return False
            _HEAD.pack_into(self.memory, 0, magic, samples, room, taken + len(raw))
        view, begin = memoryview(raw), self.table + taken
        try:
            space = os.fstatvfs(self.file)
            if space.f_bavail * space.f_frsize < len(raw) + min(space.f_blocks * space.f_frsize // 4, _SPARE):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            while view and (done := os.pwrite(self.file, view, begin)):
                view, begin = view[done:], begin + done
        except OSError as error:  # the file system is full, so the cache stores no more entries
            with self._alone():
                magic, samples, room, taken = _HEAD.unpack_from(self.memory)
                _HEAD.pack_into(self.memory, 0, magic, samples, min(room, taken), taken)
            if room > taken:
                _warn_of_less_room(error, taken, self.room)
        if view:
            return False
        self.entries["offset"][number] = taken
        self.entries["crc"][number] = folded_crc32(np.frombuffer(raw, np.uint8))
        # The length is written last, because readers regard an entry with a length as complete.
        self.entries["length"][number] = len(raw)
        return True

    def give_back(self) -> None:
        """Free the memory and stop storing entries, in all processes that share the cache.

        Freed pages read as zeros, which no checksum matches, so a concurrent `get` is safe.
        """
        with self._alone():
            magic, samples, _, _ = _HEAD.unpack_from(self.memory)
            _HEAD.pack_into(self.memory, 0, magic, samples, 0, 0)
            self.entries["length"] = 0
            begin = self.table + -self.table % mmap.PAGESIZE
            if begin < len(self.memory):
                self.memory.madvise(mmap.MADV_REMOVE, begin)

    def close(self) -> None:
        """Unmap the file, and remove the file if this is the last process that has it open."""
        with suppress(OSError):
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # succeeds only if no other process has the file open
            self.path.unlink()
        del self.entries, self.bytes
        with suppress(BufferError):
            self.memory.close()
        os.close(self.file)


def _warn_of_less_room(error: OSError, stored: int, room: int) -> None:
    """Warn that /dev/shm has less room than `data.cache_memory` allows the cache."""
    reason, mib = error.strerror, 1 << 20
    log.warning("`%s`: %s: data.cache_memory keeps %d of %d MiB", MEMORY, reason, stored // mib, room // mib)


# -- the data set ------------------------------------------------------------------------------------------------------


@dataclass
class Origins:
    """Counts how many samples this process got from memory, from disk, and from the data set itself (`fetched`)."""

    memory: int = 0
    disk: int = 0
    fetched: int = 0
    ahead: int = 0
    """Number of samples that were fetched before they were requested; `fetched` includes them."""


@dataclass(eq=False)
class Cached(Dataset[Any]):
    """A data set with its samples cached in memory, on disk, or both, shared by the workers and ranks of a host.

    Args:
        dataset: the slow data set.
        memory: bytes of shared memory for samples. disk: bytes on disk.
        folder: folder of the cache on disk; required for `disk`.
        fingerprint: identifies the data set; defaults to the data set's own `fingerprint`, or to its type and length.
    """

    dataset: Any
    memory: int = 0
    disk: int = 0
    folder: Path | None = None
    fingerprint: str = ""
    counts: Origins = field(default_factory=Origins)

    def __post_init__(self) -> None:
        own = str(getattr(self.dataset, "fingerprint", "")) or f"{type(self.dataset).__qualname__}-{len(self.dataset)}"
        self.fingerprint = self.fingerprint or own
        if self.disk and self.folder is None:
            raise DataError("a cache on disk needs a folder")
        self._open()

    def _open(self) -> None:
        key = hashlib.blake2b(f"{_FORMAT}:{self.fingerprint}".encode(), digest_size=12).hexdigest()
        self.shared = None
        if self.memory:
            try:
                self.shared = Shared(key, len(self.dataset), self.memory)
            except OSError as error:
                _warn_of_less_room(error, 0, self.memory)
        self.shelf = OnDisk(Path(self.folder or ".") / key, self.disk) if self.disk else None
        self._pool: ThreadPoolExecutor | None = None
        self._wanted: set[int] = set()
        self._lock = threading.Lock()
        self._fetching: dict[int, threading.Event] = {}
        self._process = os.getpid()

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        if self._process != os.getpid():  # in a forked worker, threads of the parent process may still hold the locks
            self._open()
        if self.shared is not None and (raw := self.shared.get(index)) is not None:
            self.counts.memory += 1
            return from_bytes(raw)
        return self._fill(index)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [self[index] for index in indices]

    def _fill(self, index: int) -> Any:
        """Get a sample from the disk or the data set and cache it, or wait if another thread is already getting it."""
        with self._lock:
            busy = self._fetching.get(index)
            if busy is None:
                self._fetching[index] = threading.Event()
        if busy is not None:
            busy.wait()
            return self[index] if self._is_cached(index) else self._get(index)
        try:
            return self._get(index)
        finally:
            with self._lock:
                self._fetching.pop(index).set()

    def _is_cached(self, index: int) -> bool:
        return (self.shared is not None and index in self.shared) or (self.shelf is not None and index in self.shelf)

    def _get(self, index: int) -> Any:
        fetch = getattr(self.dataset, "fetch", None)
        raw = self.shelf.get(index) if self.shelf is not None else None
        self.counts.disk += raw is not None
        self.counts.fetched += raw is None
        fetched = raw
        if fetch is not None:
            fetched = raw if raw is not None else fetch(index)
            sample = self.dataset.decode(fetched)
        else:
            sample = from_bytes(bytearray(raw)) if raw is not None else self.dataset[index]
        if self.shelf is not None and raw is None:
            self.shelf.put(index, fetched if fetched is not None else to_bytes(sample))
        if self.shared is not None and index not in self.shared:
            self.shared.put(index, to_bytes(sample))
        return sample

    def ahead(self, indices: Sequence[int]) -> None:
        """Fetch samples that are needed soon, on background threads; samples that are already cached or queued are
        skipped."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(THREADS, "shoestring-data")
        if self.shared is not None:
            indices = np.array(indices)[self.shared.entries["length"][[*indices]] == 0].tolist()

        def fetch(index: int) -> None:
            try:
                if not self._is_cached(index):
                    self._fill(index)
                    self.counts.ahead += 1
            except Exception as error:  # raised again when the sample is used
                log.debug("sample %d could not be fetched ahead: %s", index, error)
            finally:
                self._wanted.discard(index)

        for index in indices:
            if index not in self._wanted and not self._is_cached(index):
                self._wanted.add(index)
                self._pool.submit(fetch, index)

    def close(self) -> None:
        """Close the cache: the memory is freed when the last process on the host closes it; the disk cache remains."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        for level in (self.shared, self.shelf):
            if level is not None:
                level.close()

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("dataset", "memory", "disk", "folder", "fingerprint")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, counts=Origins())
        self._open()
