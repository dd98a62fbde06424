"""Collects the file operations that write checkpoints in one class, so that tests can stop, fail or record each
operation."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from shoestring.checkpoint.format.checksum import CHUNK, crc32
from shoestring.storage.guarded import open_regular, read_regular
from shoestring.storage.whole import sync_folder

PIECE = 8 << 20  # maximum number of bytes per write
WAIT = 20.0  # seconds to wait for a lock, because its holder may be about to end
_TURN = 0.05  # seconds between attempts to lock
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # error numbers of file systems without locks


class Files:
    """File operations; each operation first calls `before`, which tests override."""

    def before(self, act: str, path: Path, data: memoryview | bytes | Path = b"", at: int = 0) -> None:
        """Do nothing; tests override this method to record an operation or make it fail.

        Args:
            act: name of the operation that follows.
            data: the data to be written, or the new name for a rename.
            at: the offset of the data in the file, or the number of bytes to reserve.
        """

    def folder(self, path: Path) -> None:
        self.before("folder", path)
        path.mkdir(parents=True, exist_ok=True)

    def write(self, path: Path, data: Tensor | bytes, *, durable: bool = True) -> None:
        """Write `data` (uint8, 1-d) to a new file: reserve space on disk, write, and, if `durable`, sync the file.

        Raises:
            OSError: there is no room or no permission, or the device failed; the error names the path. After a failed
                fsync, the file must not be used even if a later fsync succeeds, because the kernel may have dropped
                pages.
        """
        view = memoryview(data) if isinstance(data, bytes) else data.numpy().data
        self.before("create", path)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with naming(path):
                if len(view):
                    self.before("reserve", path, at=len(view))
                    os.posix_fallocate(descriptor, 0, len(view))
                for start in range(0, len(view), PIECE):
                    self._put(descriptor, path, view[start : start + PIECE], start)
                if durable:
                    self.before("sync", path)
                    os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _put(self, descriptor: int, path: Path, view: memoryview, at: int) -> None:
        self.before("write", path, view, at)
        while len(view):
            done = os.pwrite(descriptor, view, at)
            view, at = view[done:], at + done

    def reread(self, path: Path, sums: Sequence[int]) -> None:
        """Read a synced file back from the device, not from the page cache, and compare checksums.

        Raises:
            OSError: the file cannot be read, or its bytes differ from the bytes that were written.
        """
        self.before("read", path)
        with open_regular(path) as file, naming(path):
            _forget(file.fileno())  # otherwise the file would be read from the page cache
            for checksum in sums:
                if crc32(file.read(CHUNK)) != checksum:
                    raise OSError(errno.EIO, "it does not hold the bytes that were written", str(path))
            _forget(file.fileno())

    def lock(self, path: Path, says: str, wait: float | None = None) -> Lock:
        """Lock a file exclusively for this process, and write into the file who holds the lock. The kernel releases the
        lock when the process ends for any reason. On a file system whose locks do not work between hosts, the lock
        excludes only processes on this host; on a file system without locks, it excludes no process.

        Args:
            says: text that names this process, to be written into the file.
            wait: seconds to wait for the lock; defaults to `WAIT`.

        Raises:
            BlockingIOError: another process still holds the lock after `wait` seconds; the error names that process.
            OSError: the file cannot be created.
        """
        self.before("lock", path)
        end = time.monotonic() + (WAIT if wait is None else wait)
        while True:
            held = Lock.of(path)
            if held is None and time.monotonic() > end:
                holder = read_regular(path, 1 << 16).decode(errors="replace")[:200].strip()
                raise BlockingIOError(errno.EWOULDBLOCK, holder or "another process", str(path))
            if held is not None and held.stands:
                try:
                    with naming(path), path.open("wb") as file:
                        file.write(says.encode())
                        file.flush()
                        os.fsync(file.fileno())
                except OSError:  # for example, because the disk is full
                    held.release(remove=True)
                    raise
                return held
            if held is not None:  # the former holder has removed the file meanwhile: lock a new file
                held.release()
            time.sleep(_TURN)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file or folder atomically; a file or an empty folder at `target` is replaced."""
        self.before("rename", source, target)
        source.rename(target)

    def replace(self, path: Path, data: bytes, *, durable: bool = True) -> None:
        """Write `data` to `path` atomically, so that the file always has either its former or its new content."""
        aside = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
        try:
            self.write(aside, data, durable=durable)
            self.rename(aside, path)
            if durable:
                self.sync(path.parent)
        except BaseException:
            with suppress(OSError):
                aside.unlink()
            raise

    def sync(self, folder: Path) -> None:
        """Sync a folder, so that renamed, created and removed entries survive a power failure."""
        with naming(folder):
            self.before("sync folder", folder)
            sync_folder(folder)

    def unlink(self, path: Path) -> None:
        """Remove a file, if it exists."""
        self.before("unlink", path)
        path.unlink(missing_ok=True)

    def remove(self, folder: Path) -> None:
        """Remove a folder with its content; files that cannot be removed stay, and no error is raised."""
        self.before("remove", folder)
        shutil.rmtree(folder, ignore_errors=True)


class Lock:
    """A file that this process has locked."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self.descriptor = path, descriptor
        # Close the descriptor in forked children. Otherwise a child, such as a data loader's worker, would hold the
        # lock after this process has ended.
        held = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _let_go(held()))

    @classmethod
    def of(cls, path: Path) -> Lock | None:
        """Lock a file, which is created if missing; returns None if another process holds the lock."""
        # First try to open the file read-only, because a file that is open for writing prevents a read-only remount of
        # the file system. NFS, however, requires that a file be open for writing to lock it exclusively.
        for mode in (os.O_RDONLY, os.O_RDWR):
            flags = mode | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            held = cls(path, os.open(path, flags, 0o600))
            if not stat.S_ISREG(os.fstat(held.descriptor).st_mode):
                held.release()
                raise OSError(errno.EINVAL, "it is not a regular file", str(path))
            try:
                fcntl.flock(held.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return held
            except BlockingIOError:
                held.release()
                return None
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    return held
                held.release()
                if error.errno != errno.EBADF or mode == os.O_RDWR:
                    raise
        raise AssertionError("unreachable")

    @property
    def stands(self) -> bool:
        """Whether this process still holds the lock and the file is still at its path."""
        try:
            return self.descriptor >= 0 and os.path.samestat(os.fstat(self.descriptor), self.path.lstat())
        except OSError:
            return False

    def release(self, *, remove: bool = False) -> None:
        """Release the lock, and if `remove` delete the file."""
        if remove and self.stands:
            with suppress(OSError):
                self.path.unlink()
        _let_go(self)


def _let_go(lock: Lock | None) -> None:
    if lock is not None and lock.descriptor >= 0:
        os.close(lock.descriptor)
        lock.descriptor = -1


def _forget(descriptor: int) -> None:
    """Drop a file from the page cache, if the operating system supports it."""
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Context manager that adds the path to an OSError without a path, such as an error of an operation on a
    descriptor."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def tried(work: Callable[[], Any]) -> Any:
    """Call `work`; return its result or, if it raises an OSError, the error's message."""
    try:
        return work()
    except OSError as error:
        return system_error(error)


def system_error(error: OSError) -> str:
    """Return the message of an OSError, including the path in the error."""
    where = f" `{error.filename}`" if error.filename else ""
    return f"{error.strerror or error}{where}"
