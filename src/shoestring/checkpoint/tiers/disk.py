"""Generations on disk: one folder each, whole once its manifest is in it under its final name."""

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
LATEST = "latest"  # a hint for people; what is there is found by looking
MARK = ".loading-"  # of the checkpoint that is being loaded; see `attempts`
NAME = re.compile(r"step-\d{8,}-\d{4,}-[0-9a-z]+")  # a checkpoint's
ASIDE = re.compile(rf"\.{NAME.pattern}(\.[0-9a-f]{{16}})?\.tmp")  # that is not committed, or being deleted
UNDER_WAY, CRASH = ".shoestring-attempt-", ".shoestring-crash-"  # of an attempt to load; see there, too
MARKS = re.compile(rf"({'|'.join(map(re.escape, (MARK, UNDER_WAY, CRASH)))})\d+")
_LEFT = re.compile(r"\.(latest|history\.json)\.[0-9a-f]{8}\.tmp")


def _unguarded() -> None:
    """What nobody else can be writing."""


@dataclass
class Disk:
    """The folder of a run's checkpoints."""

    folder: Path
    files: Files
    run: str = ""
    """Marks what is not committed as this run's."""
    guard: Callable[[], None] = _unguarded
    """Raises OSError where another start has taken over; asked before anything gets its final name or is deleted."""
    _rooted: bool = field(default=False, init=False)

    def aside(self, checkpoint: CheckpointId) -> Path:
        """Where a checkpoint is written before it is committed."""
        return self._aside(checkpoint.name)

    def _aside(self, name: str) -> Path:
        return self.folder / (f".{name}.{self.run}.tmp" if self.run else f".{name}.tmp")

    def write(self, checkpoint: CheckpointId, parts: Mapping[str, Tensor]) -> dict[str, Entry]:
        """Write some of a checkpoint's parts, make them durable, and read them back: older checkpoints are deleted for
        them.

        Raises:
            OSError: as `Files.write`; or what was written is not what is there.
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
        """Make what was written valid: the manifest last, then the folder's name.

        Raises:
            OSError: as `write`; what has its final name by then may be found, and is whole.
        """
        aside, final = self.aside(record.checkpoint), self.folder / record.checkpoint.name
        data = record.dumps()
        self.files.replace(aside / MANIFEST, data)
        self.files.reread(aside / MANIFEST, sums(torch.frombuffer(bytearray(data), dtype=torch.uint8)))
        self.guard()
        self.files.rename(aside, final)
        self.files.sync(self.folder)
        self._root()
        with suppress(OSError):
            if self._may_point():
                self.files.replace(self.folder / LATEST, final.name.encode(), durable=False)
        with suppress(OSError):
            self.clean()

    def note(self, record: Record) -> None:
        """Add notes to a checkpoint that has been committed.

        Raises:
            OSError: as `write`.
            CheckpointError: its manifest is missing or damaged.
        """
        path = self.folder / record.checkpoint.name / MANIFEST
        there = Record.read(path)
        self.guard()
        self.files.replace(path, Record(there.checkpoint, there.parts, {**there.notes, **record.notes}).dumps())

    def _may_point(self) -> bool:
        """Whether `latest` is this package's to write: other programs have a file of that name, too."""
        path = self.folder / LATEST
        if path.is_symlink():
            return False
        try:
            return bool(NAME.fullmatch(read_regular(path, 200).decode(errors="replace")))
        except FileNotFoundError:
            return True
        except OSError:
            return False

    def _root(self) -> None:
        """Make the folders above durable, once, whoever made them: without them all is lost with the power."""
        if not self._rooted:
            for above in self.folder.absolute().parents:
                with suppress(OSError):  # those that are not ours
                    self.files.sync(above)
            self._rooted = True

    def abort(self, checkpoint: CheckpointId) -> None:
        """Leave nothing of a checkpoint that could not be written."""
        self.files.remove(self.aside(checkpoint))

    def retire(self, folders: Iterable[Path]) -> None:
        """Delete checkpoints: each gets the name of one that is not committed first, so a half-deleted one is none.

        What only links to a checkpoint elsewhere is left alone.
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
        """Remove what interrupted checkpoints of this run have left, by their exact names; nobody else's files."""
        for path in self.folder.iterdir():
            name = path.name
            if path.is_symlink():
                continue
            if self.run and ASIDE.fullmatch(name) and name.endswith(f".{self.run}.tmp") and path.is_dir():
                self.files.remove(path)
            elif path.is_file() and (_LEFT.fullmatch(name) or MARKS.fullmatch(name)):
                self.files.unlink(path)


def manifests(folder: Path) -> list[tuple[Path, Record]]:
    """The committed checkpoints in a folder, newest first; those whose manifest is damaged are passed over."""
    records = []
    for path in folder.glob("step-*"):
        if (path / MANIFEST).is_file():
            try:
                records.append((path, Record.read(path / MANIFEST)))
            except CheckpointError as error:
                log.warning("skipping %s", error)
    return sorted(records, key=lambda pair: pair[1].checkpoint, reverse=True)


def checked(folder: Path, record: Record) -> dict[str, Any]:
    """Read all of a checkpoint's parts; {"parts", "bytes"}.

    Raises:
        CheckpointError: the first that is missing or damaged.
    """
    for name in record.parts:
        part = record.part(folder, name)
        part.verify()
        record.checkpoint.claims(part)
        _ = part.pieces
    return {"parts": len(record.parts), "bytes": sum(entry.nbytes for entry in record.parts.values())}
