"""The folder in which the tenants of a host keep their records, one file each, locked as long as its process lives.

Locks are POSIX record locks: a process that is killed has none, a child that it forked never had any, and the kernel
says whose a lock is. They have two traps. A process sees none of its own, so records of this process are kept here. And
closing any descriptor of a file ends the process's locks on it, so no file is opened twice in one process.
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
_NAP = 0.0005  # seconds between two tries to get the ledger's lock
_MOST_TENANTS = 1000
_EVERYBODYS = 0o1777  # with the sticky bit, nobody removes another user's file
_PAGE = os.sysconf("SC_PAGE_SIZE")
_STATM = Path("/proc/self/statm")
_ledgers: dict[Path, Ledger] = {}
_opening = threading.Lock()


@dataclass(frozen=True)
class Seen:
    """A tenant that lives."""

    key: str
    record: TenantRecord | None
    """None where its file holds something else."""
    user: int
    process: int
    """Its process's number as this process sees it; 0 where it does not, from inside of a container."""
    resident: int | None = None
    """Bytes that its process has in memory; None where that cannot be seen."""


@dataclass
class _Open:
    """A file of another process's tenant."""

    descriptor: int
    user: int
    data: bytes = b""
    record: TenantRecord | None = None
    process: int = 0
    statm: int = -1
    """Descriptor of what the system says of its process's memory."""

    def resident(self, process: int) -> int | None:
        """Bytes that its process has in memory."""
        if process != self.process:  # that of a container which this process has joined since, or left
            self.process = process
            self._open_statm()
        with suppress(OSError, ValueError, IndexError):
            return int(os.pread(self.statm, 128, 0).split()[1]) * _PAGE
        return None

    def _open_statm(self) -> None:
        self._close_statm()
        with suppress(OSError):
            self.statm = os.open(f"/proc/{self.process}/statm", os.O_RDONLY | os.O_CLOEXEC)

    def _close_statm(self) -> None:
        if self.statm >= 0:
            os.close(self.statm)
        self.statm = -1

    def close(self) -> None:
        self._close_statm()
        os.close(self.descriptor)


@dataclass(eq=False)
class Ledger:
    """All records of one folder, for all tenants of this process; `open_ledger` makes it.

    Everything but `rung` is called inside of `locked`.
    """

    folder: Path
    shared: bool
    users: int = 0
    """Tenants of this process that use it."""
    turns: Turns | None = None
    """Of what is copied, while it is open."""
    _bell: int = -1
    _own: dict[str, tuple[int, TenantRecord]] = field(default_factory=dict)
    _others: dict[str, _Open] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def stands(self) -> bool:
        """Whether it is open; a forked child finds it closed."""
        return self._bell >= 0

    @contextmanager
    def locked(self, patience: float) -> Iterator[None]:
        """Keep all other tenants of the host out.

        Raises:
            TimeoutError: another one has kept this one out for `patience` seconds; it may be stopped.
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
        """How often `ring` was called; needs no lock."""
        return int.from_bytes(os.pread(self._bell, 8, 0), "little")

    def ring(self) -> None:
        """Let all tenants look at the records."""
        os.pwrite(self._bell, ((self.rung() + 1) % (1 << 64)).to_bytes(8, "little"), 0)

    def join(self, record: TenantRecord) -> str:
        """Add a tenant of this process; its key."""
        key = f"{_TENANT}{secrets.token_hex(8)}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self.folder / key, flags, 0o644 if self.shared else 0o600)
        if self.shared:
            os.fchmod(descriptor, 0o644)  # whatever the umask is: a record that nobody can read counts for nothing
        if not _lock(descriptor):
            os.close(descriptor)
            raise OSError(errno.ENOLCK, "its file system has no locks", str(self.folder))
        self._own[key] = descriptor, record
        self.write(key, record)
        return key

    def write(self, key: str, record: TenantRecord) -> None:
        """Replace a tenant's record.

        Raises:
            OSError: it cannot be written, or somebody has removed it.
        """
        descriptor, _ = self._own[key]
        found = os.fstat(descriptor)
        if not found.st_nlink:
            raise FileNotFoundError(errno.ENOENT, "somebody has removed it", str(self.folder / key))
        data = record.encoded()
        if len(data) > LONGEST:
            raise OSError(errno.EFBIG, "a tenant holds too many leases", str(self.folder / key))
        os.pwrite(descriptor, data.ljust(found.st_size), 0)
        self._own[key] = descriptor, record

    def leave(self, key: str) -> None:
        """Remove a tenant of this process."""
        descriptor, _ = self._own.pop(key)
        with suppress(OSError):
            (self.folder / key).unlink()
        os.close(descriptor)

    def scan(self) -> list[Seen]:
        """All tenants that live, those of this process first; the files of the dead are removed."""
        process, user = os.getpid(), os.geteuid()
        alive = [Seen(key, record, user, process, resident()) for key, (_, record) in self._own.items()]
        names = sorted(name for name in _names(self.folder) if name.startswith(_TENANT) and name not in self._own)
        for name in self._others.keys() - names:
            self._others.pop(name).close()
        for name in names[:_MOST_TENANTS]:
            seen = self._seen(name)
            if seen is not None:
                alive.append(seen)
        return alive

    def _seen(self, name: str) -> Seen | None:
        file = self._others.get(name) or self._opened(name)
        if file is None:
            return None
        holder = _holder(file.descriptor)
        if holder is None:
            self._others.pop(name).close()
            with suppress(OSError):  # another user's, in a shared folder: its next process does it
                (self.folder / name).unlink()
            return None
        data = os.pread(file.descriptor, LONGEST + 1, 0)
        if data != file.data:
            file.data, file.record = data, None
            with suppress(ValueError):
                file.record = TenantRecord.decoded(data)
        return Seen(name, file.record, file.user, holder, file.resident(holder))

    def _opened(self, name: str) -> _Open | None:
        """The file of another tenant; None where it is something else, or nobody can read it."""
        path = self.folder / name
        with suppress(OSError):
            before = os.lstat(path)
            if not stat.S_ISREG(before.st_mode) or any(
                os.path.samestat(before, os.fstat(own)) for own in (self._bell, *(own for own, _ in self._own.values()))
            ):
                return None  # a second name of a file that this process has locked
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            self._others[name] = _Open(descriptor, os.fstat(descriptor).st_uid)
        return self._others.get(name)

    def start(self) -> None:
        """Open the bell, which everybody locks to read and to write."""
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        path = self.folder / _BELL
        with suppress(FileExistsError):  # not O_CREAT on what is there: Linux refuses that where it is another user's
            made = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
            if self.shared:
                os.fchmod(made, 0o666)
            os.close(made)
        self._bell = os.open(path, flags)
        if not stat.S_ISREG(os.fstat(self._bell).st_mode):
            self.stop()
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        self.turns = Turns(self.folder, shared=self.shared)

    def stop(self) -> None:
        """Close every file, in this process or in a child that was forked."""
        for file in self._others.values():
            file.close()
        for descriptor in (self._bell, *(own for own, _ in self._own.values())):
            with suppress(OSError):
                os.close(descriptor)
        if self.turns is not None:
            self.turns.close()
        self._bell, self._own, self._others, self.turns = -1, {}, {}, None


def resident() -> int:
    """Bytes that this process has in memory."""
    return int(_STATM.read_bytes().split()[1]) * _PAGE


def open_ledger(folder: Path, *, shared: bool) -> Ledger:
    """The ledger of a folder, one in a process; `close_ledger` it as often.

    Args:
        folder: of this user alone, or where `shared` of everybody, with the sticky bit; made where it is missing.

    Raises:
        ShoestringError: it cannot be used; the message says why.
    """
    with _opening:
        ledger = _ledgers.get(folder)
        if ledger is None:
            ledger = Ledger(folder, shared)
            try:
                (_shared_folder if shared else _own_folder)(folder)
                ledger.start()
            except OSError as error:
                said = f"cannot keep records of host memory in `{folder}`: {error.strerror}"
                raise ShoestringError(said, hint="name a folder in memory with `memory.broker.folder`") from error
            _ledgers[folder] = ledger
        ledger.users += 1
        return ledger


def close_ledger(ledger: Ledger) -> None:
    """End what `open_ledger` began."""
    with _opening:
        ledger.users -= 1
        if not ledger.users:
            del _ledgers[ledger.folder]
            ledger.stop()


def _own_folder(folder: Path) -> None:
    private_folder(folder.parents[1], *folder.parts[-2:])


def _shared_folder(folder: Path) -> None:
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
            os.fchmod(opened, _EVERYBODYS)  # whatever the umask is
        mode = stat.S_IMODE(os.fstat(opened).st_mode)
    finally:
        os.close(opened)
    if mode != _EVERYBODYS:
        said = f"`{folder}` cannot be shared: its mode is {mode:o}, and not {_EVERYBODYS:o}"
        raise ShoestringError(said, hint="let its owner set the mode, or name another with `memory.broker.folder`")


def _names(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries]


def _lock(descriptor: int) -> bool:
    """Lock a whole file for this process; False where another one has it."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise
    return True


def _holder(descriptor: int) -> int | None:
    """The process that holds the lock of a file, 0 where it cannot be seen from here; None if nobody does."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, process = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    return None if kind == fcntl.F_UNLCK else max(process, 0)


def _forget() -> None:
    """In a forked child: it is no tenant, and its parent's locks are not its own."""
    global _opening
    _opening = threading.Lock()
    for ledger in _ledgers.values():
        ledger.stop()
    _ledgers.clear()


os.register_at_fork(after_in_child=_forget)
