"""Slots in a host's shared memory: they outlive the processes that filled them, and go with the host.

A slot is one file a part, which is mapped once and filled again and again (fresh pages cost eight times a copy), and a
seal that is put beside them when they are whole and taken away before they are filled again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from shoestring.checkpoint.format.checksum import sums
from shoestring.checkpoint.format.history import History
from shoestring.checkpoint.format.manifest import CheckpointId, Entry, Record
from shoestring.checkpoint.format.part import Draft, Form, mapped
from shoestring.checkpoint.tiers.file_acts import Files
from shoestring.core.errors import CheckpointError, ShoestringError
from shoestring.storage.guarded import open_regular, private_folder

if TYPE_CHECKING:
    from shoestring.checkpoint import Tiered
    from shoestring.core.world import World

ROUND = 1 << 20  # a slot's file is a multiple of this long: state that grows a little does not move it
SEAL = ".seal"
_LEVELS = 3  # of folders below the file system in memory: the user's, the run's, and the host's


def slots_folder(settings: Tiered, world: World, *, make: bool = True) -> Path:
    """Where this host's slots lie: by user, run (the folder of its checkpoints) and number of the host.

    Where the folder cannot be made, the level of memory is off, and says so.

    Raises:
        ShoestringError: what is there is another user's, or others may write to it.
    """
    run = hashlib.sha256(str(Path(settings.folder).resolve()).encode()).hexdigest()[:16]
    host = world.rank // world.local_size
    folder = Path(settings.memory, f"shoestring-{os.geteuid()}", run, f"host-{host}")
    with suppress(OSError):
        check_private(folder, make=make)
    return folder


def check_private(folder: Path, levels: int = _LEVELS, *, make: bool = True) -> None:
    """Make sure that a folder in memory, and those above it, are this user's alone, each time one may be created.

    Args:
        levels: of folders that are this user's: 3 down to the slots of a host, 2 down to those of a run.

    Raises:
        ShoestringError: what is there is another user's, or others may write to it.
        OSError: the folder cannot be made.
    """
    private_folder(folder.parents[levels - 1], *folder.parts[-levels:], make=make)


@dataclass(eq=False)
class Room:
    """Memory for a part, with the places in it that were filled last: the next time they are mostly the same."""

    data: Tensor
    """uint8, 1-d."""
    file: tuple[Path, int, int] | None = None
    """The path, device and inode of its file; None in memory of this process alone."""
    _form: Form | None = None
    _start: int = 0
    _places: list[Tensor] = field(default_factory=list)

    def places(self, form: Form, start: int) -> list[Tensor]:
        """Where pieces of this form go whose header ends at byte `start`."""
        if self._form is not form or self._start != start:
            self._form, self._start, self._places = form, start, form.views(self.data[start:])
        return self._places

    @property
    def stands(self) -> bool:
        """Whether its file is still where the next process will look for it."""
        if self.file is None:
            return True
        path, *file = self.file
        try:
            status = path.lstat()
        except OSError:
            return False
        return [status.st_dev, status.st_ino] == file


@dataclass(eq=False)
class Slot:
    """One slot; `stem` is the beginning of its files' names."""

    stem: Path
    files: Files
    sums: Callable[[Tensor, tuple[Path, int, int] | None], list[int]] = lambda data, _: sums(data)
    """Gives the checksums of bytes that are in a file (its path, device and inode), or in none."""
    checkpoint: CheckpointId | None = None
    """Of what is sealed in it."""
    lacking: str = ""
    """Why it does not outlive the process."""
    order: object = None
    """What a stager knows of what goes where, as long as the slot has its memory."""
    _no_room: str = ""
    _rooms: dict[str, Room] = field(default_factory=dict)
    _parts: dict[str, Tensor] = field(default_factory=dict)

    @property
    def seal_path(self) -> Path:
        return self.stem.with_name(self.stem.name + SEAL)

    def begin(self) -> None:
        """Break the seal: what is in the slot is gone from here on.

        Where it cannot be broken the sealed files stay as they are, and this process's own memory is filled.
        """
        self.checkpoint = None
        self._parts = {}
        try:
            self.files.unlink(self.seal_path)
        except OSError as error:
            self._no_room = f"cannot remove `{self.seal_path}`: {error.strerror}"
            self._drop_rooms()
        self.lacking = self._no_room

    def _drop_rooms(self) -> None:
        self._rooms.clear()
        self.order = None

    def resume(self, history: History) -> None:
        """Keep what is in the slot if this start continues it, and break its seal if not.

        An earlier one may be what the peers have, too, and so all there is when a host is lost before the next
        checkpoint."""
        record = sealed(self.seal_path)
        if record is not None and history.holds(record.checkpoint):
            self.checkpoint = record.checkpoint
        else:
            self.begin()

    def room(self, part: str, nbytes: int) -> Tensor:
        """Where a part of that many bytes goes: (nbytes,) uint8, mapped.

        Where the host's shared memory is full, it is this process's own: enough to write to disk from, gone with it.
        """
        self._parts[part] = self._room(part.partition("-")[0], nbytes).data[:nbytes]
        return self._parts[part]

    def reserve(self, sizes: Mapping[str, int]) -> None:
        """Make room for parts of so many bytes before they are there. For a slot that holds nothing."""
        for part, nbytes in sizes.items():
            self._room(part.partition("-")[0], nbytes)

    def _room(self, key: str, nbytes: int) -> Room:
        room = self._rooms.get(key)
        if room is None or len(room.data) < nbytes:
            room = self._rooms[key] = self._mapped(key, -(-max(nbytes, 1) // ROUND) * ROUND)
        return room

    def begin_part(self, part: str, draft: Draft) -> list[Tensor]:
        """Write a part's header; where its pieces go, in the draft's order."""
        draft.begin(self.room(part, draft.nbytes))
        return self._rooms[part.partition("-")[0]].places(draft.form, len(draft.header))

    def _mapped(self, key: str, nbytes: int) -> Room:
        path = self._path(key)
        if self._no_room:
            return Room(torch.empty(nbytes, dtype=torch.uint8))
        try:
            self.files.before("folder", path.parent)
            check_private(path.parent)  # another program may have removed it, and another user created it again
            self.files.before("reserve", path)
            with open_regular(path, private=True, write=True) as file:
                status = os.fstat(file.fileno())
                if status.st_blocks * 512 < nbytes:  # what an earlier process has reserved is there
                    os.posix_fallocate(file.fileno(), 0, nbytes)
                return Room(mapped(file, nbytes, writable=True), (path, status.st_dev, status.st_ino))
        except ShoestringError as error:
            self.lacking = self._no_room = error.parts()[1]
            return Room(torch.empty(nbytes, dtype=torch.uint8))
        except OSError as error:
            with suppress(OSError):
                path.unlink(missing_ok=True)
            self.lacking = self._no_room = f"no room for {nbytes / 1e6:.0f} MB in `{path.parent}`: {error.strerror}"
            return Room(torch.empty(nbytes, dtype=torch.uint8))

    def _path(self, key: str) -> Path:
        return self.stem.with_name(f"{self.stem.name}.{key}")

    def _file(self, key: str) -> tuple[Path, int, int] | None:
        return self._rooms[key].file if key in self._rooms else None

    def seal(self, checkpoint: CheckpointId, notes: Mapping[str, Any] | None = None) -> Record:
        """Say that everything is in it; checksums are of what it holds now."""
        parts = {
            name: Entry(self._path(key).name, len(data), tuple(self.sums(data, self._file(key))))
            for name, data in self._parts.items()
            for key in [name.partition("-")[0]]
        }
        record = Record(checkpoint, parts, notes or {})
        if not self.lacking and not all(room.stands for room in self._rooms.values()):
            self.lacking = f"what was in `{self.stem.parent}` has been removed by another program"
            self._drop_rooms()  # the next time there are new files
        if not self.lacking:
            try:
                self.files.replace(self.seal_path, record.dumps(), durable=False)
            except OSError as error:
                self.lacking = f"cannot write `{self.seal_path}`: {error.strerror}"
        self.checkpoint = checkpoint
        return record

    @property
    def stands(self) -> bool:
        """Whether what was sealed in it can still be found."""
        return self.seal_path.exists() and all(room.stands for room in self._rooms.values())

    def parts(self, kinds: Iterable[str]) -> dict[str, Tensor]:
        """The bytes of the parts of these kinds that are in it, by their names."""
        return {name: data for name, data in self._parts.items() if name.partition("-")[0] in kinds}

    def close(self, reason: str = "") -> None:
        """Remove its files, an earlier process's too; with a reason, this process's own memory is used from now on."""
        self.begin()
        with suppress(OSError):
            for path in self.stem.parent.glob(f"{self.stem.name}.*"):
                path.unlink(missing_ok=True)
        self._drop_rooms()
        self._no_room = self._no_room or reason


class Sealed(NamedTuple):
    """What a rank has sealed in its slots."""

    step: int = 0
    """The newest of them."""
    lasts: bool = True
    """Whether it outlives the process."""
    since: int = 0
    """The step from which on all of them do."""

    def then(self, step: int, lasts: bool) -> Sealed:
        """Once a further step is sealed."""
        return Sealed(step, lasts, self.since if self.lasts and lasts else step)


def oldest(slots: Sequence[Slot]) -> Slot:
    """The one to fill next: an empty one, or that with the oldest checkpoint."""
    return min(slots, key=lambda slot: (slot.checkpoint is not None, slot.checkpoint or ()))


def seals(folder: Path) -> Iterator[tuple[Path, Record]]:
    """The seals in a folder of slots; damaged ones are as if they were not there."""
    for path in sorted(folder.glob(f"*{SEAL}")):
        if (record := sealed(path)) is not None:
            yield path, record


def sealed(path: Path) -> Record | None:
    """What a seal says; None where it is missing, damaged, or another slot's."""
    try:
        record = Record.read(path, private=True)
    except CheckpointError:
        return None
    stem = path.name.removesuffix(SEAL)
    return record if all(entry.file.startswith(f"{stem}.") for entry in record.parts.values()) else None
