"""Records which folders this user trusts; the records are stored outside these folders.

Each record is a small file named by a digest, in the folder `$XDG_STATE_HOME/shoestring/trusted`, which is private to
this user. The digest covers a folder's description and the code that the description names. So a copy of the folder is
trusted like the original, and a folder whose content has changed is not. Several processes may write records without a
lock.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from shoestring.core.errors import ShoestringError
from shoestring.storage.guarded import state_folder
from shoestring.storage.whole import write_atomic


def remember(digest: str, place: Path) -> None:
    """Record that this user trusts any folder with this digest; `place` is the folder that the digest was computed
    from.

    Raises:
        OSError, ShoestringError: the record cannot be written, or its folder is not private to this user.
    """
    file = _record(digest, make=True)
    if not file.exists():
        write_atomic(file, json.dumps({"place": os.fspath(place.resolve())}).encode())


def is_remembered(digest: str) -> bool:
    """Whether a record shows that this user trusts folders with this digest."""
    with suppress(OSError, ShoestringError):
        return _record(digest, make=False).is_file()
    return False


def forget(digest: str) -> bool:
    """Remove the record of a digest; returns whether there was one."""
    with suppress(OSError, ShoestringError):
        _record(digest, make=False).unlink()
        return True
    return False


def _record(digest: str, *, make: bool) -> Path:
    """Return the path of the record for a digest; the file may not exist."""
    return state_folder("trusted", make=make) / f"{digest}.json"
