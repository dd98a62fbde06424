"""Every act on files that a checkpoint consists of, one by one, so that tests can stop, fail or record each of them."""

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
from shoestring.storage.guarded import open_regular
from shoestring.storage.whole import sync_folder

PIECE = 8 << 20  # bytes that one write is of
WAIT = 20.0  # seconds that a lock is waited for: who holds it may be about to end
_TURN = 0.05  # seconds between attempts
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # of file systems that have none


class Files:
    """Acts on files. `before` is called before each."""

    def before(self, act: str, path: Path, data: memoryview | bytes | Path = b"", at: int = 0) -> None:
        """Nothing; tests override it.

        Args:
            data: what is written, or the new name.
            at: the byte where it is written, or how many are reserved.
        """

    def folder(self, path: Path) -> None:
        self.before("folder", path)
        path.mkdir(parents=True, exist_ok=True)

    def write(self, path: Path, data: Tensor | bytes, *, durable: bool = True) -> None:
        """A new file with `data` (uint8, 1-d) in it: its room reserved, written, and synced if it must be durable.

        Raises:
            OSError: no room, no right, or the device failed; it names the path. After a failed fsync the file must
            not be trusted, even if another one succeeds.
        """
        view = memoryview(data) if isinstance(data, bytes) else data.numpy().data
        self.before("create", path)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with naming(path):
                self._fill(descriptor, path, view)
                if durable:
                    self.before("sync", path)
                    os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _fill(self, descriptor: int, path: Path, view: memoryview) -> None:
        if len(view):
            self.before("reserve", path, at=len(view))
            os.posix_fallocate(descriptor, 0, len(view))
        for start in range(0, len(view), PIECE):
            self._put(descriptor, path, view[start : start + PIECE], start)

    def _put(self, descriptor: int, path: Path, view: memoryview, at: int) -> None:
        self.before("write", path, view, at)
        while len(view):
            done = os.pwrite(descriptor, view, at)
            view, at = view[done:], at + done

    def reread(self, path: Path, sums: Sequence[int]) -> None:
        """Read a synced file back, from the device where it has one, and compare its chunks with their checksums.

        Raises:
            OSError: it holds something else, or cannot be read.
        """
        self.before("read", path)
        with open_regular(path) as file, naming(path):
            _forget(file.fileno())  # or it would be read from memory
            for each in sums:
                if crc32(file.read(CHUNK)) != each:
                    raise OSError(errno.EIO, "it holds other bytes than were written", str(path))
            _forget(file.fileno())

    def lock(self, path: Path, says: str, wait: float | None = None) -> Lock:
        """Lock a file for this process alone, and write into it who this is.

        A lock of the kernel: it ends with the process, however that ends. On a file system without locks between hosts
        it keeps out processes of this host only, and where there are no locks at all, nobody.

        Args:
            wait: seconds to wait for it; defaults to `WAIT`.

        Raises:
            BlockingIOError: another process holds it, and still does after `wait` seconds; it says which.
            OSError: the file cannot be made.
        """
        self.before("lock", path)
        end = time.monotonic() + (WAIT if wait is None else wait)
        while True:
            held = Lock.of(path)
            if held is None and time.monotonic() > end:
                holder = path.read_text(errors="replace")[:200].strip()
                raise BlockingIOError(errno.EWOULDBLOCK, holder or "another process", str(path))
            if held is not None and held.stands:
                try:
                    with naming(path), path.open("wb") as file:
                        file.write(says.encode())
                        file.flush()
                        os.fsync(file.fileno())
                except OSError:  # a full disk, say
                    held.release()
                    raise
                return held
            if held is not None:  # who held it has removed it
                held.release()
            time.sleep(_TURN)

    def rename(self, source: Path, target: Path) -> None:
        """Atomic; replaces a file, not a folder that holds something."""
        self.before("rename", source, target)
        source.rename(target)

    def replace(self, path: Path, data: bytes, *, durable: bool = True) -> None:
        """Put `data` at `path`, all of it or nothing."""
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
        """Make a folder's entries durable."""
        with naming(folder):
            self.before("sync folder", folder)
            sync_folder(folder)

    def unlink(self, path: Path) -> None:
        """Remove a file that may be gone already."""
        self.before("unlink", path)
        path.unlink(missing_ok=True)

    def remove(self, folder: Path) -> None:
        """Remove a folder with all that is in it; what cannot be removed stays."""
        self.before("remove", folder)
        shutil.rmtree(folder, ignore_errors=True)


class Lock:
    """A locked file."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self.descriptor = path, descriptor
        # Otherwise a child, say a worker that loads data, would hold the lock on after this process has ended.
        held = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _let_go(held()))

    @classmethod
    def of(cls, path: Path) -> Lock | None:
        """None where another process holds it."""
        # Nothing that is open for writing keeps a file system from becoming read-only, but NFS wants it so.
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
        """Whether the file is still there, and this process has it."""
        try:
            return self.descriptor >= 0 and os.path.samestat(os.fstat(self.descriptor), self.path.lstat())
        except OSError:
            return False

    def release(self, *, remove: bool = False) -> None:
        """Let others have it."""
        if remove and self.stands:
            with suppress(OSError):
                self.path.unlink()
        _let_go(self)


def _let_go(lock: Lock | None) -> None:
    if lock is not None and lock.descriptor >= 0:
        os.close(lock.descriptor)
        lock.descriptor = -1


def _forget(descriptor: int) -> None:
    """Drop what the system keeps of a file in memory, where it can."""
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the path into an OSError that came of a descriptor and so lacks it."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def tried(work: Callable[[], Any]) -> Any:
    """What some work on files gives, or in words why it failed."""
    try:
        return work()
    except OSError as error:
        return system_error(error)


def system_error(error: OSError) -> str:
    """An error of the system in words, with the path."""
    where = f" `{error.filename}`" if error.filename else ""
    return f"{error.strerror or error}{where}"
