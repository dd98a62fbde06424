"""Replicates sealed checkpoints to other hosts, writes them to disk, and deletes old checkpoints, in the background.

This work runs on one thread with its own process group, in the same order on all ranks.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shoestring.checkpoint.format.history import History
from shoestring.checkpoint.format.layout import KINDS, PRIVATE, REST, SHARE
from shoestring.checkpoint.format.manifest import CheckpointId, Entry, Record
from shoestring.checkpoint.tiers import budget, peer_copies
from shoestring.checkpoint.tiers.claim import Claim
from shoestring.checkpoint.tiers.disk import manifests
from shoestring.checkpoint.tiers.file_acts import tried
from shoestring.checkpoint.tiers.rank_group import RankGroup
from shoestring.checkpoint.tiers.save_schedule import DISK, LEVELS, MEMORY, PEERS, CheckpointSchedule
from shoestring.checkpoint.tiers.slots import Slot, oldest
from shoestring.checkpoint.tiers.waits import BackgroundThread, result_of
from shoestring.core.errors import CheckpointError
from shoestring.core.trace import span
from shoestring.core.world import World

if TYPE_CHECKING:
    from shoestring.checkpoint import Tiered

log = logging.getLogger("shoestring")

KEEPING = "copying a checkpoint to peers or writing it to disk"
REBUILT = "rebuilt-"
"""Name prefix of slots that hold rebuilt parts of lost ranks, which are needed until the next checkpoint is safe."""


def kind_of(reason: str) -> str:
    """Remove the file names, which differ between checkpoints, from the reason of a failure."""
    return re.sub(r"`[^`]*`", "", reason)


@dataclass
class Standing:
    """State of the levels: the newest step that is safe at each level, and the reason if a level does not work."""

    speaks: bool
    """Whether this rank logs warnings that concern all ranks."""
    speaks_for_host: bool
    """Whether this rank logs warnings that concern only its host."""
    safe: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LEVELS, 0))
    """Maps a level to the newest step with a complete checkpoint of all ranks at this level; 0 if there is none."""
    lacking: dict[str, str] = field(default_factory=lambda: dict.fromkeys(LEVELS, ""))
    """Maps a level to the reason why it does not work; empty if the level works."""

    def lacks(self, level: str, reason: str) -> None:
        """Record whether a level works, and warn once for each reason if it does not.

        Args:
            reason: reason why the level does not work; empty if the level works.
        """
        if reason and kind_of(reason) != kind_of(self.lacking[level]):
            says = self.speaks_for_host if level == MEMORY else self.speaks
            message = "no checkpoints to %s: %s; earlier ones are intact, and training continues"
            log.log(logging.WARNING if says else logging.DEBUG, message, level, reason)
        self.lacking[level] = reason


@dataclass(eq=False)
class Keeper:
    """Replicates this rank's sealed checkpoints to peers, and writes them to disk."""

    world: World
    settings: Tiered
    folder: Path
    """Folder of this host's slots."""
    claim: Claim
    schedule: CheckpointSchedule
    standing: Standing
    pinned: Slot | None = None
    """This rank's slot with the checkpoint of which other hosts hold copies; this slot must not be refilled."""

    def __post_init__(self) -> None:
        self.group = RankGroup.join(self.world, "copying a checkpoint to peers or to disk")
        self.disk, self.files = self.claim.disk, self.claim.disk.files
        self.held = [Slot(self.folder / f"held-{self.world.local_rank}-{index}", self.files) for index in range(2)]
        self._thread = BackgroundThread("checkpoint-keep")
        self._keeping: Future[None] | None = None
        self._reads: Slot | None = None
        self._nbytes = 0  # size of the checkpoint that is being copied or written, in bytes
        self._left: list[Slot] = []
        """Slots of earlier starts of the run that this start does not fill; freed once a newer checkpoint is safe."""

    def begin(self, history: History, own: list[Slot]) -> None:
        """Determine, at the beginning of a start of the run, which checkpoints the slots hold."""
        for slot in self.held:
            slot.resume(history)
        held = max((slot.checkpoint for slot in self.held if slot.checkpoint), default=None)
        self.pinned = next((slot for slot in own if slot.checkpoint and slot.checkpoint == held), None)
        if self.world.local_rank == 0:
            counts = {"own": len(own), "held": len(self.held) if self.schedule.has_peers else 0}
            ranks = range(self.world.local_size)
            filled = {f"{kind}-{rank}-{at}" for kind, count in counts.items() for rank in ranks for at in range(count)}
            stems = {path.name.partition(".")[0] for path in self.folder.glob("*.*")}
            left = sorted(stem for stem in stems - filled if stem.startswith((*counts, REBUILT)))
            self._left = [Slot(self.folder / stem, self.files) for stem in left]

    # -- for the training thread --------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return self._keeping is None or self._keeping.done()

    @property
    def reads(self) -> Slot | None:
        """The slot that is being read and so must not be filled; None if no slot is being read."""
        return None if self.idle else self._reads

    def keep(self, sealing: Future[str], slot: Slot, levels: set[str], record: Record) -> None:
        """Start to copy the content of a slot to peers or to disk, once the slot is sealed.

        Args:
            sealing: future that resolves to an empty text once the slot is sealed, or to the reason why its content
                must not be used.
            levels: PEERS, DISK or both.
            record: identity and notes of the checkpoint.
        """
        self._reads, self._nbytes = slot, sum(map(len, slot.parts(KINDS).values()))
        self._keeping = self._thread.submit(self._keep, sealing, slot, frozenset(levels), record)

    def answer_calls(self) -> None:
        """Free the copies held for other hosts if other processes need the memory; later copies may lease the memory
        again."""
        if self.idle and (reason := budget.called_back(self.world.memory, budget.HELD)):
            self._free_held()
            self.standing.lacks(PEERS, reason)

    def _free_held(self) -> None:
        for slot in self.held:
            slot.close()
        self.world.memory.give(budget.HELD)

    def drain(self) -> None:
        """Wait until no checkpoint is being copied to peers or written to disk."""
        if self._keeping is not None:
            result_of(self._keeping, KEEPING, self._nbytes, 4 * self.group.patience)

    def close(self, *, forget: bool) -> None:
        """Stop the thread. If `forget`, free the copies held for other hosts."""
        self._thread.stop(KEEPING, self._nbytes, 4 * self.group.patience)
        for slot in self.held if forget else ():
            slot.close()
        self.group.close()

    # -- on the other thread ------------------------------------------------------------------------------------------

    def _any(self, reason: str) -> str:
        """Return the first non-empty reason of all ranks; a collective."""
        return next(filter(None, self.group.all_gather(reason)), "")

    def _keep(self, sealing: Future[str], slot: Slot, levels: frozenset[str], record: Record) -> None:
        try:
            if self._any(result_of(sealing, "sealing a checkpoint in this host's memory", self._nbytes)):
                return
            if PEERS in levels:
                self._replicate(slot, record.checkpoint)
            if DISK in levels:
                self._persist(slot, record)
            if max(self.standing.safe[PEERS], self.standing.safe[DISK]):
                while self._left:
                    self._left.pop().close()
        except (RuntimeError, ConnectionError) as error:  # a rank is lost; the training thread will also raise an error
            level = PEERS if PEERS in levels else DISK
            self.standing.lacks(level, (str(error).splitlines() or [""])[0])

    def _replicate(self, slot: Slot, checkpoint: CheckpointId) -> None:
        began, local = time.perf_counter(), self.world.local_size
        (part,), held = slot.parts([PRIVATE]).values(), oldest(self.held)
        if reason := self._refused(slot, part):
            self.standing.lacks(PEERS, reason)
            return
        with span("replicate", "wire", len(part)):
            if self.settings.redundancy == "parity":
                parity = peer_copies.parity_set(self.group, local, self.settings.set_size, part)
                peer_copies.encode(self.group, parity, part, held, checkpoint)
            else:
                peer_copies.copy(self.group, local, part, held, checkpoint)
        reason = self._any(held.lacking or slot.lacking)
        self.standing.lacks(PEERS, reason)
        if reason:  # not all ranks have this copy: overwrite it next, and keep the last complete copy
            held.checkpoint = None
            return
        self.pinned, self.standing.safe[PEERS] = slot, checkpoint.step
        self.schedule.took(PEERS, time.perf_counter() - began)

    def _refused(self, slot: Slot, part: Tensor) -> str:
        """Return the reason why no rank sends its part to peers; empty if every rank can send and has room for a copy.
        A collective."""
        nbytes = max(self.group.all_gather(len(part)))
        if self.settings.redundancy == "parity":
            nbytes = -(-nbytes // (min(self.settings.set_size, self.world.hosts) - 1))
        reason = budget.lacking(self.world.memory, budget.HELD, len(self.held), nbytes)
        if reason:
            self._free_held()
        return self._any(slot.lacking or reason)

    def _persist(self, slot: Slot, record: Record) -> None:
        """Write this rank's parts to disk, agree that all ranks have written their parts, and commit the checkpoint. If
        a rank fails, the checkpoint is removed from disk, and training continues.
        """
        began, checkpoint = time.perf_counter(), record.checkpoint
        if self.claim.unrecorded:
            self.standing.lacks(DISK, self.claim.unrecorded)
            return
        if self.standing.safe[DISK] == checkpoint.step:  # the training loop ended directly after a checkpoint
            reason = ""
            if self.claim.commits:
                try:
                    self.disk.note(record)
                except (OSError, CheckpointError) as error:
                    reason = str(error)
            if not self._any(reason):  # only notes had to be added
                return
        kinds = (PRIVATE, SHARE) if self.claim.shared else (PRIVATE, SHARE, REST)
        parts = slot.parts(kinds)
        with span("persist", "disk", sum(map(len, parts.values()))):
            written = tried(lambda: self.disk.write(checkpoint, parts))
            answer = written if isinstance(written, str) else {name: vars(entry) for name, entry in written.items()}
            answers = self.group.all_gather(answer)
            reason = next((answer for answer in answers if isinstance(answer, str)), "")
            if not reason:
                reason = self._commit(record, answers)
        if reason:
            tried(lambda: self.disk.abort(checkpoint))
        else:
            self.standing.safe[DISK] = checkpoint.step
        self.standing.lacks(DISK, reason)
        self.schedule.took(DISK, time.perf_counter() - began)

    def _commit(self, record: Record, parts_of_ranks: list[Mapping[str, Any]]) -> str:
        """Commit a checkpoint that all ranks have written; returns on all ranks an empty string or the reason of a
        failure."""
        ranks = range(self.world.size)
        if not self.claim.shared:
            host = self.world.rank // self.world.local_size
            ranks = range(host * self.world.local_size, (host + 1) * self.world.local_size)
        reason = ""
        if self.claim.commits:
            parts = {name: Entry(**entry) for rank in ranks for name, entry in parts_of_ranks[rank].items()}
            committed = tried(lambda: self.disk.commit(Record(record.checkpoint, parts, record.notes)))
            reason = committed if isinstance(committed, str) else ""
        reason = self._any(reason)
        if self.claim.commits and not reason:
            tried(lambda: self._retire(record.checkpoint))
        return reason

    def _retire(self, newest: CheckpointId) -> None:
        """Delete old checkpoints: all but the newest `keep` checkpoints of the run's history, and abandoned
        checkpoints.

        Abandoned checkpoints are deleted once their steps have been repeated. Checkpoints of other runs are not
        deleted.
        """
        committed = [(path, record.checkpoint) for path, record in manifests(self.disk.folder)]
        assert self.claim.history is not None
        line = [path for path, checkpoint in committed if self.claim.history.holds(checkpoint)]
        repeated = [path for path, checkpoint in committed if self.claim.history.superseded(checkpoint, newest.step)]
        self.disk.retire((*repeated, *line[self.settings.keep :]))
