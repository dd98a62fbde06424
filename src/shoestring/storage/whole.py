"""Writes files and folders atomically and durably: a crash leaves either the old content or all of the new content."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import glob
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from shoestring.core.errors import ShoestringError

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # constants of Linux' system call renameat2
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG)
"""Error numbers for a disk that is full, read-only or has failed, or a file that is too large."""
_SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")  # format of the error number in messages of Rust libraries
_SHORT_WRITES = ("inline_container", "iostream error", "file write failed")  # in messages of torch and numpy
_PROBE = 1 << 20  # bytes allocated to find out whether the disk is full
_PATIENCE, _NAP = 2.0, 0.01  # seconds to wait for another writer to finish its renames, and between attempts to lock
_ATTEMPTS = 100  # attempts to create a temporary file and lock it before another process removes it as a leftover

# -- writing ----------------------------------------------------------------------------------------------------------


def write_atomic(path: Path, data: bytes | Iterable[bytes | memoryview]) -> None:
    """Write `data`, or the concatenation of its chunks, to `path` atomically and durably.

    Writes a temporary file beside `path`, calls fsync on it, renames it to `path`, and calls fsync on the folder. After
    an exception the temporary file is removed; if the process is killed, the next writer of `path` removes the file.

    Raises:
        OSError: the disk is full or failed; the error names the path.
    """
    with put_aside(path) as file:
        file.writelines([data] if isinstance(data, bytes) else data)


@contextmanager
def put_aside(path: Path) -> Iterator[BinaryIO]:
    """Context manager that yields a temporary file for writing, and renames it to `path` at the end; see
    `write_atomic`."""
    with made_above(path):
        file = open_aside(path)
        try:
            with writing(path):
                yield file
                put_in_place(file, path)
        except BaseException:
            with suppress(OSError):
                Path(file.name).unlink()
            raise
        finally:
            with suppress(OSError):  # close() tries again to write the data left in the buffer
                file.close()


def write_by(path: Path, write: Callable[[Path], None]) -> None:
    """Let a library write a file, atomically and durably; see `write_atomic`.

    Args:
        write: function that writes a file to the path that it gets; it may replace the file that already exists there.
    """
    with made_above(path), writing(path):
        _remove_left(path)
        aside, descriptor = _make_aside(path)
        try:
            new = aside / path.name
            write(new)
            share_as_folder(new)
            sync_folder(new)
            new.replace(path)
            sync_folder(path.parent)
        finally:
            os.close(descriptor)
            shutil.rmtree(aside, ignore_errors=True)


def share_as_folder(path: Path) -> None:
    """Give a file the read and write permissions of its folder, because some libraries create files that only the user
    can read."""
    path.chmod(path.parent.stat().st_mode & 0o666)


def open_aside(path: Path) -> BinaryIO:
    """Open a new temporary file beside `path`, for `put_in_place` to rename; removes leftovers of killed processes.

    The file is locked while the process writes to it, and the kernel releases the lock when the process ends. So a
    temporary file without a lock is a leftover.

    Raises:
        OSError: the file cannot be created, or other processes removed every new file as a leftover.
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
    """Rename a file from `open_aside` to its final name, durably."""
    file.flush()
    os.fsync(file.fileno())
    Path(file.name).replace(path)
    sync_folder(path.parent)


def _aside(path: Path) -> Path:
    """Return a new random name beside `path` for a temporary file or folder."""
    return path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")


def _remove_left(path: Path) -> None:
    """Remove the temporary files and folders of `path` that no process has locked."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 8}.tmp"):
        with suppress(OSError):  # another process has removed the file, or is still writing to it
            descriptor = os.open(left, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if left.with_suffix(".former").exists():  # from an interrupted exchange, which `_recover` has to undo
                    continue
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            finally:
                os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Lock a new file or folder without waiting; returns False if another process is removing the new entry as a
    leftover."""
    with suppress(OSError):  # if this file system has no locks, other processes cannot remove leftovers either
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # the process that is removing the leftover holds the lock
            return False
    return os.fstat(descriptor).st_nlink > 0


def _always_taken(path: Path) -> OSError:
    return OSError(errno.EBUSY, "another process removes every temporary file or folder for this path", str(path))


def _make_aside(path: Path) -> tuple[Path, int]:
    """Create a locked temporary folder beside `path`; returns the folder and its descriptor. See `open_aside`."""
    for _ in range(_ATTEMPTS):
        aside = _aside(path)
        aside.mkdir()
        with suppress(FileNotFoundError):  # another process removed the folder before it was opened
            descriptor = os.open(aside, os.O_RDONLY | os.O_CLOEXEC)
            if _lock(descriptor):
                return aside, descriptor
            os.close(descriptor)
    raise _always_taken(path)


@contextmanager
def replaced_folder(path: Path, keep: Callable[[str], bool] | None = None) -> Iterator[Path]:
    """Context manager that yields a new folder to fill, which replaces the folder `path` atomically and durably at the
    end.

    The former folder stays unchanged until the context ends, and after an exception. If `path` is a link, the link's
    target folder is replaced.

    Args:
        keep: function that takes the name of an entry of the former folder and decides whether to copy the entry to the
            new folder; an entry with this name in the new folder takes precedence. If `keep` is None, no entry is
            copied.

    Raises:
        OSError: the disk is full or failed; the error names the path.
    """
    path = path.resolve()
    with made_above(path), writing(path):
        with _alone(path.parent):
            _recover(path, keep)
        _remove_left(path)
        aside, descriptor = _make_aside(path)
        try:
            yield aside
            _sync_below(aside)
            for name in _carried(path, aside, keep):
                copy = aside / name
                if copy.is_dir() and not copy.is_symlink():
                    _sync_below(copy)
                elif copy.is_file():
                    sync_folder(copy)
            sync_folder(aside)
            with _alone(path.parent):
                _recover(path, keep)
                _exchange(aside, path)
                sync_folder(path.parent)
            _take_late(aside, path, keep)
        finally:
            os.close(descriptor)
            # After the exchange, `aside` is the former folder; otherwise, `aside` is the unfinished new folder.
            shutil.rmtree(aside, ignore_errors=True)


def recover(path: Path) -> None:
    """Restore a folder if a process was killed while replacing it by renames (on file systems without an atomic
    exchange)."""
    with suppress(OSError, ValueError, RuntimeError):  # `path` may be a model's name, or a cycle of links
        path = path.resolve()
        if not path.exists() and _formers(path):
            with _alone(path.parent):
                _recover(path)


def _recover(path: Path, keep: Callable[[str], bool] | None = None) -> None:
    """Undo or finish an interrupted `_rename_twice`; a former folder is removed only after its replacement is in
    place."""
    for former in _formers(path):
        with suppress(OSError):
            if not path.exists():
                former.rename(path)
                sync_folder(path.parent)
            elif not former.with_suffix(".tmp").exists():
                _take_late(former, path, keep)
                left = former.rename(_aside(path))  # so that a half-deleted folder is never restored
                shutil.rmtree(left)


def _formers(path: Path) -> list[Path]:
    """List the former folders that `_rename_twice` renamed and an interruption left behind, newest first."""
    formers = path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 8}.former")
    return sorted(formers, key=lambda former: former.lstat().st_ctime_ns, reverse=True)


def _exchange(new: Path, path: Path) -> None:
    """Exchange the names of the folders `new` and `path`, atomically if the file system supports it."""
    if not path.exists():
        new.rename(path)
        return
    swap = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if swap is None or swap(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(path), _RENAME_EXCHANGE):
        _rename_twice(new, path)


def _rename_twice(new: Path, path: Path) -> None:
    """Exchange the names of two folders by three renames; the second rename puts the new folder in place.

    The former folder first gets the temporary name of the new folder with the suffix `.former`. If a folder with the
    temporary name still exists after an interruption, the new folder is not in place yet.
    """
    former = new.with_suffix(".former")
    path.rename(former)
    try:
        new.rename(path)
    except BaseException:
        former.rename(path)
        raise
    former.rename(new)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold a lock on a folder, so that no other process exchanges entries in it.

    Waits at most `_PATIENCE` seconds and then continues without the lock, so that a suspended process cannot block
    others.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        end = time.monotonic() + _PATIENCE
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < end:
                    time.sleep(_NAP)
                    continue
            except OSError:  # a file system without locks on folders
                pass
            break
        yield
    finally:
        os.close(descriptor)


def _carried(former: Path, new: Path, keep: Callable[[str], bool] | None) -> list[str]:
    """Copy the entries that `keep` selects from the former folder to the new folder; returns the names of the
    copies."""
    names = [path.name for path in former.iterdir()] if keep and former.is_dir() else []
    carried = [name for name in names if keep and keep(name) and not os.path.lexists(new / name)]
    for name in carried:
        path = former / name
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, new / name, symlinks=True)
        else:
            shutil.copy2(path, new / name, follow_symlinks=False)
    return carried


def _take_late(former: Path, path: Path, keep: Callable[[str], bool] | None) -> None:
    """Move entries that were added to the former folder after its content was copied to the new one, if `keep` selects
    them."""
    if keep is None or not former.is_dir():
        return
    for late in former.iterdir():
        if keep(late.name) and not os.path.lexists(path / late.name):
            late.rename(path / late.name)


# -- folders ----------------------------------------------------------------------------------------------------------


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents, durably."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        with suppress(PermissionError):  # a parent folder may be writable but not readable
            sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Call fsync on a folder or a file; on a folder, this makes renames of its entries durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_above(folder: Path) -> None:
    """Call fsync on all parent folders: a power failure that loses a folder's entry loses everything in that folder."""
    for above in folder.absolute().parents:
        with suppress(OSError):  # a parent folder may belong to another user and not be readable
            sync_folder(above)


def _sync_below(folder: Path) -> None:
    """Call fsync on a folder and on all files and folders in it."""
    for below, _, names in os.walk(folder):
        for path in (Path(below, name) for name in names):
            if path.is_file():
                sync_folder(path)
        sync_folder(Path(below))


@contextmanager
def made_above(path: Path) -> Iterator[None]:
    """Context manager that creates the missing parent folders of a path; after an exception, removes the created
    folders that are empty."""
    missing = [folder for folder in path.parents if not folder.exists()]
    make_folder(path.parent)
    try:
        yield
    except BaseException:
        for folder in missing:
            with suppress(OSError):
                folder.rmdir()
        raise


# -- errors -----------------------------------------------------------------------------------------------------------


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Context manager that adds the path to disk errors, and converts the exceptions that libraries raise for disk
    errors to OSError.

    safetensors puts the error number into its message. numpy and torch only report a short write. To learn the reason
    of a short write, `_disk_error` allocates another file on the same disk. So the unfinished file, which may fill the
    disk, must still exist.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise _disk_error(path) from error
        if error.filename is None:
            error.filename = str(path)
        raise
    except ShoestringError:
        raise
    except Exception as error:
        if number := _SYSTEM_ERROR.search(str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
        if any(words in str(error) for words in _SHORT_WRITES):
            raise _disk_error(path) from error
        raise


def _disk_error(path: Path) -> OSError:
    """Find the cause of a failed write: return the error that a second write to the disk raises, or EIO if the second
    write succeeds."""
    folder = next((parent for parent in path.absolute().parents if parent.is_dir()), Path("/"))
    number = errno.EIO
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, _PROBE)
    except OSError as error:
        number = error.errno or number
    return OSError(number, os.strerror(number), str(path))
