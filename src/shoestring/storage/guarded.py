"""Opens files and folders safely even if another user of this host, or a folder's author, has placed links or devices
there.

A private folder belongs to this user alone and is opened without following links. Only regular files are opened:
reading a pipe would block, and reading a device may never end.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from shoestring import figures
from shoestring.core.errors import ShoestringError

_SHARED = stat.S_IWGRP | stat.S_IWOTH


def private_folder(root: Path, *names: str, make: bool = True) -> Path:
    """Return the folder `root/name/…/name`, which no other user can read or change.

    Every user may be allowed to write to `root`, for example to /dev/shm. So another user may already have created an
    entry with such a name: a link to files of this user, which this process would then overwrite, or a folder whose
    content this process would then read. So each folder is opened relative to its parent without following links, and
    owner and mode are checked on the opened folder.

    Args:
        make: whether to create missing folders.

    Raises:
        ShoestringError: a folder belongs to another user, or others may write to it.
        OSError: a folder cannot be created.
    """
    path = root.joinpath(*names)
    if make:
        root.mkdir(parents=True, exist_ok=True)
    elif not root.exists():
        return path
    above = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # In the root folder, other users must not be able to rename or remove entries; the sticky bit prevents that.
        status = os.fstat(above)
        if not status.st_mode & stat.S_ISVTX:
            if status.st_uid not in (0, os.geteuid()):
                raise _not_private(root, f"it belongs to user {status.st_uid}")
            if status.st_mode & stat.S_IWOTH:
                raise _not_private(root, f"everybody may rename what is in it (mode {stat.S_IMODE(status.st_mode):o})")
        for name in names:
            root = root / name
            below = _below(above, name, root, make)
            if below is None:
                break
            os.close(above)
            above = below
            own = os.fstat(above)
            if own.st_uid != os.geteuid():
                raise _not_private(root, f"it belongs to user {own.st_uid}")
            if own.st_mode & _SHARED:
                raise _not_private(root, f"others may write to it (mode {stat.S_IMODE(own.st_mode):o})")
            os.fchmod(above, 0o700)
    finally:
        os.close(above)
    return path


def state_folder(name: str, *, make: bool = True) -> Path:
    """Return the folder `$XDG_STATE_HOME/shoestring/NAME`, private to this user, for data that outlives a run.

    Raises:
        FileNotFoundError: this user has no home folder.
        OSError, ShoestringError: as for `private_folder`.
    """
    own = os.environ.get("XDG_STATE_HOME", "")
    home = Path(os.path.expanduser("~"))  # noqa: PTH111  (Path.home raises if there is none)
    root = Path(own) if Path(own).is_absolute() else home / ".local" / "state"
    if not root.is_absolute():  # the user has no home folder; a relative path could lead to another user's folder
        raise FileNotFoundError(errno.ENOENT, "this user has no home folder", "~")
    return private_folder(root, "shoestring", name, make=make)


def _below(above: int, name: str, path: Path, make: bool) -> int | None:
    """Open a folder by its name in its parent, whose descriptor is `above`.

    Returns:
        The descriptor of the folder; None if it does not exist.
    """
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


def _not_private(path: Path, reason: str) -> ShoestringError:
    return ShoestringError(
        f"`{path}` is not private to this user: {reason}", hint="remove it, or name another folder in its place"
    )


def open_regular(path: Path, *, private: bool = False, write: bool = False) -> BinaryIO:
    """Open a regular file; anything else, such as a pipe or a device, is refused.

    Args:
        private: require that the file belongs to this user, that nobody else may write to it, and that it is neither a
            symbolic link nor has a second hard link.
        write: open the file for reading and writing; a missing file is created, with access for this user only.

    Raises:
        OSError: the file cannot be opened, is not a regular file, or is not private as required.
    """
    with suppress(FileNotFoundError):  # check before opening, since opening a device may have side effects
        _check_regular(path, path.stat(follow_symlinks=not private), private)
    flags = os.O_RDWR | os.O_CREAT if write else os.O_RDONLY
    flags |= os.O_NONBLOCK | os.O_CLOEXEC | (os.O_NOFOLLOW if private else 0)
    file = os.fdopen(os.open(path, flags, 0o600), "r+b" if write else "rb")
    try:
        _check_regular(path, os.fstat(file.fileno()), private)  # check again: the path may lead to another file by now
    except OSError:
        file.close()
        raise
    return file


def _check_regular(path: Path, status: os.stat_result, private: bool) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    if private and (status.st_uid != os.geteuid() or status.st_mode & _SHARED or status.st_nlink > 1):
        raise PermissionError(errno.EACCES, "it is not private to this user", str(path))


def read_regular(path: Path, limit: int, *, private: bool = False) -> bytes:
    """Read a regular file of at most `limit` bytes.

    Raises:
        OSError: the file cannot be read, is not a regular file, or is longer than `limit` bytes.
    """
    with open_regular(path, private=private) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"it is longer than {figures.size(limit)}", str(path))
    return data
