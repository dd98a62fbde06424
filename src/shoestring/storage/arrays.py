"""Named arrays and a table in one file: numpy's .npz without pickled objects, of which the table is JSON."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from shoestring.core.errors import DataError

Read = TypeVar("Read")

_LARGEST = 1 << 30
"""Bytes of an array, unpacked, beyond which a file is refused."""
_DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile, EOFError)


class Format(NamedTuple, Generic[Read]):
    """What files of one kind are, and what is made of them."""

    what: str
    """In words with an article, for errors."""
    name: str
    version: int
    make: Callable[[dict[str, Any], Mapping[str, np.ndarray]], Read]
    """From the table and the arrays of a file; it may fail as one does that reads what is not there, or of another
    type."""

    def content(self, table: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bytes:
        """The bytes of a file with this table and these arrays."""
        head = json.dumps({"format": self.name, "version": self.version, **table})
        room = io.BytesIO()
        np.savez_compressed(room, **arrays, head=text(head))  # pyrefly: ignore[bad-argument-type]
        return room.getvalue()

    def load(self, path: Path) -> Read:
        """What a file holds.

        Raises:
            DataError: there is none, or it is damaged, foreign, or of a newer version.
        """
        try:
            return self.read(path.read_bytes(), str(path))
        except FileNotFoundError as error:
            raise DataError(f"there is no {self._noun} {path}") from error
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from error

    def read(self, content: bytes, path: str) -> Read:
        """What the bytes of a file hold.

        Args:
            path: what the file is called, for errors.

        Raises:
            DataError: they are damaged, foreign, or of a newer version.
        """
        try:
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                if any(entry.file_size > _LARGEST for entry in archive.infolist()):
                    raise DataError(f"{path} is larger than any {self._noun}")
            with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
                table = json.loads(arrays["head"].tobytes())
                if table["format"] != self.name:
                    raise DataError(f"{path} is not {self.what} of shoestring")
                if table["version"] > self.version:
                    raise DataError(f"{path} is of a newer version of shoestring", hint="install that")
                return self.make(table, arrays)
        except _DAMAGED as error:
            raise DataError(f"{path} is not {self.what}, or damaged: {error}") from error

    @property
    def _noun(self) -> str:
        return self.what.partition(" ")[2]


def text(content: str) -> np.ndarray:
    """A text as an array of bytes."""
    return np.frombuffer(content.encode(), np.uint8)
