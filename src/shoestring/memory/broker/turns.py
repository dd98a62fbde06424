"""Turns at copying much: what is less urgent waits while another process of the host copies what is more urgent.

Whoever copies holds a shared lock on the byte of its priority in a file of the ledger's folder. So a look at who copies
is one call of the system, and a process that is killed has let go at once.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoestring.core.leases import Priority

_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, process
_NAP = 0.001  # seconds between two looks


class Turns:
    """The file of one folder, for all tenants of this process: locks of a file end when any descriptor is closed."""

    def __init__(self, folder: Path, *, shared: bool) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.open(folder / "turns", flags, 0o600)
        if shared and os.fstat(self._file).st_uid == os.geteuid():
            os.fchmod(self._file, 0o666)
        self._own: Counter[Priority] = Counter()  # a process does not see its own locks
        self._lock = threading.Lock()

    @contextmanager
    def turn(self, priority: Priority, patience: float) -> Iterator[None]:
        """See `HostMemory.turn`."""
        until = time.monotonic() + patience
        while self.yields(priority) and time.monotonic() < until:
            time.sleep(_NAP)
        self._count(priority, 1)
        try:
            yield
        finally:
            self._count(priority, -1)

    def yields(self, priority: Priority) -> bool:
        """Whether somebody copies what is more urgent."""
        if any(self._own[each] for each in Priority if each < priority):
            return True
        if not priority or self._file < 0:
            return False
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, int(priority), 0)
        return _FLOCK.unpack(fcntl.fcntl(self._file, fcntl.F_GETLK, asked))[0] != fcntl.F_UNLCK

    def _count(self, priority: Priority, change: int) -> None:
        with self._lock:
            self._own[priority] += change
            if self._file >= 0 and self._own[priority] == max(change, 0):  # the first begins, or the last has ended
                kind = fcntl.LOCK_SH | fcntl.LOCK_NB if change > 0 else fcntl.LOCK_UN
                fcntl.lockf(self._file, kind, 1, int(priority))

    def close(self) -> None:
        """Close the file, in this process or in a child that was forked."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
