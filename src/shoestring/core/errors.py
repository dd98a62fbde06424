"""Errors that a user can act on.

    ShoestringError
    ├── ConfigError          the run file, a flag, or an argument is wrong
    │   └── ConflictError    two features claim the same seam or resource
    ├── DataError            the corpus, a tokenizer or a token file is unusable
    ├── WorldError           processes, devices or links are not what was asked for
    │   └── PeerError        a rank, or the connection to it, was lost while the ranks worked together
    ├── CheckpointError      a saved state cannot be written, found or read
    └── NonFiniteError       the loss became NaN or infinite

The command line prints such an error as one line, followed by its hint, and exits with the error's `code`.
Any other exception that reaches the user is a bug and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

STOPPED = 130
"""Exit code of a run that was ended by a signal, whichever signal it was and whichever process received it."""


class ShoestringError(Exception):
    """An error whose message says in one line what went wrong and where; `hint` says what to do."""

    code: ClassVar[int] = 2  # exit code of errors that a restart cannot fix

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    def __str__(self) -> str:
        return super().__str__() + (f" (hint: {self.hint})" if self.hint else "")

    def parts(self) -> list[str]:
        """[class name, message, hint], from which `from_parts` builds the same error on another rank."""
        return [type(self).__name__, super().__str__(), self.hint]

    @staticmethod
    def from_parts(parts: list[str], prefix: str = "") -> ShoestringError:
        return globals().get(parts[0], ShoestringError)(prefix + parts[1], hint=parts[2])


class ConfigError(ShoestringError):
    """The run file, a flag, or an argument is wrong."""


class ConflictError(ConfigError):
    """Two features claim the same seam or resource; raised before anything is allocated."""


class DataError(ShoestringError):
    """The corpus, a tokenizer or a token file is unusable."""


class WorldError(ShoestringError):
    """Processes, devices or links differ from what the user asked for."""


class PeerError(WorldError):
    """A rank, or the connection to it, was lost while the ranks were working together."""

    code = 75  # EX_TEMPFAIL of sysexits.h: a restart may succeed


class CheckpointError(ShoestringError):
    """A saved state cannot be written, found or read."""


class NonFiniteError(ShoestringError):
    """The loss became NaN or infinite."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """The hint for a mistyped `name`: the most similar of the `valid` names, or all of them if none is similar."""
    close = difflib.get_close_matches(name, names := sorted(valid), n=1, cutoff=0.6)
    return f"did you mean `{close[0]}`?" if close else f"valid: {', '.join(names)}"


def nearest_path(path: Path, *, folders: bool = False) -> str:
    """Suggest a path for a mistyped one: the most similar name in the same folder; empty if no name is similar.

    Args:
        folders: whether to suggest only folders.
    """
    with suppress(OSError):
        names = [there.name for there in path.parent.iterdir() if there.is_dir() or not folders]
        if close := difflib.get_close_matches(path.name, names, n=1):
            return str(path.parent / close[0])
    return ""
