"""The right to write a run's checkpoints: one start of the run has it at a time.

A lock of the kernel on the folder keeps a second start out for as long as the process lives that holds it, stopped or
not; and so does one on this host's slots for each process that has them mapped. Where a folder is shared by hosts
between which locks do not work, the history tells a start that another one has taken over: before it gives anything
its final name or deletes anything, and in any case before anything of it is resumed.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import socket
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from shoestring.checkpoint.format.history import HISTORY, History
from shoestring.checkpoint.format.manifest import CheckpointId
from shoestring.checkpoint.tiers.disk import Disk
from shoestring.checkpoint.tiers.file_acts import Lock, system_error, tried
from shoestring.checkpoint.tiers.rank_group import RankGroup
from shoestring.checkpoint.tiers.slots import check_private
from shoestring.core.errors import CheckpointError, ShoestringError
from shoestring.core.world import World
from shoestring.storage.guarded import read_regular

log = logging.getLogger("shoestring")

LOCK = "lock"


class Claim:
    """One rank's part in it; methods that take a group are collectives.

    Args:
        memory: the folder of all of the run's slots on this host.
    """

    def __init__(self, world: World, disk: Disk, memory: Path) -> None:
        self.world, self.disk, self.memory = world, disk, memory
        self.known: History | None = None
        """What the folder said when it was claimed."""
        self.history: History | None = None
        """Of this start, once it has begun."""
        self.commits = False
        """Whether this rank writes manifests in its folder: on each folder that ranks see, one does."""
        self.shared: bool | None = None
        """Whether all hosts see one folder; None while that is not known."""
        self.unrecorded = ""
        """Why the history is not written; without it nothing in memory would be resumed."""
        self.replaced = False
        """Whether another start has taken over."""
        self._token = ""
        self._lock: Lock | None = None
        self._presence: Lock | None = None

    def take(self, group: RankGroup) -> None:
        """Get the right, or keep it; and find out what the folder says.

        Raises:
            CheckpointError: on all ranks: another start of the run still lives.
        """
        self._token = self._token or str(group.all_gather(secrets.token_hex(8))[0])
        self._lock_folder(group)
        others = None
        if self.world.local_rank == 0:
            others = tried(self._take_memory)
        _agreed(group, others)
        if self._presence is None or not self._presence.stands:  # each process for itself, once those before are gone
            with suppress(OSError, ShoestringError):
                check_private(self.memory, 2)
                path = self.memory / f"{LOCK}-{self._token}-{self.world.rank}"
                self._presence = self.disk.files.lock(path, self._says)
        self.known = newest(group, self.disk.folder if self.world.local_rank == 0 else None)

    @property
    def _says(self) -> str:
        return f"process {os.getpid()} on {socket.gethostname()} {self._token}"

    def _lock_folder(self, group: RankGroup) -> None:
        """Lock each folder that ranks see, by one rank; the first host's before the others, which may have the same."""
        first = self._grab() if self.world.first else None
        self.unrecorded = str(_agreed(group, first)[0] or "")
        if self.unrecorded:
            self.shared = None
            return
        looks, sees, mine = self.world.local_rank == 0, True, None
        if looks and not self.world.first:
            sees = self._sees_first()
            mine = None if sees else self._grab()
        self.shared = all(group.all_gather(sees))
        self.commits = self.world.first or (looks and not self.shared)
        self.unrecorded = next((str(each) for each in _agreed(group, mine) if each), "")

    def _sees_first(self) -> bool:
        try:
            return self._token.encode() in read_regular(self.disk.folder / LOCK, 1000)
        except OSError:
            return False

    def _grab(self) -> str | list[str] | None:
        """Why the folder could not be locked, if it could not; in a list where that is because it is locked already."""
        if self._lock is not None and self._lock.stands:
            return None
        if self._lock is not None:
            self._lock.release()

        try:
            self.disk.files.folder(self.disk.folder)
            self._lock = self.disk.files.lock(self.disk.folder / LOCK, self._says)
        except BlockingIOError as error:
            return _held(self.disk.folder, error)
        except OSError as error:
            return system_error(error)
        return None

    def _take_memory(self) -> list[str] | None:
        """Make sure that no process of an earlier start can still write to the slots of this host."""
        for path in sorted(self.memory.glob(f"{LOCK}-*")):
            if not path.name.startswith(f"{LOCK}-{self._token}-"):
                try:
                    self.disk.files.lock(path, self._says).release(remove=True)
                except BlockingIOError as error:
                    return _held(self.memory, error)
        return None

    def begin(self, group: RankGroup, restored: CheckpointId | None, others: Collection[CheckpointId]) -> None:
        """Begin a start that continues a checkpoint, or nothing: the history says so from here on."""
        starts = [each.start for each in others]
        starts += [self.known.epoch.start] if self.known else []
        uid = secrets.token_hex(4)
        history = History.following(self.known, restored, others, max(starts, default=-1) + 1, uid)
        self.history = History.loads(
            str(group.all_gather(history.dumps().decode())[0]).encode(), "what the first rank sent"
        )
        self.disk.run, self.disk.guard = self.history.run, self.guard
        self.record(group)

    def record(self, group: RankGroup) -> None:
        """Write the history, on each folder that ranks see."""
        assert self.history is not None
        if self.shared is None:
            self._lock_folder(group)
        if self.unrecorded and self.shared is None:
            return
        failed = tried(self._write) if self.commits else None
        self.unrecorded = next((str(each) for each in group.all_gather(failed) if each), "")

    def _write(self) -> None:
        assert self.history is not None
        self.disk.files.replace(self.disk.folder / HISTORY, self.history.dumps())

    def guard(self) -> None:
        """Raise OSError unless this start is still the newest one. An emptied folder is claimed again."""
        if not self.commits or self.history is None:
            return
        try:
            current = History.read(self.disk.folder)
        except CheckpointError:  # damaged
            current = None
        if current is not None and current.epoch == self.history.epoch and current.run == self.history.run:
            return
        if current is None and not isinstance(held := self._grab(), list):
            if held:
                raise OSError(errno.EIO, held, str(self.disk.folder))
            self._write()
            return
        self.replaced = True
        raise OSError(errno.ESTALE, "another start of this run has taken over", str(self.disk.folder))

    def release(self) -> None:
        """Give the right back; a folder that nothing was written to is left as it was."""
        if self._lock is not None:
            self._lock.release(remove=self.history is None)
            if self.history is None:
                with suppress(OSError):
                    self.disk.folder.rmdir()
        if self._presence is not None:
            self._presence.release(remove=True)
            with suppress(OSError):  # unless something is left in it
                self.memory.rmdir()
        self._lock = self._presence = None


def newest(group: RankGroup, folder: Path | None) -> History | None:
    """The history that most hosts have, the newest of those; for a folder of this host, if this rank looks for it."""
    own = None
    if folder is not None:
        try:
            own = History.read(folder)
        except CheckpointError as error:
            log.debug("%s", error)
    gathered = [str(text) for text in group.all_gather(own.dumps().decode() if own else None) if text]
    histories = [History.loads(text.encode(), "what a rank sent") for text in gathered]
    runs = [history.run for history in histories]
    return max(
        histories, key=lambda history: (runs.count(history.run), history.epoch.start, history.epoch.uid), default=None
    )


def _held(folder: Path, error: BlockingIOError) -> list[str]:
    process = str(error.strerror).rpartition(" ")[0] or str(error.strerror)
    return [f"`{folder}` is in use by {process}", "another start of this run still lives: end it, or wait for its end"]


def _agreed(group: RankGroup, value: object) -> list[object]:
    """What every rank found; raised on all of them as an error if it is a list on one."""
    gathered = group.all_gather(value)
    for answer in gathered:
        if isinstance(answer, list):
            raise CheckpointError(answer[0], hint=answer[1])
    return gathered
