"""Opening what somebody else may have put there: another user of this host, or whoever made a folder.

Folders are this user's own, links are not followed, and files are files: not pipes, which would be waited for, nor
devices, which might never end.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from shoestring.core.errors import ShoestringError

_SHARED = stat.S_IWGRP | stat.S_IWOTH


def private_folder(root: Path, *names: str, make: bool = True) -> Path:
    """The folder `root/name/…/name`, which no other user can look into or change.

    `root` may be everybody's, such as /dev/shm, so that somebody else may have put something there by these names: a
    link to where this user's files are, for this process to overwrite, or a folder with what it is to read. Each is
    opened in the folder above it, links are not followed, and owner and mode of what was opened are checked.

    Args:
        make: make what is missing.

    Raises:
        ShoestringError: something there is another user's, or others may write to it.
        OSError: it cannot be made.
    """
    path = root.joinpath(*names)
    if make:
        root.mkdir(parents=True, exist_ok=True)
    elif not root.exists():
        return path
    above = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _check_everybodys(root, os.fstat(above))
        for name in names:
            root = root / name
            below = _below(above, name, root, make)
            if below is None:
                break
            os.close(above)
            above = below
            _check_own(root, os.fstat(above))
            os.fchmod(above, 0o700)
    finally:
        os.close(above)
    return path


def _below(above: int, name: str, path: Path, make: bool) -> int | None:
    """A folder opened in the one above; None where there is none."""
    if make:
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=above)
    try:
        return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise _not_private(path, "it is a link or a file, not a folder") from error
        if error.errno == errno.EACCES:
            raise _not_private(path, f"it belongs to user {os.stat(name, dir_fd=above).st_uid}") from error
        raise


def _check_everybodys(path: Path, found: os.stat_result) -> None:
    """What is in a folder can be taken away or renamed by whoever may write to it, unless it is sticky."""
    if not found.st_mode & stat.S_ISVTX:
        if found.st_uid not in (0, os.geteuid()):
            raise _not_private(path, f"it belongs to user {found.st_uid}")
        if found.st_mode & stat.S_IWOTH:
            raise _not_private(path, f"everybody may rename what is in it (mode {stat.S_IMODE(found.st_mode):o})")


def _check_own(path: Path, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise _not_private(path, f"it belongs to user {found.st_uid}")
    if found.st_mode & _SHARED:
        raise _not_private(path, f"others may write to it (mode {stat.S_IMODE(found.st_mode):o})")


def _not_private(path: Path, why: str) -> ShoestringError:
    return ShoestringError(
        f"`{path}` is not private to this user: {why}", hint="remove it, or name another folder in its place"
    )


def open_regular(path: Path, *, private: bool = False, write: bool = False) -> BinaryIO:
    """Open a file that must be one: reading a pipe would wait, and reading a device might never end.

    Args:
        private: it must be this user's and nobody else's, not a link, and have no second name.
        write: open it for reading and writing; make it, for this user only, where there is none.

    Raises:
        OSError: it cannot be opened, or is something else.
    """
    with suppress(FileNotFoundError):  # before it is opened, which may do something to a device
        _check_regular(path, path.stat(follow_symlinks=not private), private)
    flags = os.O_RDWR | os.O_CREAT if write else os.O_RDONLY
    flags |= os.O_NONBLOCK | os.O_CLOEXEC | (os.O_NOFOLLOW if private else 0)
    file = os.fdopen(os.open(path, flags, 0o600), "r+b" if write else "rb")
    try:
        _check_regular(path, os.fstat(file.fileno()), private)
    except OSError:
        file.close()
        raise
    return file


def _check_regular(path: Path, found: os.stat_result, private: bool) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    if private and (found.st_uid != os.geteuid() or found.st_mode & _SHARED or found.st_nlink > 1):
        raise PermissionError(errno.EACCES, "it is not private to this user", str(path))


def read_regular(path: Path, limit: int, *, private: bool = False) -> bytes:
    """The content of a file that must be one, and at most `limit` bytes long.

    Raises:
        OSError: it cannot be read, or is something else.
    """
    with open_regular(path, private=private) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"it is longer than {limit / 1e6:.0f} MB", str(path))
    return data
