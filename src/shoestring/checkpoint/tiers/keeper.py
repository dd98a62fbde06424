"""What becomes of a sealed checkpoint beside training: kept by peers, written to disk, committed; older ones retired.

All of it is on one thread, with a process group of its own, in the same order on all ranks.
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
"""Begins the names of slots with parts of lost ranks, which are needed until the next checkpoint."""


def kind_of(reason: str) -> str:
    """A reason without the files that it names, which are others each time."""
    return re.sub(r"`[^`]*`", "", reason)


@dataclass
class Standing:
    """How safe the run is."""

    speaks: bool
    """Whether this rank says what all ranks know."""
    speaks_for_host: bool
    """Whether it says what all ranks of its host know."""
    safe: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LEVELS, 0))
    """The newest step that is safe at each level, on all ranks."""
    lacking: dict[str, str] = field(default_factory=lambda: dict.fromkeys(LEVELS, ""))
    """Why a level does not work."""

    def lacks(self, level: str, reason: str) -> None:
        """Say why a level does not work, once for each reason; that it does with an empty one."""
        if reason and kind_of(reason) != kind_of(self.lacking[level]):
            says = self.speaks_for_host if level == MEMORY else self.speaks
            said = "no checkpoints to %s: %s; earlier ones are intact, and training continues"
            log.log(logging.WARNING if says else logging.DEBUG, said, level, reason)
        self.lacking[level] = reason


@dataclass(eq=False)
class Keeper:
    """One rank's part in keeping checkpoints beyond this host's own memory."""

    world: World
    settings: Tiered
    folder: Path
    """Of this host's slots."""
    claim: Claim
    schedule: CheckpointSchedule
    standing: Standing
    pinned: Slot | None = None
    """The own slot whose checkpoint the peers have, too."""

    def __post_init__(self) -> None:
        self.group = RankGroup.join(self.world, "copying a checkpoint to peers or to disk")
        self.disk, self.files = self.claim.disk, self.claim.disk.files
        self.held = [Slot(self.folder / f"held-{self.world.local_rank}-{index}", self.files) for index in range(2)]
        self._thread = BackgroundThread("checkpoint-keep")
        self._keeping: Future[None] | None = None
        self._reads: Slot | None = None
        self._nbytes = 0  # of what is kept
        self._left: list[Slot] = []
        """Slots of earlier starts that nobody fills any more; what is in them is needed until a newer one is safe."""

    def begin(self, history: History, own: list[Slot]) -> None:
        """Begin a start of the run."""
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
        """The slot that must not be filled now."""
        return None if self.idle else self._reads

    def keep(self, sealing: Future[str], slot: Slot, levels: set[str], record: Record) -> None:
        """Begin to keep what is in a slot at some levels, once it is sealed.

        Args:
            sealing: gives why it must not be kept, if anything speaks against it.
            record: its checkpoint and notes.
        """
        self._reads, self._nbytes = slot, sum(map(len, slot.parts(KINDS).values()))
        self._keeping = self._thread.submit(self._keep, sealing, slot, frozenset(levels), record)

    def answer_calls(self) -> None:
        """Free what is held for other hosts, if others on this host need its memory; what is kept next may return."""
        if self.idle and (reason := budget.called_back(self.world.memory, budget.HELD)):
            self._free_held()
            self.standing.lacks(PEERS, reason)

    def _free_held(self) -> None:
        for each in self.held:
            each.close()
        self.world.memory.give(budget.HELD)

    def drain(self) -> None:
        """Wait until nothing is under way."""
        if self._keeping is not None:
            result_of(self._keeping, KEEPING, self._nbytes, 4 * self.group.patience)

    def close(self, *, forget: bool) -> None:
        """Stop the thread; and give the memory back that it held for others."""
        self._thread.stop(KEEPING, self._nbytes, 4 * self.group.patience)
        for slot in self.held if forget else ():
            slot.close()
        self.group.close()

    # -- on the other thread ------------------------------------------------------------------------------------------

    def _any(self, reason: str) -> str:
        """The reason of the first rank that has one; a collective."""
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
        except (RuntimeError, ConnectionError) as error:  # a rank is lost, which training will notice, too
            level = PEERS if PEERS in levels else DISK
            self.standing.lacks(level, (str(error).splitlines() or [""])[0])

    def _replicate(self, slot: Slot, checkpoint: CheckpointId) -> None:
        began, local = time.perf_counter(), self.world.local_size
        (part,), held = slot.parts([PRIVATE]).values(), oldest(self.held)
        if reason := self._refused(slot, part):
            self.standing.lacks(PEERS, reason)
            return
        with span("replicate", "wire", len(part)):
            if self.settings.peers == "parity":
                of = peer_copies.parity_set(self.group, local, self.settings.set_size, part)
                peer_copies.encode(self.group, of, part, held, checkpoint)
            else:
                peer_copies.copy(self.group, local, part, held, checkpoint)
        reason = self._any(held.lacking or slot.lacking)
        self.standing.lacks(PEERS, reason)
        if reason:  # some have it, not all: the next one takes its place, not that of the last that all have
            held.checkpoint = None
            return
        self.pinned, self.standing.safe[PEERS] = slot, checkpoint.step
        self.schedule.took(PEERS, time.perf_counter() - began)

    def _refused(self, slot: Slot, part: Tensor) -> str:
        """Why the peers should not get a part, by any rank; a collective."""
        nbytes = max(self.group.all_gather(len(part)))
        if self.settings.peers == "parity":
            nbytes = -(-nbytes // (min(self.settings.set_size, self.world.hosts) - 1))
        reason = budget.lacking(self.world.memory, budget.HELD, len(self.held), nbytes)
        if reason:
            self._free_held()
        return self._any(slot.lacking or reason)

    def _persist(self, slot: Slot, record: Record) -> None:
        """Write this rank's parts, vote, commit; a failure on any rank leaves nothing and stops no training."""
        began, checkpoint = time.perf_counter(), record.checkpoint
        if self.claim.unrecorded:
            self.standing.lacks(DISK, self.claim.unrecorded)
            return
        if self.standing.safe[DISK] == checkpoint.step and self._noted(record):
            return
        kinds = (PRIVATE, SHARE) if self.claim.shared else (PRIVATE, SHARE, REST)
        parts = slot.parts(kinds)
        with span("persist", "disk", sum(map(len, parts.values()))):
            written = tried(lambda: self.disk.write(checkpoint, parts))
            told = self.group.all_gather(written if isinstance(written, str) else _plain(written))
            reason = next((each for each in told if isinstance(each, str)), "")
            if not reason:
                reason = self._commit(record, told)
        if reason:
            tried(lambda: self.disk.abort(checkpoint))
        else:
            self.standing.safe[DISK] = checkpoint.step
        self.standing.lacks(DISK, reason)
        self.schedule.took(DISK, time.perf_counter() - began)

    def _noted(self, record: Record) -> bool:
        """Whether the disk has this step already, and now its notes as well: a loop ended right after a checkpoint."""
        reason = ""
        if self.claim.commits:
            try:
                self.disk.note(record)
            except (OSError, CheckpointError) as error:
                reason = str(error)
        return not self._any(reason)

    def _commit(self, record: Record, parts_of_ranks: list[Mapping[str, Any]]) -> str:
        """Why it could not be committed, on all ranks."""
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
        """Keep the newest few that this start continues; of abandoned branches, what has been done again by now goes.

        What others have put here stays.
        """
        there = [(path, record.checkpoint) for path, record in manifests(self.disk.folder)]
        assert self.claim.history is not None
        line = [path for path, checkpoint in there if self.claim.history.holds(checkpoint)]
        gone = [path for path, checkpoint in there if self.claim.history.superseded(checkpoint, newest.step)]
        self.disk.retire((*gone, *line[self.settings.keep :]))


def _plain(entries: Mapping[str, Entry]) -> dict[str, Any]:
    return {name: {"file": each.file, "nbytes": each.nbytes, "sums": each.sums} for name, each in entries.items()}
