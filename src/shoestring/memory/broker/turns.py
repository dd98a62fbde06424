"""Orders large copies: a less urgent copy waits while another process of the host makes a more urgent copy.

While a process copies, it holds a shared lock on one byte of a file in the ledger's folder; the byte's offset is the
copy's priority. One system call detects whether a more urgent copy is running, and the kernel releases the locks of a
killed process.
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
_NAP = 0.001  # seconds between two checks of the locks


class Turns:
    """The lock file of a folder, opened once for all tenants of this process.

    The file must not be opened twice: closing any descriptor of a file releases all POSIX locks of the process on it.
    """

    def __init__(self, folder: Path, *, shared: bool) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.open(folder / "turns", flags, 0o600)
        if shared and os.fstat(self._file).st_uid == os.geteuid():
            os.fchmod(self._file, 0o666)
        self._own: Counter[Priority] = Counter()  # needed because a process does not see its own locks
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
        """Whether a more urgent copy is running, in this process or in another process."""
        if any(self._own[urgent] for urgent in Priority if urgent < priority):
            return True
        if not priority or self._file < 0:
            return False
        query = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, int(priority), 0)  # any lock on a byte before `priority`
        return _FLOCK.unpack(fcntl.fcntl(self._file, fcntl.F_GETLK, query))[0] != fcntl.F_UNLCK

    def _count(self, priority: Priority, change: int) -> None:
        """Count this process's running copies by priority, and hold a priority's lock while its count is positive."""
        with self._lock:
            self._own[priority] += change
            if self._file >= 0 and self._own[priority] == max(
                change, 0
            ):  # the first copy has begun, or no copy is left
                kind = fcntl.LOCK_SH | fcntl.LOCK_NB if change > 0 else fcntl.LOCK_UN
                fcntl.lockf(self._file, kind, 1, int(priority))

    def close(self) -> None:
        """Close the file; called in this process or in a child forked from it."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
