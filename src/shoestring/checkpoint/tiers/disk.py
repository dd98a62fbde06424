"""Stores checkpoints on disk. Each checkpoint is a folder, which is valid once it has its manifest and its final
name."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoestring.checkpoint.format.checksum import sums
from shoestring.checkpoint.format.manifest import CheckpointId, Entry, Record
from shoestring.checkpoint.tiers.file_acts import Files
from shoestring.core.errors import CheckpointError
from shoestring.storage.guarded import read_regular

log = logging.getLogger("shoestring")

MANIFEST = "manifest.json"
LATEST = "latest"  # file that names the newest checkpoint for people; not used by the code
MARK = ".loading-"  # prefix of files that count attempts to load; see `attempts`
NAME = re.compile(r"step-\d{8,}-\d{4,}-[0-9a-z]+")  # name of a checkpoint's folder
ASIDE = re.compile(rf"\.{NAME.pattern}(\.[0-9a-f]{{16}})?\.tmp")  # name of a folder that is being written or deleted
UNDER_WAY, CRASH = ".shoestring-attempt-", ".shoestring-crash-"  # prefixes of files of an attempt; see `attempts`
MARKS = re.compile(rf"({'|'.join(map(re.escape, (MARK, UNDER_WAY, CRASH)))})\d+")
_LEFT = re.compile(r"\.(latest|history\.json)\.[0-9a-f]{8}\.tmp")


def _unguarded() -> None:
    """Do nothing; the `guard` of a folder to which no other start of the run can write."""


@dataclass
class Disk:
    """Writes, commits and deletes checkpoints in the folder of a run's checkpoints."""

    folder: Path
    files: Files
    run: str = ""
    """Identity of the run, which is part of the names of uncommitted folders."""
    guard: Callable[[], None] = _unguarded
    """Raises OSError if another start of the run has taken over; called before a folder is committed or deleted."""
    _rooted: bool = field(default=False, init=False)

    def aside(self, checkpoint: CheckpointId) -> Path:
        """Return the folder into which a checkpoint is written before the commit."""
        return self._aside(checkpoint.name)

    def _aside(self, name: str) -> Path:
        return self.folder / (f".{name}.{self.run}.tmp" if self.run else f".{name}.tmp")

    def write(self, checkpoint: CheckpointId, parts: Mapping[str, Tensor]) -> dict[str, Entry]:
        """Write parts of a checkpoint, sync them to disk, and read them back to compare checksums. The parts are read
        back because older checkpoints are deleted once this checkpoint is committed.

        Returns:
            A mapping from the name of a part to its file.

        Raises:
            OSError: as for `Files.write`, or the bytes on disk differ from the bytes that were written.
        """
        aside = self.aside(checkpoint)
        self.files.folder(aside)
        entries = {}
        for name, data in parts.items():
            entries[name] = Entry(f"{name}.safetensors", len(data), tuple(sums(data)))
            self.files.write(aside / entries[name].file, data)
            self.files.reread(aside / entries[name].file, entries[name].sums)
        self.files.sync(aside)
        return entries

    def commit(self, record: Record) -> None:
        """Commit a checkpoint whose parts have been written: write the manifest, then give the folder its final name.

        Raises:
            OSError: as for `write`. If the folder has its final name despite the error, the checkpoint is complete.
        """
        aside, final = self.aside(record.checkpoint), self.folder / record.checkpoint.name
        data = record.dumps()
        self.files.replace(aside / MANIFEST, data)
        self.files.reread(aside / MANIFEST, sums(torch.frombuffer(bytearray(data), dtype=torch.uint8)))
        self.guard()
        self.files.rename(aside, final)
        self.files.sync(self.folder)
        if not self._rooted:  # once, so that no folder on the path to the checkpoints is lost in a power failure
            for above in self.folder.absolute().parents:
                with suppress(OSError):  # this user may not be allowed to open some folders
                    self.files.sync(above)
            self._rooted = True
        latest = self.folder / LATEST
        with suppress(OSError):
            try:
                ours = not latest.is_symlink() and bool(
                    NAME.fullmatch(read_regular(latest, 200).decode(errors="replace"))
                )
            except FileNotFoundError:
                ours = True
            if ours:  # another program may have a file of the same name
                self.files.replace(latest, final.name.encode(), durable=False)
        with suppress(OSError):
            self.clean()

    def note(self, record: Record) -> None:
        """Add notes to a checkpoint that has been committed.

        Raises:
            OSError: as for `write`.
            CheckpointError: the checkpoint's manifest is missing or damaged.
        """
        path = self.folder / record.checkpoint.name / MANIFEST
        there = Record.read(path)
        self.guard()
        self.files.replace(path, Record(there.checkpoint, there.parts, {**there.notes, **record.notes}).dumps())

    def abort(self, checkpoint: CheckpointId) -> None:
        """Remove a checkpoint that could not be written completely."""
        self.files.remove(self.aside(checkpoint))

    def retire(self, folders: Iterable[Path]) -> None:
        """Delete checkpoints. Each folder is first renamed like an uncommitted folder, so that a half-deleted folder is
        not valid. Symbolic links to checkpoints in other places are not touched.
        """
        for folder in folders:
            with suppress(OSError):
                self.guard()
                if folder.is_symlink() or not folder.is_dir():
                    continue
                if not ASIDE.fullmatch(folder.name):
                    aside = self._aside(folder.name)
                    self.files.rename(folder, aside)
                    self.files.sync(self.folder)
                    folder = aside
                self.files.remove(folder)

    def clean(self) -> None:
        """Remove files of this run's interrupted checkpoints. Only files whose names match exactly are removed."""
        for path in self.folder.iterdir():
            name = path.name
            if path.is_symlink():
                continue
            if self.run and ASIDE.fullmatch(name) and name.endswith(f".{self.run}.tmp") and path.is_dir():
                self.files.remove(path)
            elif path.is_file() and (_LEFT.fullmatch(name) or MARKS.fullmatch(name)):
                self.files.unlink(path)


def manifests(folder: Path) -> list[tuple[Path, Record]]:
    """List the committed checkpoints in a folder, with the newest first; omits checkpoints with damaged manifests."""
    records = []
    for path in folder.glob("step-*"):
        if (path / MANIFEST).is_file():
            try:
                records.append((path, Record.read(path / MANIFEST)))
            except CheckpointError as error:
                log.warning("skipping %s", error)
    return sorted(records, key=lambda pair: pair[1].checkpoint, reverse=True)


def checked(folder: Path, record: Record) -> dict[str, Any]:
    """Read and verify all parts of a checkpoint; returns the number of parts as "parts", and their total size as
    "bytes".

    Raises:
        CheckpointError: a part is missing or damaged.
    """
    for name in record.parts:
        part = record.part(folder, name)
        part.verify()
        record.checkpoint.claims(part)
        _ = part.pieces
    return {"parts": len(record.parts), "bytes": sum(entry.nbytes for entry in record.parts.values())}
