"""The files of a run folder that are sent to the hub, and the key by which the hub knows the run."""

from __future__ import annotations

import os
import re
import stat
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shoestring.core.errors import ConfigError
from shoestring.report.folder_check import check_run_folder
from shoestring.report.trackers import remember
from shoestring_hub.protocol import CHECKPOINTS, KEY, LOG, fault_of_path

_LEFT = re.compile(r"\..*\.[0-9a-f]{8}\.(tmp|former)(/|$)|\.lock$")
"""Names of temporary files: files that are still being written, and lock files."""


@dataclass(frozen=True)
class Listing:
    """The files of a run folder: the paths to send, and for each file that is left out a line with the reason."""

    paths: tuple[str, ...]
    left_out: tuple[str, ...]


def key_of(folder: Path) -> str:
    """The key of the run in a folder; drawn at random when the run first contacts a hub, and stored in the folder.

    Raises:
        ConfigError: the folder is not a run folder, or its key is malformed.
    """
    check_run_folder(folder, ("run.toml", LOG))
    key = remember(folder, "hub", lambda: uuid.uuid4().hex)
    if not KEY.fullmatch(key):
        raise ConfigError(f"{folder / 'trackers.json'}: `hub` is not the key of a run", hint="remove that entry")
    return key


def list_files(folder: Path, *, checkpoints: bool) -> Listing:
    """List the files to send, without the log; symbolic links and other files that are not regular are left out."""
    paths, left_out = [], []
    for path in sorted(_walk(folder, folder, checkpoints)):
        name = os.fsencode(path.relative_to(folder)).decode("utf-8", "surrogateescape")
        if name == LOG or any(_LEFT.match(part) for part in path.relative_to(folder).parts):
            continue
        mode = path.lstat().st_mode if path.exists() or path.is_symlink() else 0
        if stat.S_ISREG(mode) and not (fault := fault_of_path(name)):
            paths.append(name)
        elif mode:
            left_out.append(f"left out: {name}: {fault if stat.S_ISREG(mode) else 'it is not a regular file'}")
    return Listing(tuple(paths), tuple(left_out))


def _walk(folder: Path, root: Path, checkpoints: bool) -> Iterator[Path]:
    with os.scandir(folder) as entries:
        for entry in entries:
            path = folder / entry.name
            if not entry.is_dir(follow_symlinks=False):
                yield path
            elif checkpoints or path != root / CHECKPOINTS.rstrip("/"):
                yield from _walk(path, root, checkpoints)
