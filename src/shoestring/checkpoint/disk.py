"""Generations on disk: one folder each, whole once its manifest is in it under its final name."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoestring.checkpoint.checksum import sums
from shoestring.checkpoint.files import Files
from shoestring.checkpoint.generation import Entry, Generation, Record
from shoestring.core.errors import CheckpointError

log = logging.getLogger("shoestring")

MANIFEST = "manifest.json"
LATEST = "latest"  # a hint for people; what is there is found by looking
MARK = ".loading-"  # of the generation that is being loaded; see `attempts`


@dataclass
class Disk:
    """The folder of a run's generations."""

    folder: Path
    files: Files
    _rooted: bool = field(default=False, init=False)

    def aside(self, generation: Generation) -> Path:
        """Where a generation is written before it is committed."""
        return self.folder / f".{generation.name}.tmp"

    def write(self, generation: Generation, parts: Mapping[str, Tensor]) -> dict[str, Entry]:
        """Write some of a generation's parts, make them durable, and read them back: older saves are deleted for them.

        Raises:
            OSError: as `Files.write`; or what was written is not what is there.
        """
        aside = self.aside(generation)
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
        aside, final = self.aside(record.generation), self.folder / record.generation.name
        data = record.dumps()
        self.files.replace(aside / MANIFEST, data)
        self.files.reread(aside / MANIFEST, sums(torch.frombuffer(bytearray(data), dtype=torch.uint8)))
        self.files.rename(aside, final)
        self.files.sync(self.folder)
        self._root()
        with suppress(OSError):
            self.files.replace(self.folder / LATEST, final.name.encode(), durable=False)
        with suppress(OSError):
            self.clean()

    def _root(self) -> None:
        """Make the folders above durable, once, whoever made them: without them all is lost with the power."""
        if not self._rooted:
            for above in self.folder.absolute().parents:
                with suppress(OSError):  # those that are not ours
                    self.files.sync(above)
            self._rooted = True

    def abort(self, generation: Generation) -> None:
        """Leave nothing of a generation that could not be written."""
        self.files.remove(self.aside(generation))

    def retire(self, records: Iterable[Path]) -> None:
        """Delete generations: the manifest first, so that a half-deleted one is none."""
        for folder in records:
            with suppress(OSError):
                self.files.unlink(folder / MANIFEST)
                self.files.sync(folder)
                self.files.remove(folder)

    def clean(self) -> None:
        """Remove what saves that were cut short have left; for when no other one is under way."""
        for path in self.folder.glob(".step-*.tmp"):
            self.files.remove(path)
        for pattern in (f".{LATEST}.*.tmp", ".shared-*", f"{MARK}*"):
            for path in self.folder.glob(pattern):
                self.files.unlink(path)
        for path in self.folder.glob("step-*"):
            if path.is_dir() and not (path / MANIFEST).exists():
                self.files.remove(path)


def manifests(folder: Path) -> list[tuple[Path, Record]]:
    """The committed generations in a folder, newest first; those whose manifest is damaged are passed over."""
    found = []
    for path in folder.glob("step-*"):
        if (path / MANIFEST).is_file():
            try:
                found.append((path, Record.read(path / MANIFEST)))
            except CheckpointError as error:
                log.warning("skipping %s", error)
    return sorted(found, key=lambda pair: pair[1].generation, reverse=True)


def checked(folder: Path, record: Record) -> dict[str, Any]:
    """Read all of a generation's parts; {"parts", "bytes"}.

    Raises:
        CheckpointError: the first that is missing or damaged.
    """
    for name in record.parts:
        part = record.part(folder, name)
        part.verify()
        _ = part.about, part.pieces
    return {"parts": len(record.parts), "bytes": sum(entry.nbytes for entry in record.parts.values())}
