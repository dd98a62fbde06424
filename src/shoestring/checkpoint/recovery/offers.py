"""Gathers the list of all checkpoint files in the memory and on the disks of all hosts, from which `decide` chooses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoestring.checkpoint.format.manifest import CheckpointId, Entry, Record
from shoestring.checkpoint.format.part import Part
from shoestring.checkpoint.tiers.disk import MANIFEST, manifests
from shoestring.checkpoint.tiers.plain import OneFiles, one_files
from shoestring.checkpoint.tiers.rank_group import RankGroup
from shoestring.checkpoint.tiers.slots import seals
from shoestring.core.errors import CheckpointError
from shoestring.core.world import World

log = logging.getLogger("shoestring")

MEMORY, PEERS, DISK = LEVELS = ("memory", "peers", "disk")


@dataclass(frozen=True)
class Wish:
    """The user's request: to resume from the newest checkpoint of a run ("auto"), or from checkpoints at a path."""

    disk: Path
    """Folder of checkpoints on disk."""
    memory: Path | None = None
    """Folder of the run's slots in this host's memory; None if the user named a path, which is always a path on
    disk."""
    only: Path | None = None
    """Folder of the only checkpoint to use; None if the user did not name a checkpoint."""

    @property
    def auto(self) -> bool:
        return self.memory is not None

    @classmethod
    def of_path(cls, path: Path) -> Wish:
        """Build the request for a path, which may be a run folder, a folder of checkpoints, the folder of one
        checkpoint, or a file.

        Raises:
            CheckpointError: the path cannot be read.
        """
        try:
            if (path / MANIFEST).exists():
                return cls(path.parent, only=path)
            return cls(path / "checkpoints" if (path / "checkpoints").is_dir() else path)
        except OSError as error:
            raise CheckpointError(f"cannot look for checkpoints in `{path}`: {error.strerror}") from error


@dataclass(frozen=True)
class Offer:
    """A file that one host offers: it holds a part of a checkpoint, and ranks of this host can read it."""

    checkpoint: CheckpointId
    host: int
    level: str
    """Place of the file on the host: MEMORY or DISK."""
    path: str
    part: str
    entry: Entry
    notes: tuple[tuple[str, Any], ...] = ()

    @property
    def key(self) -> tuple[int, str]:
        return self.host, self.path

    @property
    def held(self) -> bool:
        """Whether the file is a copy that the host holds for a rank of another host."""
        return Path(self.path).name.startswith("held-")

    def open(self) -> Part:
        """Memory-map the file.

        Raises:
            CheckpointError: the file is missing, or has another length.
        """
        return Part.open(Path(self.path), self.entry.nbytes, self.entry.sums, slot=self.level == MEMORY)


@dataclass(frozen=True)
class Available:
    """All checkpoint files that the hosts offer; equal on all ranks."""

    offers: tuple[Offer, ...] = ()
    unusable: tuple[str, ...] = ()
    """Names of committed checkpoints on disk whose manifests cannot be read."""
    one_files: tuple[OneFiles, ...] = ()
    """One summary for each host that has checkpoints of `Plain`."""
    unseen: str = ""
    """Reason why a host could not search for checkpoints; empty if all hosts could."""


def gather(world: World, group: RankGroup, wish: Wish) -> Available:
    """Search for checkpoints on the first rank of each host, and share the results; a collective."""
    offers, unusable, files, unseen = list[Offer](), dict[str, None](), list[OneFiles](), ""
    for rank, seen in enumerate(group.all_gather(look(wish) if world.local_rank == 0 else None)):
        if seen is None:
            continue
        unseen = unseen or seen["unseen"]
        unusable |= dict.fromkeys(seen["unusable"])
        files += [OneFiles(**seen["one_files"])] if seen["one_files"] else []
        for level, folder, text in seen["records"]:
            record = Record.loads(text.encode(), folder)
            notes = tuple(record.notes.items())
            for name, entry in record.parts.items():
                path = str(Path(folder) / entry.file)
                offers.append(Offer(record.checkpoint, rank // world.local_size, level, path, name, entry, notes))
    return Available(tuple(offers), tuple(sorted(unusable)), tuple(files), unseen)


def look(wish: Wish) -> dict[str, Any]:
    """Search for checkpoints on this host; returns the result as JSON values for `gather`.

    If a folder cannot be read, `unseen` has the reason, and the folder's checkpoints count as damaged.
    """
    seen: dict[str, Any] = {"records": [], "unusable": [], "one_files": None, "unseen": ""}

    def note(level: str, root: Path, records: Callable[[Path], Iterable[tuple[Path, Record]]]) -> None:
        try:
            seen["records"] += [[level, str(path), record.dumps().decode()] for path, record in records(root)]
        except OSError as error:
            seen["unseen"] = f"cannot look for checkpoints in `{root}`: {error.strerror or error}"
            log.warning("%s", seen["unseen"])

    if wish.memory is not None:
        note(MEMORY, wish.memory, lambda root: ((path.parent, record) for path, record in seals_under(root)))
    note(DISK, wish.disk, manifests)
    if wish.auto and not seen["unseen"]:
        committed = {path.name for path in wish.disk.glob("step-*") if (path / MANIFEST).exists()}
        seen["unusable"] = sorted(committed - {Path(folder).name for _, folder, _ in seen["records"]})
        files = one_files(wish.disk)
        seen["one_files"] = asdict(files) if files.count else None
    return seen


def seals_under(memory: Path) -> Iterator[tuple[Path, Record]]:
    """Yield the seals of all slots of a run on this host."""
    for folder in sorted(path for path in memory.glob("host-*") if path.is_dir()):
        yield from seals(folder)
