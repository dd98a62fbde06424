"""Slots hold checkpoints in a host's shared memory. This memory survives the processes that wrote the checkpoints, but
not the host.

A slot has a file for each kind of part, and a seal. The files are mapped once and refilled many times, because
allocating new pages takes eight times as long as a copy. The seal is a record of the parts, which is written once all
files are complete, and removed before the files are refilled.
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

from shoestring import figures
from shoestring.checkpoint.format.checksum import sums
from shoestring.checkpoint.format.history import History
from shoestring.checkpoint.format.manifest import CheckpointId, Entry, Record
from shoestring.checkpoint.format.part import Draft, Form, mapped
from shoestring.checkpoint.tiers.file_acts import Files
from shoestring.core.errors import CheckpointError, ShoestringError
from shoestring.planning.system import memory_or_disk
from shoestring.storage.guarded import open_regular, private_folder

if TYPE_CHECKING:
    from shoestring.checkpoint import Tiered
    from shoestring.core.world import World

ROUND = 1 << 20  # file lengths are rounded up to a multiple of this, so that growing state rarely needs a new file
SEAL = ".seal"
_LEVELS = 3  # number of nested folders for slots: the user's, the run's, and the host's


def slots_folder(settings: Tiered, world: World, *, make: bool = True) -> Path:
    """Return the folder of this host's slots, named by user, run (a hash of its folder of checkpoints) and index of the
    host. If the folder cannot be created, this function raises no error; later, the memory level is turned off with a
    warning.

    Raises:
        ShoestringError: the folder belongs to another user, or other users may write to it.
    """
    run = hashlib.sha256(os.fsencode(Path(settings.folder).resolve())).hexdigest()[:16]
    host = world.rank // world.local_size
    folder = Path(settings.memory_folder, f"shoestring-{os.geteuid()}", run, f"host-{host}")
    with suppress(OSError):
        check_private(folder, make=make)
    return folder


def check_private(folder: Path, levels: int = _LEVELS, *, make: bool = True) -> None:
    """Create a folder in memory, and check that only this user can write to it and to the folders above it.

    Args:
        levels: number of folders at the end of the path that must belong to this user: 3 for a host's folder of slots,
            2 for a run's folder.
        make: whether to create missing folders.

    Raises:
        ShoestringError: a folder belongs to another user, or other users may write to it.
        OSError: the folder cannot be created.
    """
    private_folder(folder.parents[levels - 1], *folder.parts[-levels:], make=make)


@dataclass(eq=False)
class Room:
    """Memory for a part, and the views of its pieces, which the next checkpoint can usually reuse."""

    data: Tensor
    """The memory as a tensor: uint8, 1-d."""
    file: tuple[Path, int, int] | None = None
    """Path, device and inode of the mapped file; None if the memory is this process's own."""
    _form: Form | None = None
    _start: int = 0
    _places: list[Tensor] = field(default_factory=list)

    def places(self, form: Form, start: int) -> list[Tensor]:
        """Return views of the pieces of a layout, in a part whose header ends at byte `start`."""
        if self._form is not form or self._start != start:
            self._form, self._start, self._places = form, start, form.views(self.data[start:])
        return self._places

    @property
    def stands(self) -> bool:
        """Whether the mapped file is still at its path, where a later process will search for it."""
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
    """One slot of a rank; `stem` is the common prefix of the paths of its files."""

    stem: Path
    files: Files
    sums: Callable[[Tensor, tuple[Path, int, int] | None], list[int]] = lambda data, _: sums(data)
    """Function that computes the checksums of bytes, given the bytes and their mapped file as (path, device, inode), or
    None without a file."""
    checkpoint: CheckpointId | None = None
    """The checkpoint in the slot; None if the slot's content is not complete."""
    lacking: str = ""
    """Reason why the content will not survive the end of the process; empty if the content will survive."""
    order: object = None
    """The stager's `CopyOrder` for this slot, valid as long as the slot keeps its memory."""
    overflow: Path | None = None
    """Folder on disk for a copy that neither shared memory nor this process's own memory has room for."""
    _no_room: str = ""
    _rooms: dict[str, Room] = field(default_factory=dict)
    _parts: dict[str, Tensor] = field(default_factory=dict)

    @property
    def seal_path(self) -> Path:
        return self.stem.with_name(self.stem.name + SEAL)

    def begin(self) -> None:
        """Remove the seal, so that the content of the slot is no longer valid and may be overwritten. If the seal
        cannot be removed, the files are not changed, and this process's own memory is used instead.
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
        """Keep the slot's content if its checkpoint is part of the run's history; otherwise remove the seal.
        Checkpoints older than the restored checkpoint are kept too. The reason is that peers may hold copies of an
        older checkpoint, which the run needs if a host is lost before the next checkpoint.
        """
        record = sealed(self.seal_path)
        if record is not None and history.holds(record.checkpoint):
            self.checkpoint = record.checkpoint
        else:
            self.begin()

    def room(self, part: str, nbytes: int) -> Tensor:
        """Return memory for a part, uint8 with shape (nbytes,), mapped from the slot's file. If the host's shared
        memory is full, the result is this process's own memory. From this memory, the part can still be written to
        disk, but the memory does not survive the process.
        """
        self._parts[part] = self._room(part.partition("-")[0], nbytes).data[:nbytes]
        return self._parts[part]

    def reserve(self, sizes: Mapping[str, int]) -> None:
        """Allocate memory for parts ahead of time. The slot must be empty.

        Args:
            sizes: maps the name of a part to its size in bytes.
        """
        for part, nbytes in sizes.items():
            self._room(part.partition("-")[0], nbytes)

    def _room(self, key: str, nbytes: int) -> Room:
        room = self._rooms.get(key)
        if room is None or len(room.data) < nbytes:
            room = self._rooms[key] = self._mapped(key, -(-max(nbytes, 1) // ROUND) * ROUND)
        return room

    def begin_part(self, part: str, draft: Draft) -> list[Tensor]:
        """Write a part's header; returns the views into which to copy the part's pieces, in the draft's order."""
        draft.begin(self.room(part, draft.nbytes))
        return self._rooms[part.partition("-")[0]].places(draft.form, len(draft.header))

    def _mapped(self, key: str, nbytes: int) -> Room:
        path = self._path(key)
        if self._no_room:
            return self._private(nbytes)
        try:
            self.files.before("folder", path.parent)
            check_private(path.parent)  # another user may have replaced the folder
            self.files.before("reserve", path)
            with open_regular(path, private=True, write=True) as file:
                status = os.fstat(file.fileno())
                if status.st_blocks * 512 < nbytes:  # unless an earlier process has already reserved the file's pages
                    os.posix_fallocate(file.fileno(), 0, nbytes)
                return Room(mapped(file, nbytes, writable=True), (path, status.st_dev, status.st_ino))
        except ShoestringError as error:
            self.lacking = self._no_room = error.parts()[1]
            return self._private(nbytes)
        except OSError as error:
            with suppress(OSError):
                path.unlink(missing_ok=True)
            self.lacking = self._no_room = f"no room for {figures.memory(nbytes)} in `{path.parent}`: {error.strerror}"
            return self._private(nbytes)

    def _private(self, nbytes: int) -> Room:
        """Allocate memory that does not survive this process: its own memory or, if that is short, a file in
        `overflow`."""
        return Room(torch.from_numpy(memory_or_disk(nbytes, self.overflow)))

    def _path(self, key: str) -> Path:
        return self.stem.with_name(f"{self.stem.name}.{key}")

    def _file(self, key: str) -> tuple[Path, int, int] | None:
        return self._rooms[key].file if key in self._rooms else None

    def seal(self, checkpoint: CheckpointId, notes: Mapping[str, Any] | None = None) -> Record:
        """Compute the checksums of the slot's content, and write the seal; returns the record in the seal."""
        parts = {
            name: Entry(self._path(key).name, len(data), tuple(self.sums(data, self._file(key))))
            for name, data in self._parts.items()
            for key in [name.partition("-")[0]]
        }
        record = Record(checkpoint, parts, notes or {})
        if not self.lacking and not all(room.stands for room in self._rooms.values()):
            self.lacking = f"another program has removed files from `{self.stem.parent}`"
            self._drop_rooms()  # so that the next checkpoint gets new files
        if not self.lacking:
            try:
                self.files.replace(self.seal_path, record.dumps(), durable=False)
            except OSError as error:
                self.lacking = f"cannot write `{self.seal_path}`: {error.strerror}"
        self.checkpoint = checkpoint
        return record

    @property
    def stands(self) -> bool:
        """Whether the seal and the files still exist, so that a later process would find the content."""
        return self.seal_path.exists() and all(room.stands for room in self._rooms.values())

    def parts(self, kinds: Iterable[str]) -> dict[str, Tensor]:
        """Return the parts of these kinds in the slot, as a mapping from name to bytes."""
        return {name: data for name, data in self._parts.items() if name.partition("-")[0] in kinds}

    def close(self, reason: str = "") -> None:
        """Remove the slot's files, including files of earlier processes.

        Args:
            reason: reason why the slot uses this process's own memory from now on; empty if it does not.
        """
        self.begin()
        with suppress(OSError):
            for path in self.stem.parent.glob(f"{self.stem.name}.*"):
                path.unlink(missing_ok=True)
        self._drop_rooms()
        self._no_room = self._no_room or reason


class Sealed(NamedTuple):
    """Summary of the checkpoints that a rank has sealed."""

    step: int = 0
    """Step of the newest sealed checkpoint."""
    lasts: bool = True
    """Whether the newest sealed checkpoint survives the end of the process."""
    since: int = 0
    """All checkpoints sealed since this step survive the end of the process."""

    def then(self, step: int, lasts: bool) -> Sealed:
        """Return the summary after the checkpoint of another step has been sealed."""
        return Sealed(step, lasts, self.since if self.lasts and lasts else step)


def oldest(slots: Sequence[Slot]) -> Slot:
    """Return the slot to fill next: an empty slot if there is one, otherwise the slot with the oldest checkpoint."""
    return min(slots, key=lambda slot: (slot.checkpoint is not None, slot.checkpoint or ()))


def seals(folder: Path) -> Iterator[tuple[Path, Record]]:
    """Yield the undamaged seals in a folder of slots, as (path, record)."""
    for path in sorted(folder.glob(f"*{SEAL}")):
        if (record := sealed(path)) is not None:
            yield path, record


def sealed(path: Path) -> Record | None:
    """Read the record in a seal; returns None if the seal is missing, is damaged, or names files of another slot."""
    try:
        record = Record.read(path, private=True)
    except CheckpointError:
        return None
    stem = path.name.removesuffix(SEAL)
    return record if all(entry.file.startswith(f"{stem}.") for entry in record.parts.values()) else None
