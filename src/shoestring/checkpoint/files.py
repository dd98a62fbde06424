"""Every act on files that a save consists of, one by one, so that tests can stop, fail or record each of them."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from shoestring.checkpoint.checksum import CHUNK, crc32
from shoestring.storage.guarded import open_regular
from shoestring.storage.whole import sync_folder

PIECE = 8 << 20  # bytes that one write is of


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
        where = f" `{error.filename}`" if error.filename else ""
        return f"{error.strerror or error}{where}"
