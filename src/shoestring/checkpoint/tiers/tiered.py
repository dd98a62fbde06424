"""The multi-level checkpoint cache: each checkpoint of a job's state climbs from level to level.

    staged ─ sealed in this host's memory ─ kept by peers ─ written to disk ─ committed ─ retired

The training thread only stages; a thread copies, one seals, and one does what needs peers or disk (`keeper`). All ranks
take the same decisions at the same steps: what they depend on is agreed a step before, by one small all-reduce.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shoestring.checkpoint.format.checksum import threads_beside
from shoestring.checkpoint.format.manifest import CheckpointId, Record
from shoestring.checkpoint.tiers import budget
from shoestring.checkpoint.tiers.checksum_process import ChecksumProcess
from shoestring.checkpoint.tiers.claim import Claim
from shoestring.checkpoint.tiers.disk import Disk
from shoestring.checkpoint.tiers.file_acts import Files, tried
from shoestring.checkpoint.tiers.keeper import Keeper, Standing
from shoestring.checkpoint.tiers.rank_group import Pending, RankGroup
from shoestring.checkpoint.tiers.save_schedule import DISK, MEMORY, PEERS, CheckpointSchedule
from shoestring.checkpoint.tiers.slots import Sealed, Slot, oldest
from shoestring.checkpoint.tiers.staging import Stager
from shoestring.checkpoint.tiers.waits import result_of
from shoestring.core.errors import CheckpointError
from shoestring.core.job import Kept
from shoestring.core.kept import Progress
from shoestring.core.trace import span
from shoestring.core.world import World

if TYPE_CHECKING:
    from shoestring.checkpoint import Tiered
    from shoestring.checkpoint.differences.differences import Differences

log = logging.getLogger("shoestring")

REPLACED = "another start of this run has taken over its checkpoints: this one ends here"


@dataclass(eq=False)
class Checkpointer:
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
        self.group = RankGroup.join(self.world, "agreeing on checkpoints")
        local = self.world.local_rank
        self.schedule = CheckpointSchedule(self.settings, self.world.hosts)
        self._checksums = ChecksumProcess(threads_beside(self.world.local_size), child=self.world.device.type == "cuda")
        names = [f"own-{local}-{index}" for index in range(self.settings.slots)]
        self.own = [Slot(self.folder / name, self.files, self._checksums.sums) for name in names]
        self.stager = Stager(self.world, self.stable, self.settings.overlap)
        self.standing = Standing(self.world.first, local == 0)
        self.safe, self.schedule.lacking = self.standing.safe, self.standing.lacking
        self.claim = Claim(self.world, Disk(Path(self.settings.folder), self.files), self.folder.parent)
        self.keeper = Keeper(self.world, self.settings, self.folder, self.claim, self.schedule, self.standing)
        self.differences: Differences | None = None
        """Of the steps since the newest checkpoint, where they are kept."""
        self.finished = self._last = False
        self.on_disk = False
        """Whether what was restored, or saved at the end, is on disk, all of it."""
        self._claimed = False
        self._under_way: dict[Slot, Future[Any]] = {}
        self._pulse: Pending | None = None
        self._staged = 0  # the newest step that was staged, on all ranks
        self._sealed = Sealed()  # on this one; replaced as a whole, by the thread that seals
        self._lasting = 0  # the newest step that outlives the processes of all ranks
        self._refused = ""  # why nothing is sealed any more
        self._fits: bool | None = None  # whether the host's memory has room for the own slots
        self.copied = 0  # bytes
        self.stalled = self._stall = self._began = 0.0  # seconds

    def take(self) -> None:
        """Get the right to write this run's checkpoints, before anything is looked for; a collective.

        Raises:
            CheckpointError: on all ranks: another start of the run has it.
        """
        self.claim.take(self.group)
        self._claimed = True

    def begin(
        self,
        restored: CheckpointId | None = None,
        others: Collection[CheckpointId] = (),
        reached: CheckpointId | None = None,
    ) -> None:
        """Begin a start of the run that continues a checkpoint, if any, of those that there are; a collective.

        Args:
            reached: the step that it continues after, where steps after the checkpoint have been replayed.
        """
        if not self._claimed:
            self.take()
        self.claim.begin(self.group, reached or restored, others)
        assert self.claim.history is not None
        self._staged = self._lasting = restored.step if restored else 0
        self._sealed = Sealed(self._staged)
        for slot in self.own:
            slot.resume(self.claim.history)
        self.keeper.begin(self.claim.history, self.own)
        if self.differences is not None:
            self.differences.begin()
        if reached is not None:  # soon there is a checkpoint from which nothing needs to be replayed
            self.schedule.postpone({MEMORY, PEERS} if self.schedule.steps[PEERS] else {MEMORY})

    def capture(self, last: bool, loss: Tensor | None = None) -> None:
        """Work for the end of a step: stage where it is due, save everything where it is the last.

        Args:
            loss: of the step, 0-d; what is staged counts only if that is finite, which is looked at beside training.
        """
        step, began = self.progress.step, time.perf_counter()
        if self.claim.history is None:
            self.begin()
        self.finished = self._last = False
        if self.differences is not None:
            self.differences.record(self._checkpoint(step), loss)
        self.schedule.stepped(began, step, beside=not self.keeper.idle)
        self.keeper.answer_calls()
        if self._fits and self.keeper.idle and (reason := budget.called_back(self.world.memory, budget.OWN)):
            self._give_back(self.own[0], reason)
        if last:
            self.finish()
            return
        due = self.schedule.due(step)
        if due:
            self._decide(step, due, loss)
        if self.schedule.due(step + 1):
            self._pulse = self.group.all_reduce_min(self._state())
        self._stalled(began)

    def wait(self) -> None:
        """Work for the time before the optimizer's step: what is staged must have been copied."""
        began = time.perf_counter()
        with span("finish staging", "wait"):
            self.stager.finish()
        self._stalled(began)
        if self._staged == self.progress.step:
            self._stall += self.stager.waited()  # what a GPU waits for this copy is known, and counted, at the next
            self.schedule.stalled(self._stall)
            self.stalled += self._stall
        self._stall = 0.0

    def _stalled(self, since: float) -> None:
        """Count what a checkpoint stops training for, from its start to where its copy is waited for."""
        self._stall += time.perf_counter() - since

    def _state(self) -> list[float]:
        """What the ranks decide by; the least of each counts."""
        if self._fits is None and self.world.device.type == "cuda":
            self._reserve()
        sealed = self._told()
        slots = [self._slot(self._sealed.step, lasting) for lasting in (False, True)]
        return [
            float(not self.claim.replaced),
            *sealed,
            *(-math.inf if slot is None else -float(_needed(slot)) for slot in slots),
            float(self.keeper.idle),
            *(-each for each in self.schedule.costs()),
        ]

    def _told(self) -> list[float]:
        """What this rank has sealed, for `_agree`."""
        step, lasts, since = self._sealed
        newest = next((each for each in self.own if each.checkpoint and each.checkpoint.step == step), None)
        lasts = lasts and (newest is None or newest.stands)
        return [step, float(lasts) if self._fits is not False else -1.0, -since]

    def _agree(self, sealed: float, lasts: float, since: float) -> tuple[int, bool]:
        """The newest step that all ranks have sealed, and whether it outlives them, from the least that they told.

        A rank that is ahead tells of a later step: an earlier one outlives it, too, if none between could not.
        """
        lasting = lasts > 0 and sealed >= -since
        self.safe[MEMORY] = int(sealed) if lasting else 0
        self._lasting = self.safe[MEMORY] or self._lasting
        self.schedule.outlives = lasting
        return int(sealed), lasting

    def _choose(self, sealed: float, lasts: float, since: float, unless: float, needed: float) -> Slot | None:
        """The slot to fill; None on all ranks while one has none. What they told is of `_slot` as it is called here."""
        step, lasting = self._agree(sealed, lasts, since)
        return None if -(needed if lasting else unless) > step + (not lasting) else self._slot(step, lasting)

    def _slot(self, sealed: int, lasting: bool) -> Slot | None:
        """The own slot to fill next; None while there is none.

        Never one that is being filled or sealed, nor that of the newest checkpoint that all ranks have sealed or of a
        newer one; nor that whose checkpoint the peers have, for a lost host needs it on all others. Where the newest
        does not outlive all ranks, it may be filled, but not that of the newest step that does.
        """
        held = [self.keeper.pinned, self.keeper.reads]
        held += [each for each, work in self._under_way.items() if not work.done()]
        held += [] if lasting else [each for each in self.own if self._is_lasting(each)]
        free = [each for each in self.own if each not in held and _needed(each) <= sealed + (not lasting)]
        return oldest(free) if free else None

    def _is_lasting(self, slot: Slot) -> bool:
        return slot.checkpoint is not None and slot.checkpoint.step == self._lasting

    def _decide(self, step: int, due: set[str], loss: Tensor | None) -> None:
        """Stage a checkpoint, unless that would overwrite the newest that all ranks have sealed."""
        pulse, self._pulse = self._pulse or self.group.all_reduce_min(self._state()), None
        newest, sealed, lasts, since, unless, needed, idle, *costs = pulse.wait()
        if not newest:
            raise CheckpointError(REPLACED)
        if self.claim.unrecorded:
            self.claim.record(self.group)
        self.schedule.agreed([-cost for cost in costs], step)
        slot = self._choose(sealed, lasts, since, unless, needed)
        if lasts < 0:  # on any rank there is no room, nor will there be
            self.schedule.drop(MEMORY, PEERS)
            due -= {PEERS}
        self.schedule.total = self.progress.total
        if self.world.first and (news := self.schedule.news()):
            log.info("checkpoint.tiered: %s", news)
        further = due & {PEERS, DISK} if idle else set()
        self.schedule.postpone(due)
        if slot is None or not (further or MEMORY in due):  # nothing could be done with another copy yet
            return
        self.schedule.done({MEMORY} | further)
        self.stage(slot, self._checkpoint(step))
        self._then(slot, self._checkpoint(step), further, loss)

    def _checkpoint(self, step: int) -> CheckpointId:
        assert self.claim.history is not None
        run, epoch = self.claim.history.run, self.claim.history.epoch
        return CheckpointId(step, epoch.start, epoch.uid, self.world.size, self.world.local_size, run)

    def stage(self, slot: Slot, checkpoint: CheckpointId) -> None:
        about = checkpoint.identity | {"at": time.time()}
        self._began = time.perf_counter()
        if self._fits is None:
            self._share()
        with span("stage", "copy") as marked:
            drafts = self.stager.drafts(self.kept, about)
            marked.nbytes = sum(draft.nbytes for draft in drafts.values())
            self._fit(slot, marked.nbytes)
            self.stager.start(drafts, slot)
        self.copied += marked.nbytes
        self._staged = checkpoint.step

    def _share(self) -> None:
        """Find out how much of the host's memory there is for this rank; a collective."""
        self._fits = True
        budget.share(self.group, self.world, self.settings, self.folder)

    def _reserve(self) -> None:
        """Make room beside training: fresh memory for what a GPU holds takes ten times as long as copying it."""
        self._share()
        sizes = {name: draft.nbytes for name, draft in self.stager.drafts(self.kept, {}).items()}
        self._fit(self.own[0], sum(sizes.values()))
        for slot in self.own:
            if slot.checkpoint is None and not slot.lacking:
                self._under_way[slot] = self.stager.then(partial(slot.reserve, sizes))

    def _fit(self, slot: Slot, nbytes: int) -> None:
        """Take the host's memory for the own slots; where it is short this one stays alone, and outlives nothing."""
        if self._fits and self.keeper.idle:
            reason = budget.lacking(self.world.memory, budget.OWN, len(self.own), nbytes)
            if reason:
                self._give_back(slot, reason)
        if not self._fits:
            self.world.memory.take(budget.STAGING, nbytes)

    def _give_back(self, slot: Slot, reason: str) -> None:
        """Free the own slots; only `slot` stays, to be filled again for the disk."""
        self._fits = False
        self._settle()
        self.stager.unpin()
        for each in self.own:
            each.close(reason)
        self.world.memory.give(budget.OWN)
        self.own, self.keeper.pinned = [slot], None

    def _then(self, slot: Slot, checkpoint: CheckpointId, further: set[str], loss: Tensor | None = None) -> None:
        """Seal once everything is copied, and let the other thread do what is due besides."""
        began, notes = self._began, {"last": self._last}

        def seal() -> str:
            if not self._refused and loss is not None and not math.isfinite(float(loss)):
                self._refused = f"the loss of step {checkpoint.step} is not finite"
            if self._refused:  # training will end by it, perhaps some steps later
                return self._refused
            slot.lacking = slot.lacking or self.claim.unrecorded
            with span("seal", "copy"):
                reason = tried(lambda: slot.seal(checkpoint, notes))
            self.standing.lacks(MEMORY, lacking := slot.lacking or (reason if isinstance(reason, str) else ""))
            slot.checkpoint = checkpoint  # what is in it can be written to disk, sealed or not
            self._sealed = self._sealed.then(checkpoint.step, not lacking)
            self.schedule.took(MEMORY, time.perf_counter() - began)
            return ""

        self._under_way[slot] = sealing = self.stager.then(seal)
        if further:
            self.keeper.keep(sealing, slot, further, Record(checkpoint, {}, notes))

    def finish(self) -> None:
        """Save on every level, and wait for it; a collective."""
        self.drain()
        step = self.progress.step
        if self.claim.unrecorded:
            self.claim.record(self.group)
        checkpoint = self._checkpoint(step)
        slot = self._slot(*self._agree(*self.group.all_reduce_min(self._told()).wait()))
        slot = slot or oldest([each for each in self.own if not self._is_lasting(each)] or self.own)
        self.world.agree(lambda: self.stage(slot, checkpoint))
        self.stager.finish()
        self._last = True
        reason, hurried = "", self.schedule.has_peers and 0 < self.settings.deadline < self.schedule.seconds(DISK)
        for level in (PEERS, DISK) if hurried else (DISK,):
            self._then(slot, checkpoint, {level})
            self.drain()
            if not (reason := self.standing.lacking[level]):
                self.finished = self.on_disk = level == DISK
                return
        hint = "earlier checkpoints are intact; make room in the folder, or see who may write there"
        raise CheckpointError(f"cannot save step {step}: {reason}", hint=hint)

    def drain(self) -> None:
        """Wait until nothing is under way."""
        self.stager.finish()
        self._settle()
        self.keeper.drain()
        if self.differences is not None:
            self.differences.settle()
        if self._pulse is not None:
            self._pulse.wait()
            self._pulse = None

    def _settle(self) -> None:
        """Wait until no own slot is being filled or sealed."""
        for work in self._under_way.values():
            result_of(work, "sealing a checkpoint in this host's memory", self.stager.nbytes)

    def close(self) -> None:
        """Stop the threads; a run that ended with everything on disk leaves nothing in memory."""
        self.stager.close()
        self._checksums.close()
        self.keeper.close(forget=self.finished)
        for slot in self.own if self.finished else ():
            slot.close()
        if self.differences is not None:
            self.differences.close(forget=self.finished)
        budget.release(self.world.memory)
        self.group.close()
        self.claim.release()

    def facts(self) -> dict[str, float]:
        """For the report: seconds of stall, bytes copied, steps at risk, and the newest step safe at each level."""
        steps, lacking = self.schedule.steps, self.standing.lacking
        risk = next((steps[level] for level in (MEMORY, DISK) if steps[level] and not lacking[level]), 0)
        return {
            "checkpoint_stall": self.stalled,
            "checkpoint_bytes": float(self.copied),
            "checkpoint_steps_at_risk": risk,
            "checkpoint_failures": self.schedule.failures,
            "checkpoint_lost": self.schedule.lost,
            **(self.differences.facts() if self.differences is not None else {}),
            **{f"checkpoint_safe_{level}": step for level, step in self.safe.items()},
        }


def _needed(slot: Slot) -> int:
    """The step that all ranks must have sealed before a slot may be filled: a newer one than it holds."""
    return 0 if slot.lacking or slot.checkpoint is None else slot.checkpoint.step + 1
