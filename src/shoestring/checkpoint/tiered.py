"""The multi-level checkpoint cache: each generation of a job's state climbs from level to level.

    staged ─ sealed in this host's memory ─ kept by peers ─ written to disk ─ committed ─ retired

The training thread only stages; a thread copies, another one does what needs peers or disk. All ranks take the same
decisions at the same steps: what they depend on is agreed a step before, by one small all-reduce.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from shoestring.checkpoint import Tiered, budget, peers
from shoestring.checkpoint.circle import Circle, Pending
from shoestring.checkpoint.disk import Disk, manifests
from shoestring.checkpoint.files import Files
from shoestring.checkpoint.generation import Entry, Generation, Record
from shoestring.checkpoint.layout import PRIVATE, REST, SHARE
from shoestring.checkpoint.schedule import DISK, MEMORY, PEERS, Schedule
from shoestring.checkpoint.slots import SEAL, Slot, oldest
from shoestring.checkpoint.staging import Stager
from shoestring.core.errors import CheckpointError
from shoestring.core.job import Kept
from shoestring.core.kept import Progress
from shoestring.core.trace import span
from shoestring.core.world import World

log = logging.getLogger("shoestring")

REBUILT = "rebuilt-"
"""Begins the names of slots with parts of lost ranks, which are needed until the next save."""


@dataclass(eq=False)
class Engine:
    """One rank's part in saving; `capture` after every step, `wait` before the next one changes the state."""

    kept: Mapping[str, Kept]
    progress: Progress
    world: World
    settings: Tiered
    folder: Path
    """Of this host's slots."""
    stable: Callable[[], set[int]]
    files: Files = field(default_factory=Files)

    def __post_init__(self) -> None:
        self.circle, self.aside = Circle.of(self.world), Circle.of(self.world)  # of the training thread, and the other
        local = self.world.local_rank
        self.schedule = Schedule(self.settings, self.world.hosts)
        self.own = [Slot(self.folder / f"own-{local}-{index}", self.files) for index in range(self.settings.slots)]
        self.held = [Slot(self.folder / f"held-{local}-{index}", self.files) for index in range(2)]
        self.disk = Disk(Path(self.settings.folder), self.files)
        self.stager = Stager(self.world, self.stable, self.settings.overlap)
        self.start, self.uid = 0, ""
        self.finished = self._last = False
        self._keeper = ThreadPoolExecutor(1, "checkpoint-keep")
        self._keeping: Future[None] | None = None
        self._busy: Slot | None = None  # what the keeper reads
        self._pinned: Slot | None = None  # what the peers have, too
        self._sealing: Future[None] | None = None
        self._pulse: Pending | None = None
        self._staged = 0  # the newest step that was staged, on all ranks
        self._sealed = 0  # the newest step that is sealed, on this one
        self._lasts = True  # and whether that outlives the process
        self._fits: bool | None = None  # whether the host's memory has room for the own slots
        self.safe = dict.fromkeys((MEMORY, PEERS, DISK), 0)
        """The newest step that is safe at each level, on all ranks."""
        self._left = {MEMORY: "", PEERS: "", DISK: ""}  # why a level is off
        self._shared_disk: bool | None = None
        self.copied = 0  # bytes
        self.stalled = self._stall = self._began = 0.0  # seconds

    def begin(self, start: int, restored: Generation | None = None) -> None:
        """Count a start of the run, from the generation that was restored if any; a collective."""
        self.start = start
        self.uid = str(self.circle.tell(secrets.token_hex(4))[0])
        self._sealed = self._staged = restored.step if restored else 0
        for slot in (*self.own, *self.held):
            slot.resume(restored)
        held = max((slot.generation for slot in self.held if slot.generation), default=None)
        self._pinned = next((slot for slot in self.own if slot.generation and slot.generation == held), None)
        rebuilt = self.folder.glob(f"{REBUILT}*{SEAL}") if self.world.local_rank == 0 else ()
        self._rebuilt = [Slot(path.with_name(path.name.removesuffix(SEAL)), self.files) for path in rebuilt]

    # -- the training thread ------------------------------------------------------------------------------------------

    def capture(self, last: bool) -> None:
        """Work for the end of a step: stage where it is due, save everything where it is the last."""
        step, began = self.progress.step, time.perf_counter()
        if not self.uid:
            self.begin(0)
        self.schedule.stepped(began, step, beside=not self._idle())
        if last:
            self.finish()
            return
        due = self.schedule.due(step)
        if due:
            self._decide(step, due)
        if self.schedule.due(step + 1):
            self._pulse = self.circle.least(self._state())
        self._stalled(began)

    def wait(self) -> None:
        """Work for the time before the optimizer's step: what is staged must have been copied."""
        began = time.perf_counter()
        with span("finish staging", "wait"):
            self.stager.finish()
        self._stalled(began)
        if self._staged == self.progress.step:
            self.schedule.stalled(self._stall)
            self.stalled += self._stall
        self._stall = 0.0

    def _stalled(self, since: float) -> None:
        """Count what a save stops training for, from its start to where its copy is waited for."""
        self._stall += time.perf_counter() - since

    def _state(self) -> list[float]:
        """What the ranks decide by; the least of each counts."""
        return [
            float(self._sealed),
            float(self._lasts) if self._fits is not False else -1.0,
            float(self._slot() is not None),
            float(self._idle()),
            *(-each for each in self.schedule.costs()),
        ]

    def _slot(self) -> Slot | None:
        """The own slot to fill next; None while all are in use.

        Never the newest that lasts; nor that whose generation the peers have, for a lost host needs it on all others.
        """
        if self._sealing is not None and not self._sealing.done():
            return None
        taken = [self._pinned, None if self._idle() else self._busy]
        free = [each for each in self.own if each not in taken]
        older = [
            each for each in free if each.lacking or each.generation is None or each.generation.step < self._staged
        ]
        return oldest(older) if older else None

    def _idle(self) -> bool:
        return self._keeping is None or self._keeping.done()

    def _decide(self, step: int, due: set[str]) -> None:
        """Stage a generation, unless that would overwrite the newest that all ranks have sealed."""
        pulse, self._pulse = self._pulse or self.circle.least(self._state()), None
        sealed, lasts, free, idle, *costs = pulse.wait()
        self.schedule.agreed([-cost for cost in costs], step)
        self.safe[MEMORY] = int(sealed) if lasts > 0 else 0
        if lasts < 0:  # on any rank there is no room, nor will there be
            self.schedule.drop(MEMORY, PEERS)
            due -= {PEERS}
        if self.world.first and (news := self.schedule.news()):
            log.info("%s", news)
        slot = self._slot()
        if not free or slot is None or sealed < self._staged:
            self.schedule.postpone(due)
            return
        further = due & {PEERS, DISK} if idle else set()
        self.schedule.postpone(due)
        self.schedule.done({MEMORY} | further)
        self.stage(slot, self._generation(step))
        self._then(slot, self._generation(step), further)

    def _generation(self, step: int) -> Generation:
        return Generation(step, self.start, self.uid, self.world.size, self.world.local_size)

    def stage(self, slot: Slot, generation: Generation) -> None:
        about = {"step": generation.step, "start": generation.start, "uid": generation.uid, "at": time.time()}
        began = time.perf_counter()
        if self._fits is None:
            self._fits = True
            budget.share(self.circle, self.world, self.settings, self.folder)
        with span("stage", "copy") as marked:
            drafts = self.stager.drafts(self.kept, about)
            marked.nbytes = sum(draft.nbytes for draft in drafts.values())
            self._fit(slot, marked.nbytes)
            self.stager.start(drafts, slot)
        self.copied += marked.nbytes
        self._staged = generation.step
        self._began = began

    def _fit(self, slot: Slot, nbytes: int) -> None:
        """Take the host's memory for the own slots; where it is short this one stays alone, and outlives nothing."""
        if self._fits and self._idle():
            reason = budget.lacking(self.world.memory, budget.OWN, len(self.own), nbytes)
            if reason:
                self._fits = False
                self.stager.unpin()
                for each in self.own:
                    each.close(reason)
                self.own, self._pinned = [slot], None
        if not self._fits:
            self.world.memory.take(budget.STAGING, nbytes)

    def _then(self, slot: Slot, generation: Generation, further: set[str]) -> None:
        """Seal once everything is copied, and let the other thread do what is due besides."""

        def seal() -> None:
            with span("seal", "copy"):
                reason = self._tried(lambda: slot.seal(generation))
            self._lacks(MEMORY, lacking := slot.lacking or (reason if isinstance(reason, str) else ""))
            self._lasts = not lacking
            slot.generation = generation  # what is in it can be written to disk, sealed or not
            self._sealed = generation.step
            self.schedule.took(MEMORY, time.perf_counter() - self._began)

        self._sealing = self.stager.then(seal)
        if further:
            self._busy, sealing = slot, self._sealing
            self._keeping = self._keeper.submit(self._keep, sealing, slot, generation, frozenset(further))

    def finish(self) -> None:
        """Save on every level, and wait for it; a collective."""
        self.drain()
        step = self.progress.step
        generation = self._generation(step)
        slot = self._slot() or oldest(self.own)
        self.world.agree(lambda: self.stage(slot, generation))
        self.stager.finish()
        self._last = True
        reason, hurried = "", self.schedule.has_peers and 0 < self.settings.deadline < self.schedule.seconds(DISK)
        for level in (PEERS, DISK) if hurried else (DISK,):
            self._then(slot, generation, {level})
            self.drain()
            if not (reason := self._left[level]):
                self.finished = level == DISK
                return
        raise CheckpointError(f"cannot save step {step}: {reason}", hint="earlier saves are intact; free space")

    def drain(self) -> None:
        """Wait until nothing is under way."""
        self.stager.finish()
        for work in (self._sealing, self._keeping):
            if work is not None:
                work.result()
        self._pulse = self._pulse and (self._pulse.wait(), None)[1]

    def close(self) -> None:
        """Stop the threads; a run that ended with everything on disk leaves nothing in memory."""
        self.stager.close()
        self._keeper.shutdown(cancel_futures=True)
        if self.finished:
            for slot in (*self.own, *self.held):
                slot.close()
        budget.release(self.world.memory)
        for circle in (self.circle, self.aside):
            circle.close()

    def facts(self) -> dict[str, float]:
        """For the report: seconds of stall, bytes copied, steps at risk, and the newest step safe at each level."""
        risk = max(self.schedule.steps[MEMORY], 0) or self.schedule.steps[DISK]
        return {
            "checkpoint_stall": self.stalled,
            "checkpoint_bytes": float(self.copied),
            "checkpoint_steps_at_risk": risk,
            "checkpoint_failures": self.schedule.failures,
            "checkpoint_lost": self.schedule.lost,
            **{f"checkpoint_safe_{level}": step for level, step in self.safe.items()},
        }

    # -- the other thread ---------------------------------------------------------------------------------------------

    def _refused(self, slot: Slot, part: Tensor) -> str:
        """Why the peers should not get a part, by any rank; a collective."""
        nbytes = max(self.aside.tell(len(part)))
        if self.settings.peers == "parity":
            nbytes = -(-nbytes // (min(self.settings.set_size, self.world.hosts) - 1))
        reason = budget.lacking(self.world.memory, budget.HELD, len(self.held), nbytes)
        for each in self.held if reason else ():
            each.close()
        return next(filter(None, self.aside.tell(slot.lacking or reason)), "")

    def _keep(self, sealing: Future[None], slot: Slot, generation: Generation, levels: frozenset[str]) -> None:
        try:
            sealing.result()
            if PEERS in levels:
                self._replicate(slot, generation)
            if DISK in levels:
                self._persist(slot, generation)
            if max(self.safe[PEERS], self.safe[DISK]):
                while self._rebuilt:
                    self._rebuilt.pop().close()
        except (RuntimeError, ConnectionError) as error:  # a rank is lost, which training will notice, too
            level = PEERS if PEERS in levels else DISK
            self._lacks(level, (str(error).splitlines() or [""])[0])

    def _replicate(self, slot: Slot, generation: Generation) -> None:
        began, local = time.perf_counter(), self.world.local_size
        (part,), held = slot.parts([PRIVATE]).values(), oldest(self.held)
        if reason := self._refused(slot, part):
            self._lacks(PEERS, reason)
            return
        with span("replicate", "wire", len(part)):
            if self.settings.peers == "parity":
                of = peers.parity_set(self.aside, local, self.settings.set_size, part)
                peers.encode(self.aside, of, part, held, generation)
            else:
                peers.copy(self.aside, local, part, held, generation)
        reason = next(filter(None, self.aside.tell(held.lacking or slot.lacking)), "")
        self._lacks(PEERS, reason)
        if reason:  # some have it, not all: the next one takes its place, not that of the last that all have
            held.generation = None
            return
        self._pinned, self.safe[PEERS] = slot, generation.step
        self.schedule.took(PEERS, time.perf_counter() - began)

    def _persist(self, slot: Slot, generation: Generation) -> None:
        """Write this rank's parts, vote, commit; a failure on any rank leaves nothing and stops no training."""
        began = time.perf_counter()
        try:
            kinds = (PRIVATE, SHARE) if self._disk_is_shared() else (PRIVATE, SHARE, REST)
        except CheckpointError as error:
            self._lacks(DISK, str(error))
            return
        parts = slot.parts(kinds)
        with span("persist", "disk", sum(map(len, parts.values()))):
            written = self._tried(lambda: self.disk.write(generation, parts))
            told = self.aside.tell(written if isinstance(written, str) else _plain(written))
            reason = next((each for each in told if isinstance(each, str)), "")
            if not reason:
                reason = self._commit(generation, told)
        if reason:
            self._tried(lambda: self.disk.abort(generation))
        else:
            self.safe[DISK] = generation.step
        self._lacks(DISK, reason)
        self.schedule.took(DISK, time.perf_counter() - began)

    def _lacks(self, level: str, reason: str) -> None:
        """Say why a level does not work, once for each reason."""
        if reason and reason != self._left[level] and (level == MEMORY or self.world.first):
            log.warning("no saves to %s: %s; earlier ones are intact, and training goes on", level, reason)
        self._left[level] = reason

    def _commit(self, generation: Generation, told: list[Mapping[str, Any]]) -> str:
        """Why it could not be committed, on all ranks."""
        commits = self.world.first if self._disk_is_shared() else self.world.local_rank == 0
        ranks = range(self.world.size)
        if not self._disk_is_shared():
            host = self.world.rank // self.world.local_size
            ranks = range(host * self.world.local_size, (host + 1) * self.world.local_size)
        reason = ""
        if commits:
            parts = {name: Entry(**entry) for rank in ranks for name, entry in told[rank].items()}
            found = self._tried(lambda: self.disk.commit(Record(generation, parts, {"last": self._last})))
            reason = found if isinstance(found, str) else ""
        reason = next(filter(None, self.aside.tell(reason)), "")
        if commits and not reason:
            self._tried(lambda: self._retire(generation))
        return reason

    def _retire(self, newest: Generation) -> None:
        """Keep the newest few; what is of later steps is damaged, or of a future that the run went back from."""
        there = manifests(self.disk.folder)
        earlier = [path for path, record in there if record.generation <= newest]
        later = [path for path, record in there if record.generation > newest]
        self.disk.retire((*later, *earlier[self.settings.keep :]))

    def _tried(self, work: Callable[[], Any]) -> Any:
        """What some work on files gives, or why it failed."""
        try:
            return work()
        except OSError as error:
            where = f" `{error.filename}`" if error.filename else ""
            return f"{error.strerror or error}{where}"

    def _disk_is_shared(self) -> bool:
        """Whether all hosts see one folder; found out once, by a file that the first rank writes.

        Raises:
            CheckpointError: on all ranks: it could not write that.
        """
        if self._shared_disk is None:
            mark, failed = self.disk.folder / f".shared-{self.uid}", None
            if self.world.first:
                failed = self._tried(lambda: self.files.folder(mark.parent) or self.files.write(mark, b""))
            if reason := self.aside.tell(failed)[0]:
                raise CheckpointError(reason)
            self._shared_disk = all(self.aside.tell(mark.exists()))
            if self.world.first:
                self._tried(lambda: self.files.unlink(mark))
        return self._shared_disk


def _plain(entries: Mapping[str, Entry]) -> dict[str, Any]:
    return {name: {"file": each.file, "nbytes": each.nbytes, "sums": each.sums} for name, each in entries.items()}
