"""Writing files and folders so that a crash leaves all of one or nothing."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import glob
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux' renameat2
_ATTEMPTS = 100  # to make a file that no other process takes for one that was left

# -- writing ----------------------------------------------------------------------------------------------------------


def write_atomic(path: Path, data: bytes | Iterable[bytes | memoryview]) -> None:
    """Put `data`, or its pieces in a row, at `path`: write aside, flush, fsync, rename, fsync the folder.

    An exception leaves nothing behind; what a kill leaves is removed by whoever writes this file next.
    """
    file = open_aside(path)
    try:
        file.writelines([data] if isinstance(data, bytes) else data)
        put_in_place(file, path)
    except BaseException:
        with suppress(OSError):
            Path(file.name).unlink()
        raise
    finally:
        with suppress(OSError):  # what could not be written is flushed once more
            file.close()


def open_aside(path: Path) -> BinaryIO:
    """Open a new file beside `path`, to which `put_in_place` gives that name. Files that killed processes left go.

    A lock, which ends with its process, tells a file that is being written from one that was left.

    Raises:
        OSError: no file can be made there; or another process took each of several for one that was left.
    """
    make_folder(path.parent)
    _remove_left(path)
    for _ in range(_ATTEMPTS):
        file = _aside(path).open("xb")
        if _lock(file.fileno()):
            return file
        file.close()
    raise _always_taken(path)


def put_in_place(file: BinaryIO, path: Path) -> None:
    """Give a file from `open_aside` its name, durably."""
    file.flush()
    os.fsync(file.fileno())
    Path(file.name).replace(path)
    sync_folder(path.parent)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")


def _remove_left(path: Path) -> None:
    for left in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 8}.tmp"):
        with suppress(OSError):  # another one removed it, or is writing it
            descriptor = os.open(left, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            finally:
                os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Lock a new file or folder without waiting; False where another process took it for one that was left."""
    with suppress(OSError):  # a file system without locks: then nobody can take it for one that was left, either
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # it is being removed
            return False
    return os.fstat(descriptor).st_nlink > 0


def _always_taken(path: Path) -> OSError:
    return OSError(errno.EBUSY, "another process removes each file or folder that is begun for it", str(path))


def _make_aside(path: Path) -> tuple[Path, int]:
    """A new, locked folder beside `path`, and its descriptor; see `open_aside`."""
    for _ in range(_ATTEMPTS):
        aside = _aside(path)
        aside.mkdir()
        with suppress(FileNotFoundError):  # removed before it was opened
            descriptor = os.open(aside, os.O_RDONLY | os.O_CLOEXEC)
            if _lock(descriptor):
                return aside, descriptor
            os.close(descriptor)
    raise _always_taken(path)


@contextmanager
def replaced_folder(path: Path) -> Iterator[Path]:
    """A new folder, which takes the place of `path` as a whole and durably at the end.

    Until then, and after an exception, what was there before is there. A link to a folder stays a link.
    """
    path = path.resolve()
    make_folder(path.parent)
    _remove_left(path)
    aside, descriptor = _make_aside(path)
    try:
        yield aside
        for folder, _, names in os.walk(aside):
            for each in (Path(folder, name) for name in names):
                if each.is_file():
                    sync_folder(each)
            sync_folder(Path(folder))
        _exchange(aside, path)
        sync_folder(path.parent)
    finally:
        os.close(descriptor)
        shutil.rmtree(aside, ignore_errors=True)  # the former folder by now, or what was not finished


def _exchange(new: Path, path: Path) -> None:
    """Give `new` the name `path`, and what has that now the other one; in one act where the file system can."""
    if not path.exists():
        new.rename(path)
        return
    swap = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if swap is None or swap(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(path), _RENAME_EXCHANGE):
        former = _aside(path)
        path.rename(former)
        try:
            new.rename(path)
        except BaseException:
            former.rename(path)
            raise
        former.rename(new)


# -- folders ----------------------------------------------------------------------------------------------------------


def make_folder(folder: Path) -> None:
    """Make a folder and those above that are missing, durably."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in missing:
        with suppress(PermissionError):  # one that may be written to, but not read
            sync_folder(each.parent)


def sync_folder(folder: Path) -> None:
    """Make the folder's entries (a rename, say) durable; of a file, its content."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_above(folder: Path) -> None:
    """Make all folders above durable, whoever made them: without them all is lost with the power."""
    for above in folder.absolute().parents:
        with suppress(OSError):  # those that are not ours
            sync_folder(above)
