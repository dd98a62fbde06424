"""Identities of checkpoints, and the records (manifests on disk, seals in memory) that list their part files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePath
from typing import Any

from shoestring.checkpoint.format.checksum import CHUNK, crc32
from shoestring.checkpoint.format.part import Part
from shoestring.core.errors import CheckpointError
from shoestring.storage.guarded import read_regular

FORMAT = 3
"""Number of the format that `Tiered` writes. Format 2, which does not name the run, can also be read. Format 1 is the
format of `Plain`, with a single file per checkpoint."""
READS = (2, FORMAT)
LIMIT = 100_000_000  # maximum size of a record in bytes: enough for the checksums of about 30 TB
_MOST_RANKS = 1 << 20


@dataclass(frozen=True, order=True)
class CheckpointId:
    """Identity of a checkpoint: its step, and the start of the run that trained this step."""

    step: int
    start: int
    """Number of the start of the run, counted from 0. If a later start repeats the step, that checkpoint has a
    different identity."""
    uid: str
    """Random identity of the start of the run, because independent starts may have the same number."""
    ranks: int = field(compare=False)
    local: int = field(compare=False)
    """Number of ranks per host."""
    run: str = field(default="", compare=False)
    """Identity of the run; empty in checkpoints of format 2."""

    @property
    def name(self) -> str:
        """Name of the checkpoint's folder on disk."""
        return f"step-{self.step:08d}-{self.start:04d}-{self.uid}"

    @property
    def identity(self) -> dict[str, Any]:
        """Fields that are repeated in the header of each part of the checkpoint."""
        return {"step": self.step, "start": self.start, "uid": self.uid, "run": self.run}

    def claims(self, part: Part) -> None:
        """Raise CheckpointError if the header of a part names another checkpoint."""
        for key, value in self.identity.items():
            if (stated := part.about.get(key, "" if key == "run" else value)) != value:
                raise CheckpointError(
                    f"`{part.name}` belongs to another checkpoint: its {key} is {stated!r}, not {value!r}"
                )


@dataclass(frozen=True)
class Entry:
    """Describes the file of a part: its name, its length in bytes, and the checksum of each chunk."""

    file: str
    nbytes: int
    sums: tuple[int, ...]


@dataclass(frozen=True)
class Record:
    """List of a checkpoint's parts in one place. In memory, the record is the seal of a slot; on disk, the record is
    the manifest of a folder."""

    checkpoint: CheckpointId
    parts: Mapping[str, Entry]
    """Maps the name of a part, which consists of its kind and rank, to its file."""
    notes: Mapping[str, Any] = field(default_factory=dict)

    def dumps(self) -> bytes:
        parts = {name: asdict(entry) for name, entry in self.parts.items()}
        content = {"format": FORMAT, "generation": asdict(self.checkpoint), "parts": parts, "notes": dict(self.notes)}
        body = json.dumps(content, sort_keys=True)
        return json.dumps({"body": body, "sum": crc32(body.encode())}).encode()

    @classmethod
    def loads(cls, data: bytes, source: str) -> Record:
        """Parse a record that `dumps` has encoded.

        Raises:
            CheckpointError: the data is damaged, has another format, or names files outside the record's folder.
        """
        try:
            outer = json.loads(data)
            if crc32(outer["body"].encode()) != outer["sum"]:
                raise CheckpointError(f"`{source}` is damaged: its checksum does not match")
            body = json.loads(outer["body"])
            if body["format"] not in READS:
                raise CheckpointError(f"`{source}` has format {body['format']!r}, this version reads {READS}")
            parts = {name: _parse_entry(fields) for name, fields in body["parts"].items()}
            checkpoint, notes = _parse_checkpoint(body["generation"]), body["notes"]
            if not isinstance(notes, dict):
                raise ValueError(f"its notes are {notes!r}, not a mapping")
            # The notes on parity are used later without further checks.
            ranks, lengths, marks = (
                list(map(_count, _listed(notes.get(name, [])))) for name in ("ranks", "lengths", "marks")
            )
            if not len(ranks) == len(lengths) == len(marks) or len(set(ranks)) != len(ranks) or len(ranks) == 1:
                raise ValueError(f"the parity of ranks {ranks} has {len(lengths)} lengths")
            return cls(checkpoint, parts, notes)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"`{source}` is not the record of a checkpoint, or damaged: {error}") from error

    @classmethod
    def read(cls, path: Path, *, private: bool = False) -> Record:
        try:
            return cls.loads(read_regular(path, LIMIT, private=private), str(path))
        except OSError as error:
            raise CheckpointError(f"cannot read `{path}`: {error.strerror}") from error

    def part(self, folder: Path, name: str) -> Part:
        """Open a part. Raises CheckpointError if the part's file is missing or has another length."""
        entry = self.parts[name]
        return Part.open(folder / entry.file, entry.nbytes, entry.sums)


def _parse_checkpoint(fields: Mapping[str, Any]) -> CheckpointId:
    step, start, ranks, local = (_count(fields[name]) for name in ("step", "start", "ranks", "local"))
    if not 1 <= local <= ranks <= _MOST_RANKS or ranks % local:
        raise ValueError(f"{ranks} ranks cannot have {local} per host")
    if not (isinstance(fields["uid"], str) and fields["uid"].isalnum()):
        raise ValueError(f"{fields['uid']!r} is not the identity of a start")
    run = fields.get("run", "")
    if not (isinstance(run, str) and (not run or run.isalnum())):
        raise ValueError(f"{run!r} is not the identity of a run")
    return CheckpointId(step, start, fields["uid"], ranks, local, run)


def _parse_entry(fields: Mapping[str, Any]) -> Entry:
    file = fields["file"]
    # A record may come from an untrusted source, so it must not name files outside its folder.
    if not isinstance(file, str) or PurePath(file).name != file or file in ("", ".", "..") or "\0" in file:
        raise ValueError(f"{file!r} is not the name of a file in its folder")
    nbytes, sums = _count(fields["nbytes"]), tuple(map(_count, _listed(fields["sums"])))
    if len(sums) != -(-nbytes // CHUNK):
        raise ValueError(f"{len(sums)} checksums for {nbytes} bytes")
    return Entry(file, nbytes, sums)


def _listed(value: Any) -> Sequence[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r} is not a list")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 60:
        raise ValueError(f"{value!r} is not a valid number")
    return value
