"""Samples of a slow data set, kept on this host's disk and in memory that its ranks share.

Each level keeps what came first and gives up nothing: an epoch takes every sample once, in another order each time, so
of any set of samples that fits, each epoch finds all, and what is rarely used does not exist. What is kept has a
checksum; where it does not fit, the sample is fetched again.
"""

from __future__ import annotations

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
from shoestring.data.flattening import from_bytes, to_bytes
from shoestring.storage.guarded import private_folder

log = logging.getLogger("shoestring.data")

MEMORY = Path("/dev/shm")
THREADS = 4
"""That fetch ahead of the order."""
_MAGIC = b"shoestr1"
_HEAD = struct.Struct("<8sQQQ")  # magic, samples, bytes of room, bytes taken
_ENTRY = np.dtype([("offset", "<u8"), ("crc", "<u4"), ("length", "<u4")])
_FILE = struct.Struct("<II")  # checksum and length, before the bytes
_FORMAT = "2"
"""Of what is kept, on both levels: files of another one are other files."""
_FOLD = 256


class Slow(Protocol):
    """A data set that is worth a cache: any map-style one.

    With `fetch(index) -> bytes` and `decode(bytes) -> sample`, what was fetched lies on the disk as it came, and what
    was decoded in memory; else samples lie in both as they are.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def folded_crc32(raw: np.ndarray[Any, np.dtype[np.uint8]]) -> int:
    """A checksum at the pace of memory: the CRC of the 2 KB that all 2 KB add up to, and of what is left over.

    Any single change shows. Two hide each other only where one adds what the other takes off, at the same place of
    two such blocks.
    """
    whole = len(raw) // (8 * _FOLD) * 8 * _FOLD
    sums = raw[:whole].view(np.uint64).reshape(-1, _FOLD).sum(0, dtype=np.uint64)
    return zlib.crc32(raw[whole:].data, zlib.crc32(sums.data))


# -- levels ------------------------------------------------------------------------------------------------------------


class Shared:
    """Byte strings by number, in memory that all processes of this user on this host share.

    Its file stays while any process has it open, and goes with the last that closes it; what killed processes left is
    taken over by the next of the same data set, and removed by the next of another.
    """

    def __init__(self, name: str, samples: int, room: int, root: Path = MEMORY) -> None:
        folder = private_folder(root, f"shoestring-data-{os.geteuid()}")
        self.path = folder / f"{name}-{samples}-{room}"
        self._thread = threading.Lock()
        _remove_unused(folder, self.path)
        table = _HEAD.size + samples * _ENTRY.itemsize
        self.file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with self._alone():
            if os.fstat(self.file).st_size != table + room or self._given_back_and_left():
                os.ftruncate(self.file, 0)
                os.ftruncate(self.file, table + room)
                os.pwrite(self.file, _HEAD.pack(_MAGIC, samples, room, 0), 0)
        fcntl.flock(self.file, fcntl.LOCK_SH)
        self.memory = mmap.mmap(self.file, table + room)
        self.table, self.room = table, room
        self.entries = np.frombuffer(self.memory, _ENTRY, samples, _HEAD.size)
        self.bytes = np.frombuffer(self.memory, np.uint8)

    def _given_back_and_left(self) -> bool:
        """Whether there is no room any more, and nobody has the file open for whom that must stay so."""
        with suppress(OSError):
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return not _HEAD.unpack(os.pread(self.file, _HEAD.size, 0))[2]
        return False

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Among threads by a lock of theirs, among processes by one of the file's bytes."""
        with self._thread:
            fcntl.lockf(self.file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self.file, fcntl.LOCK_UN)

    def __contains__(self, number: int) -> bool:
        return bool(self.entries["length"][number])

    def get(self, number: int) -> memoryview | None:
        """A copy of what was put, so that a sample may be changed in place; None if nothing was, or if it changed."""
        offset, crc, length = self.entries[number].item()
        if not length:
            return None
        begin = self.table + offset
        raw = self.bytes[begin : begin + length].copy()
        if folded_crc32(raw) == crc:
            return raw.data
        self.entries["length"][number] = 0
        return None

    def put(self, number: int, raw: bytes) -> bool:
        """Keep it, if there is room; whether it was kept."""
        with self._alone():
            if number in self:
                return True
            magic, samples, room, taken = _HEAD.unpack_from(self.memory)
            if taken + len(raw) > room or not raw:
                return False
            _HEAD.pack_into(self.memory, 0, magic, samples, room, taken + len(raw))
        begin = self.table + taken
        self.memory[begin : begin + len(raw)] = raw
        self.entries["offset"][number] = taken
        self.entries["crc"][number] = folded_crc32(np.frombuffer(raw, np.uint8))
        self.entries["length"][number] = len(raw)  # last: from now on it is read
        return True

    def give_back(self) -> None:
        """Free the memory, and keep nothing from now on, in all processes that share it; what is gone reads as zeros,
        which no checksum matches."""
        with self._alone():
            magic, samples, _, _ = _HEAD.unpack_from(self.memory)
            _HEAD.pack_into(self.memory, 0, magic, samples, 0, 0)
            self.entries["length"] = 0
            begin = self.table + -self.table % mmap.PAGESIZE
            if begin < len(self.memory):
                self.memory.madvise(mmap.MADV_REMOVE, begin)

    def close(self) -> None:
        with suppress(OSError):
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody else has it open
            self.path.unlink()
        del self.entries, self.bytes
        with suppress(BufferError):
            self.memory.close()
        os.close(self.file)


def _remove_unused(folder: Path, but: Path) -> None:
    for path in folder.iterdir():
        if path != but:
            with suppress(OSError):
                file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
                finally:
                    os.close(file)


class OnDisk:
    """Byte strings by number, a file each, in a folder that processes of this host share; it stays."""

    def __init__(self, folder: Path, room: int) -> None:
        self.folder, self.room = folder, room
        self.full, self.damaged = False, 0
        folder.mkdir(parents=True, exist_ok=True)
        self._thread = threading.Lock()
        self._count = os.open(folder / "bytes", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with self._counting() as taken:
            if not taken:
                self._recount()

    @contextmanager
    def _counting(self) -> Iterator[int]:
        with self._thread:
            fcntl.lockf(self._count, fcntl.LOCK_EX)
            try:
                yield int.from_bytes(os.pread(self._count, 8, 0), "little")
            finally:
                fcntl.lockf(self._count, fcntl.LOCK_UN)

    def _recount(self) -> int:
        """Bytes of what lies there: files that were damaged had other sizes."""
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
        """What was put; None if nothing was, or if it changed since, and then it is removed."""
        try:
            raw = self.path(number).read_bytes()
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
        """Keep it, if there is room; whether it was kept. It is not synced: the checksum tells."""
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
        os.close(self._count)


# -- the data set ------------------------------------------------------------------------------------------------------


@dataclass
class Origins:
    """How many of this process' samples came from where."""

    memory: int = 0
    disk: int = 0
    fetched: int = 0
    ahead: int = 0
    """Of the fetched ones, before they were asked for."""


@dataclass(eq=False)
class Cached(Dataset[Any]):
    """A data set whose samples are kept in memory, on disk, or both; workers and ranks of a host share what is kept.

    Args:
        dataset: the slow one.
        memory: bytes of shared memory for samples. disk: bytes on disk.
        folder: on disk; needed for `disk`.
        fingerprint: tells this data set from others; by default its own `fingerprint`, or its type and length.
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
        self.shared = Shared(key, len(self.dataset), self.memory) if self.memory else None
        self.shelf = OnDisk(Path(self.folder or ".") / key, self.disk) if self.disk else None
        self._pool: ThreadPoolExecutor | None = None
        self._wanted: set[int] = set()
        self._lock = threading.Lock()
        self._fetching: dict[int, threading.Event] = {}
        self._process = os.getpid()

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        if self._process != os.getpid():  # a worker by fork, whose locks may be held by threads that it does not have
            self._open()
        if self.shared is not None and (raw := self.shared.get(index)) is not None:
            self.counts.memory += 1
            return from_bytes(raw)
        return self._fill(index)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [self[index] for index in indices]

    def _fill(self, index: int) -> Any:
        """Get a sample from the disk or the data set, and keep it; by one thread of a process at a time."""
        with self._lock:
            busy = self._fetching.get(index)
            if busy is None:
                self._fetching[index] = threading.Event()
        if busy is not None:
            busy.wait()
            return self[index] if self._kept(index) else self._get(index)
        try:
            return self._get(index)
        finally:
            with self._lock:
                self._fetching.pop(index).set()

    def _kept(self, index: int) -> bool:
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
        """Fetch these, which are asked for soon, on threads; what is kept already, and what waits already, is not."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(THREADS, "shoestring-data")
        if self.shared is not None:
            indices = np.array(indices)[self.shared.entries["length"][[*indices]] == 0].tolist()
        for index in indices:
            if index not in self._wanted and not self._kept(index):
                self._wanted.add(index)
                self._pool.submit(self._fetch_ahead, index)

    def _fetch_ahead(self, index: int) -> None:
        try:
            if not self._kept(index):
                self._fill(index)
                self.counts.ahead += 1
        except Exception as error:  # whoever asks for the sample gets it
            log.debug("sample %d could not be fetched ahead: %s", index, error)
        finally:
            self._wanted.discard(index)

    def close(self) -> None:
        """Give the memory back, once no process of the host uses it; what is on disk stays."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        for level in (self.shared, self.shelf):
            if level is not None:
                level.close()

    def __getstate__(self) -> dict[str, Any]:
        kept = ("dataset", "memory", "disk", "folder", "fingerprint")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, counts=Origins())
        self._open()
