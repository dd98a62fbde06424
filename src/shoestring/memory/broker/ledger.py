"""The folder with the records of a host's tenants: one file per tenant, locked while the tenant's process lives.

Locks are POSIX record locks: the kernel releases the locks of a killed process, a forked child inherits no locks, and
the kernel reports which process holds a lock. POSIX record locks have two pitfalls. A process does not see its own
locks, so the ledger remembers the records of its own process. Closing any descriptor of a file releases the process's
locks on that file, so no file is opened twice in one process.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from shoestring.core.errors import ShoestringError
from shoestring.memory.broker.records import LONGEST, TenantRecord
from shoestring.memory.broker.turns import Turns
from shoestring.storage.guarded import private_folder

_BELL, _TENANT = "bell", "tenant-"
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, process
_NAP = 0.0005  # seconds between two attempts to acquire the ledger's lock
_MOST_TENANTS = 1000
_EVERYBODYS = 0o1777  # permissions with the sticky bit: users cannot remove each other's files
_PAGE = os.sysconf("SC_PAGE_SIZE")
_STATM = Path("/proc/self/statm")
_ledgers: dict[Path, Ledger] = {}
_opening = threading.Lock()


@dataclass(frozen=True)
class Seen:
    """A living tenant of the host, as this process sees it."""

    key: str
    """File name of the tenant's record."""
    record: TenantRecord | None
    """The tenant's record; None if the file does not contain a valid record."""
    user: int
    process: int
    """Process ID in this process's PID namespace; 0 if the tenant has none there, such as in another container."""
    resident: int | None = None
    """Resident bytes of the tenant's process; None if they cannot be read."""


@dataclass
class _Open:
    """The open file of a tenant in another process."""

    descriptor: int
    user: int
    data: bytes = b""
    """Content of the file, from which `record` was parsed."""
    record: TenantRecord | None = None
    process: int = 0
    statm: int = -1
    """Descriptor of /proc/PID/statm of the tenant's process; -1 if it is not open."""

    def resident(self, process: int) -> int | None:
        """Resident bytes of the tenant's process; None if they cannot be read."""
        if process != self.process:  # the process ID may change if this process enters or leaves a PID namespace
            self.process = process
            self._close_statm()
            with suppress(OSError):
                self.statm = os.open(f"/proc/{process}/statm", os.O_RDONLY | os.O_CLOEXEC)
        with suppress(OSError, ValueError, IndexError):
            return int(os.pread(self.statm, 128, 0).split()[1]) * _PAGE
        return None

    def _close_statm(self) -> None:
        if self.statm >= 0:
            os.close(self.statm)
        self.statm = -1

    def close(self) -> None:
        self._close_statm()
        os.close(self.descriptor)


@dataclass(eq=False)
class Ledger:
    """All records in one folder. All tenants of this process share one ledger per folder; use `open_ledger` to open it.

    All methods but `rung` must be called inside a `locked` context.
    """

    folder: Path
    shared: bool
    """Whether the processes of all users share the folder."""
    users: int = 0
    """Number of tenants of this process that use the ledger."""
    turns: Turns | None = None
    """Orders large copies among processes; None while the ledger is closed."""
    _bell: int = -1
    """Descriptor of the file that is the ledger's lock and counts the calls of `ring`; -1 if the file is not open."""
    _own: dict[str, tuple[int, TenantRecord]] = field(default_factory=dict)
    """Descriptor and record of each tenant of this process, by key."""
    _others: dict[str, _Open] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def stands(self) -> bool:
        """Whether the ledger is open; a fork closes the ledger in the child."""
        return self._bell >= 0

    @contextmanager
    def locked(self, patience: float) -> Iterator[None]:
        """Lock the ledger against all other tenants of the host.

        Raises:
            TimeoutError: another tenant, whose process may be suspended, has held the lock for `patience` seconds.
        """
        until = time.monotonic() + patience
        if not self._lock.acquire(timeout=patience):
            raise TimeoutError(f"another thread has kept `{self.folder}` locked for {patience:g} s")
        try:
            while not _lock(self._bell):
                if time.monotonic() > until:
                    raise TimeoutError(f"another process has kept `{self.folder}` locked for {patience:g} s")
                time.sleep(_NAP)
            try:
                yield
            finally:
                fcntl.lockf(self._bell, fcntl.LOCK_UN)
        finally:
            self._lock.release()

    def rung(self) -> int:
        """Number of calls of `ring` by all tenants so far; may be called without the lock."""
        return int.from_bytes(os.pread(self._bell, 8, 0), "little")

    def ring(self) -> None:
        """Notify all tenants, so that they read the records again."""
        os.pwrite(self._bell, ((self.rung() + 1) % (1 << 64)).to_bytes(8, "little"), 0)

    def join(self, record: TenantRecord) -> str:
        """Add a tenant of this process, and return its key."""
        key = f"{_TENANT}{secrets.token_hex(8)}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self.folder / key, flags, 0o644 if self.shared else 0o600)
        if self.shared:
            # overrides the umask, because other users ignore a record that they cannot read
            os.fchmod(descriptor, 0o644)
        if not _lock(descriptor):
            os.close(descriptor)
            raise OSError(errno.ENOLCK, "the file system does not support locks", str(self.folder))
        self._own[key] = descriptor, record
        self.write(key, record)
        return key

    def write(self, key: str, record: TenantRecord) -> None:
        """Replace a tenant's record.

        Raises:
            OSError: the file cannot be written, or another program has removed it.
        """
        descriptor, _ = self._own[key]
        status = os.fstat(descriptor)
        if not status.st_nlink:
            raise FileNotFoundError(errno.ENOENT, "another program has removed the file", str(self.folder / key))
        data = record.encoded()
        if len(data) > LONGEST:
            raise OSError(errno.EFBIG, "a tenant holds too many leases", str(self.folder / key))
        os.pwrite(descriptor, data.ljust(status.st_size), 0)
        self._own[key] = descriptor, record

    def leave(self, key: str) -> None:
        """Remove a tenant of this process."""
        descriptor, _ = self._own.pop(key)
        with suppress(OSError):
            (self.folder / key).unlink()
        os.close(descriptor)

    def scan(self) -> list[Seen]:
        """List all living tenants, this process's tenants first, and remove the files of dead tenants."""
        process, user = os.getpid(), os.geteuid()
        alive = [Seen(key, record, user, process, resident()) for key, (_, record) in self._own.items()]
        with os.scandir(self.folder) as entries:
            names = sorted(
                entry.name for entry in entries if entry.name.startswith(_TENANT) and entry.name not in self._own
            )
        for name in self._others.keys() - names:
            self._others.pop(name).close()
        for name in names[:_MOST_TENANTS]:
            seen = self._seen(name)
            if seen is not None:
                alive.append(seen)
        return alive

    def _seen(self, name: str) -> Seen | None:
        """The tenant with this file; if the tenant's process has ended, remove the file and return None."""
        file = self._others.get(name) or self._opened(name)
        if file is None:
            return None
        holder = _holder(file.descriptor)
        if holder is None:  # the tenant's process has ended
            self._others.pop(name).close()
            # in a shared folder, only processes of a file's owner can remove the file
            with suppress(OSError):
                (self.folder / name).unlink()
            return None
        data = os.pread(file.descriptor, LONGEST + 1, 0)
        if data != file.data:
            file.data, file.record = data, None
            with suppress(ValueError):
                file.record = TenantRecord.decoded(data)
        return Seen(name, file.record, file.user, holder, file.resident(holder))

    def _opened(self, name: str) -> _Open | None:
        """Open the file of another tenant; None if the file is not a regular file or cannot be read."""
        path = self.folder / name
        with suppress(OSError):
            before = os.lstat(path)
            if not stat.S_ISREG(before.st_mode) or any(
                os.path.samestat(before, os.fstat(own)) for own in (self._bell, *(own for own, _ in self._own.values()))
            ):
                return None  # a hard link to a file that this process has locked: closing it would release the lock
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            self._others[name] = _Open(descriptor, os.fstat(descriptor).st_uid)
        return self._others.get(name)

    def start(self) -> None:
        """Open the file that tenants lock while they read and write records, and that counts calls of `ring`."""
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        path = self.folder / _BELL
        with suppress(FileExistsError):  # Linux refuses O_CREAT on another user's existing file (fs.protected_regular)
            made = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
            if self.shared:
                os.fchmod(made, 0o666)
            os.close(made)
        self._bell = os.open(path, flags)
        if not stat.S_ISREG(os.fstat(self._bell).st_mode):
            self.stop()
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        self.turns = Turns(self.folder, shared=self.shared)

    def stop(self) -> None:
        """Close all files; called in this process or in a child forked from it."""
        for file in self._others.values():
            file.close()
        for descriptor in (self._bell, *(own for own, _ in self._own.values())):
            with suppress(OSError):
                os.close(descriptor)
        if self.turns is not None:
            self.turns.close()
        self._bell, self._own, self._others, self.turns = -1, {}, {}, None


def resident() -> int:
    """Resident bytes of this process."""
    return int(_STATM.read_bytes().split()[1]) * _PAGE


def open_ledger(folder: Path, *, shared: bool) -> Ledger:
    """Open the ledger of a folder, or return the ledger already open; pair each call with a call of `close_ledger`.

    Args:
        folder: folder of the records; created if missing.
        shared: whether all users share the folder, which then has the sticky bit; otherwise only this user can access
            it.

    Raises:
        ShoestringError: the folder cannot be used.
    """
    with _opening:
        ledger = _ledgers.get(folder)
        if ledger is None:
            ledger = Ledger(folder, shared)
            try:
                if shared:
                    _make_shared_folder(folder)
                else:
                    private_folder(folder.parents[1], *folder.parts[-2:])
                ledger.start()
            except OSError as error:
                message = f"cannot keep records of host memory in `{folder}`: {error.strerror}"
                raise ShoestringError(message, hint="name a folder in memory with `memory.broker.folder`") from error
            _ledgers[folder] = ledger
        ledger.users += 1
        return ledger


def close_ledger(ledger: Ledger) -> None:
    """End one use of a ledger; the last call closes the ledger."""
    with _opening:
        ledger.users -= 1
        if not ledger.users:
            del _ledgers[ledger.folder]
            ledger.stop()


def _make_shared_folder(folder: Path) -> None:
    """Create a folder with the sticky bit, or check that an existing folder has the sticky bit."""
    made = False
    with suppress(FileExistsError):
        folder.mkdir(0o700)
        made = True
    try:
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            hint = "remove it, or name another folder with `memory.broker.folder`"
            raise ShoestringError(f"`{folder}` is a link or a file, not a folder", hint=hint) from error
        raise
    try:
        if made:
            os.fchmod(opened, _EVERYBODYS)  # overrides the umask
        mode = stat.S_IMODE(os.fstat(opened).st_mode)
    finally:
        os.close(opened)
    if mode != _EVERYBODYS:
        message = f"`{folder}` cannot be shared: its mode is {mode:o}, and not {_EVERYBODYS:o}"
        raise ShoestringError(message, hint="let the folder's owner set the mode, or set `memory.broker.folder`")


def _lock(descriptor: int) -> bool:
    """Lock a whole file for this process; False if another process holds a lock."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise
    return True


def _holder(descriptor: int) -> int | None:
    """ID of the process that holds a file's lock; 0 if it is in another PID namespace, None if there is no lock."""
    query = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, process = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, query))
    return None if kind == fcntl.F_UNLCK else max(process, 0)


def _close_in_child() -> None:
    """Close all ledgers in a forked child, because a child is not a tenant and does not inherit locks."""
    global _opening
    _opening = threading.Lock()
    for ledger in _ledgers.values():
        ledger.stop()
    _ledgers.clear()


os.register_at_fork(after_in_child=_close_in_child)
