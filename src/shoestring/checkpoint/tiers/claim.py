"""Claims the right to write a run's checkpoints, which only one start of the run has at a time.

A kernel lock on the folder keeps a second start of the run out as long as the process with the lock exists, even if
that process is stopped. Locks on this host's slots do the same as long as any process has the slots mapped. If hosts
share a folder on which locks do not work, a start reads the history before it renames or deletes anything, and ends if
another start has taken over. A run never resumes from checkpoints that the replaced start commits later, because the
history does not list that start's epoch.
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
    """Claims, on one rank, the right to write checkpoints; methods with an argument `group` are collectives.

    Args:
        disk: folder of the run's checkpoints.
        memory: folder of all slots of the run in this host's memory.
    """

    def __init__(self, world: World, disk: Disk, memory: Path) -> None:
        self.world, self.disk, self.memory = world, disk, memory
        self.known: History | None = None
        """History that was in the folder when the folder was claimed; None if there was none."""
        self.damaged = False
        """Whether the folder's history exists but cannot be read."""
        self.history: History | None = None
        """The history of this start of the run; None until the start has begun."""
        self.commits = False
        """Whether this rank commits checkpoints to its folder; exactly one of the ranks that share a folder does."""
        self.shared: bool | None = None
        """Whether all hosts share one folder; None until this is known."""
        self.unrecorded = ""
        """Reason why the history cannot be written; without a history, no run could resume from checkpoints in memory.
        The reason is empty if the history can be written."""
        self.replaced = False
        """Whether another start of the run has taken over the folder."""
        self._token = ""
        self._lock: Lock | None = None
        self._presence: Lock | None = None

    def take(self, group: RankGroup) -> None:
        """Claim the folder, unless this start has already claimed it, and read the folder's history.

        Raises:
            CheckpointError: a process of another start of the run still exists; raised on all ranks.
        """
        self._token = self._token or str(group.all_gather(secrets.token_hex(8))[0])
        self._lock_folder(group)
        _agreed(group, tried(self._take_memory) if self.world.local_rank == 0 else None)
        # All processes of earlier starts have ended. Now each process of this start creates and locks a file.
        if self._presence is None or not self._presence.stands:
            with suppress(OSError, ShoestringError):
                check_private(self.memory, 2)
                path = self.memory / f"{LOCK}-{self._token}-{self.world.rank}"
                self._presence = self.disk.files.lock(path, self._says)
        self.known, self.damaged = newest(group, self.disk.folder if self.world.local_rank == 0 else None)

    @property
    def _says(self) -> str:
        return f"process {os.getpid()} on {socket.gethostname()} {self._token}"

    def _lock_folder(self, group: RankGroup) -> None:
        """Lock each folder of checkpoints by one of the ranks that share the folder. The first host locks first,
        because other hosts may share its folder."""
        first = self._grab() if self.world.first else None
        self.unrecorded = str(_agreed(group, first)[0] or "")
        if self.unrecorded:
            self.shared = None
            return
        looks, sees, problem = self.world.local_rank == 0, True, None
        if looks and not self.world.first:
            # This host shares the folder of the first rank if the lock file contains this start's token.
            sees = False
            with suppress(OSError):
                sees = self._token.encode() in read_regular(self.disk.folder / LOCK, 1000)
            problem = None if sees else self._grab()
        self.shared = all(group.all_gather(sees))
        self.commits = self.world.first or (looks and not self.shared)
        self.unrecorded = next((str(reason) for reason in _agreed(group, problem) if reason), "")

    def _grab(self) -> str | list[str] | None:
        """Lock the folder.

        Returns:
            None if this process has locked the folder. If another process has locked the folder, the result is a list
            of a message and a hint, with which all ranks refuse to start. If the folder cannot be locked for another
            reason, the result is a message.
        """
        if self._lock is not None and self._lock.stands:
            return None
        if self._lock is not None:
            self._lock.release()
        try:
            self.disk.files.folder(self.disk.folder)
            self._lock = self.disk.files.lock(self.disk.folder / LOCK, self._says)
        except BlockingIOError as error:
            return _in_use(self.disk.folder, error)
        except OSError as error:
            return system_error(error)
        return None

    def _take_memory(self) -> list[str] | None:
        """Wait until no process of an earlier start of the run has this host's slots mapped.

        Returns:
            None, or a list of a message and a hint if such a process still exists.
        """
        for path in sorted(self.memory.glob(f"{LOCK}-*")):
            if not path.name.startswith(f"{LOCK}-{self._token}-"):
                try:
                    self.disk.files.lock(path, self._says).release(remove=True)
                except BlockingIOError as error:
                    return _in_use(self.memory, error)
        return None

    def begin(self, group: RankGroup, restored: CheckpointId | None, others: Collection[CheckpointId]) -> None:
        """Record this start of the run as a new epoch in the run's history, and write the history.

        Args:
            restored: the checkpoint from which the start resumes; None for a new run.
            others: all checkpoints that exist.
        """
        starts = [checkpoint.start for checkpoint in others]
        starts += [self.known.epoch.start] if self.known else []
        uid = secrets.token_hex(4)
        history = History.following(self.known, restored, others, max(starts, default=-1) + 1, uid)
        self.history = History.loads(
            str(group.all_gather(history.dumps().decode())[0]).encode(), "what the first rank sent"
        )
        self.disk.run, self.disk.guard = self.history.run, self.guard
        self.record(group)

    def record(self, group: RankGroup) -> None:
        """Write the history to each folder of checkpoints."""
        assert self.history is not None
        if self.shared is None:
            self._lock_folder(group)
        if self.unrecorded and self.shared is None:
            return
        failed = tried(self._write) if self.commits else None
        self.unrecorded = next((str(reason) for reason in group.all_gather(failed) if reason), "")

    def _write(self) -> None:
        assert self.history is not None
        self.disk.files.replace(self.disk.folder / HISTORY, self.history.dumps())

    def guard(self) -> None:
        """Raise OSError if another start has taken over. If somebody has emptied the folder, claim it again."""
        if not self.commits or self.history is None:
            return
        try:
            current = History.read(self.disk.folder)
        except CheckpointError:  # treat a damaged history like a missing history, and write it again
            current = None
        if current is not None and current.epoch == self.history.epoch and current.run == self.history.run:
            return
        if current is None and not isinstance(problem := self._grab(), list):
            if problem:
                raise OSError(errno.EIO, problem, str(self.disk.folder))
            self._write()
            return
        self.replaced = True
        raise OSError(errno.ESTALE, "another start of this run has taken over", str(self.disk.folder))

    def release(self) -> None:
        """Release the locks. If this start has not begun, remove its lock file, and then the folder if the folder is
        empty."""
        if self._lock is not None:
            self._lock.release(remove=self.history is None)
            if self.history is None:
                with suppress(OSError):
                    self.disk.folder.rmdir()
        if self._presence is not None:
            self._presence.release(remove=True)
            with suppress(OSError):  # fails while other files are in the folder
                self.memory.rmdir()
        self._lock = self._presence = None


def newest(group: RankGroup, folder: Path | None) -> tuple[History | None, bool]:
    """Read the histories on all hosts; a collective.

    Args:
        folder: this host's folder of checkpoints, on the rank that reads it; None on other ranks.

    Returns:
        The newest history of the run that most hosts have recorded, or None; and whether all existing histories are
        damaged.
    """
    own, damaged = None, False
    if folder is not None:
        try:
            own = History.read(folder)
        except CheckpointError as error:
            log.debug("%s", error)
            damaged = True
    gathered = group.all_gather([own.dumps().decode() if own else "", damaged])
    histories = [History.loads(str(text).encode(), "what a rank sent") for text, _ in gathered if text]
    runs = [history.run for history in histories]
    known = max(
        histories, key=lambda history: (runs.count(history.run), history.epoch.start, history.epoch.uid), default=None
    )
    return known, known is None and any(damaged for _, damaged in gathered)


def is_locked(folder: Path) -> bool:
    """Whether a process holds the lock of a folder of checkpoints; also if the lock cannot be opened."""
    if not (folder / LOCK).exists():
        return False
    try:
        lock = Lock.of(folder / LOCK)
    except OSError:
        return True
    if lock is not None:
        lock.release()
    return lock is None


def _in_use(folder: Path, error: BlockingIOError) -> list[str]:
    """Return the message and hint of the error for a folder that another process has locked."""
    process = str(error.strerror).rpartition(" ")[0] or str(error.strerror)
    return [
        f"`{folder}` is in use by {process}",
        "another start of this run is still alive: end it, or wait until it ends",
    ]


def _agreed(group: RankGroup, value: object) -> list[object]:
    """All-gather a value; if any rank's value is a list of message and hint, raise CheckpointError on all ranks."""
    gathered = group.all_gather(value)
    for answer in gathered:
        if isinstance(answer, list):
            raise CheckpointError(answer[0], hint=answer[1])
    return gathered
