"""A checkpoint: the state of all ranks after one step; and the records that say where parts of it lie."""

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
"""Of everything that `Tiered` writes. Version 0.1 reads 3, 2 (without the run), and 1 (one file a checkpoint, by
`Plain`)."""
READS = (2, FORMAT)
LIMIT = 100_000_000  # bytes of the longest record: the checksums of some 30 TB
_MOST_RANKS = 1 << 20


@dataclass(frozen=True, order=True)
class CheckpointId:
    """Which one: the steps done, and the start of the run that did the last of them."""

    step: int
    start: int
    """Counts the starts of a run; a step that was done again is another checkpoint."""
    uid: str
    """Drawn at each start, for starts that knew nothing of each other."""
    ranks: int = field(compare=False)
    local: int = field(compare=False)
    """Ranks of one host."""
    run: str = field(default="", compare=False)
    """Identity of the run; empty in checkpoints of format 2."""

    @property
    def name(self) -> str:
        """Of its folder on disk."""
        return f"step-{self.step:08d}-{self.start:04d}-{self.uid}"

    @property
    def identity(self) -> dict[str, Any]:
        """What the header of each of its parts says of it."""
        return {"step": self.step, "start": self.start, "uid": self.uid, "run": self.run}

    def claims(self, part: Part) -> None:
        """Raise CheckpointError if a part says of itself that it belongs to another checkpoint."""
        for key, value in self.identity.items():
            if (stated := part.about.get(key, "" if key == "run" else value)) != value:
                raise CheckpointError(
                    f"`{part.name}` belongs to another checkpoint: its {key} is {stated!r}, not {value!r}"
                )


@dataclass(frozen=True)
class Entry:
    """A file that a part lies in."""

    file: str
    nbytes: int
    sums: tuple[int, ...]


@dataclass(frozen=True)
class Record:
    """What lies in one place of one checkpoint: the seal of a slot in memory, or the manifest of a folder on disk."""

    checkpoint: CheckpointId
    parts: Mapping[str, Entry]
    """By the part's name, which is its kind and rank."""
    notes: Mapping[str, Any] = field(default_factory=dict)

    def dumps(self) -> bytes:
        parts = {name: asdict(entry) for name, entry in self.parts.items()}
        content = {"format": FORMAT, "generation": asdict(self.checkpoint), "parts": parts, "notes": dict(self.notes)}
        body = json.dumps(content, sort_keys=True)
        return json.dumps({"body": body, "sum": crc32(body.encode())}).encode()

    @classmethod
    def loads(cls, data: bytes, source: str) -> Record:
        """The inverse of `dumps`.

        Raises:
            CheckpointError: it is damaged, of another format, or names files outside of its folder.
        """
        try:
            outer = json.loads(data)
            if crc32(outer["body"].encode()) != outer["sum"]:
                raise CheckpointError(f"`{source}` is damaged: its content is not what was written")
            body = json.loads(outer["body"])
            if body["format"] not in READS:
                raise CheckpointError(f"`{source}` has format {body['format']!r}, this version reads {READS}")
            parts = {name: _entry(each) for name, each in body["parts"].items()}
            return cls(_checkpoint(body["generation"]), parts, _notes(body["notes"]))
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"`{source}` is no record of a checkpoint, or damaged: {error}") from error

    @classmethod
    def read(cls, path: Path, *, private: bool = False) -> Record:
        try:
            return cls.loads(read_regular(path, LIMIT, private=private), str(path))
        except OSError as error:
            raise CheckpointError(f"cannot read `{path}`: {error.strerror}") from error

    def part(self, folder: Path, name: str) -> Part:
        """A part of it, opened; CheckpointError where its file is missing or has another length."""
        entry = self.parts[name]
        return Part.open(folder / entry.file, entry.nbytes, entry.sums)


def _checkpoint(fields: Mapping[str, Any]) -> CheckpointId:
    numbers = [_count(fields[name]) for name in ("step", "start", "ranks", "local")]
    step, start, ranks, local = numbers
    if not 1 <= local <= ranks <= _MOST_RANKS or ranks % local:
        raise ValueError(f"{ranks} ranks, {local} of a host")
    if not (isinstance(fields["uid"], str) and fields["uid"].isalnum()):
        raise ValueError(f"{fields['uid']!r} for a start")
    run = fields.get("run", "")
    if not (isinstance(run, str) and (not run or run.isalnum())):
        raise ValueError(f"{run!r} for a run")
    return CheckpointId(step, start, fields["uid"], ranks, local, run)


def _entry(fields: Mapping[str, Any]) -> Entry:
    file = fields["file"]
    if not isinstance(file, str) or PurePath(file).name != file or file in ("", ".", "..") or "\0" in file:
        raise ValueError(f"{file!r} for a file in its folder")
    nbytes, sums = _count(fields["nbytes"]), tuple(map(_count, _listed(fields["sums"])))
    if len(sums) != -(-nbytes // CHUNK):
        raise ValueError(f"{len(sums)} checksums for {nbytes} bytes")
    return Entry(file, nbytes, sums)


def _notes(notes: Any) -> dict[str, Any]:
    """Those that are read are checked: of whom there is parity."""
    if not isinstance(notes, dict):
        raise ValueError(f"{notes!r} for notes")
    names = ("ranks", "lengths", "marks")
    ranks, lengths, marks = (list(map(_count, _listed(notes.get(name, [])))) for name in names)
    if not len(ranks) == len(lengths) == len(marks) or len(set(ranks)) != len(ranks) or len(ranks) == 1:
        raise ValueError(f"parity of ranks {ranks} with {len(lengths)} lengths")
    return notes


def _listed(value: Any) -> Sequence[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r} for a list")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 60:
        raise ValueError(f"{value!r} for a count")
    return value
