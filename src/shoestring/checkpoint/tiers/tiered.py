"""Writes multi-level checkpoints, each of which goes through several stages:

    staged ─ sealed in this host's memory ─ kept by peers ─ written to disk ─ committed ─ retired

The training thread only starts the staging. A second thread copies the state, a third thread seals the checkpoint, and
a fourth thread (`keeper`) copies the checkpoint to peers and writes it to disk. All ranks make the same decisions at
the same steps, because they decide by numbers from a small all-reduce, which is started one step earlier.
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

from shoestring.checkpoint.format.manifest import CheckpointId, Record
from shoestring.checkpoint.tiers import budget
from shoestring.checkpoint.tiers.checksum_process import ChecksumProcess, threads_beside
from shoestring.checkpoint.tiers.claim import Claim
from shoestring.checkpoint.tiers.disk import Disk
from shoestring.checkpoint.tiers.file_acts import Files, tried
from shoestring.checkpoint.tiers.keeper import Keeper, Standing
from shoestring.checkpoint.tiers.rank_group import Pending, RankGroup
from shoestring.checkpoint.tiers.save_schedule import DISK, MEMORY, PEERS, CheckpointSchedule
from shoestring.checkpoint.tiers.slots import Sealed, Slot, oldest
from shoestring.checkpoint.tiers.staging import Stager
from shoestring.checkpoint.tiers.waits import result_of
from shoestring.core.attachments import Kept
from shoestring.core.errors import CheckpointError
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
    """Writes multi-level checkpoints of one rank's state.

    `capture` must be called after every step, and `wait` before the next optimizer step changes the state.
    """

    kept: Mapping[str, Kept]
    progress: Progress
    world: World
    settings: Tiered
    folder: Path
    """Folder of this host's slots."""
    stable: Callable[[], set[int]]
    files: Files = field(default_factory=Files)

    def __post_init__(self) -> None:
        self.group = RankGroup.join(self.world, "agreeing on checkpoints")
        local = self.world.local_rank
        self.schedule = CheckpointSchedule(self.settings, self.world.hosts)
        self._checksums = ChecksumProcess(threads_beside(self.world.local_size), child=self.world.device.type == "cuda")
        names = [f"own-{local}-{index}" for index in range(self.settings.slots)]
        overflow = Path(self.settings.folder)
        self.own = [Slot(self.folder / name, self.files, self._checksums.sums, overflow=overflow) for name in names]
        self.stager = Stager(self.world, self.stable, self.settings.overlap)
        self.standing = Standing(self.world.first, local == 0)
        self.safe, self.schedule.lacking = self.standing.safe, self.standing.lacking
        self.claim = Claim(self.world, Disk(Path(self.settings.folder), self.files), self.folder.parent)
        self.keeper = Keeper(self.world, self.settings, self.folder, self.claim, self.schedule, self.standing)
        self.differences: Differences | None = None
        """Recorder of the steps since the newest checkpoint; None if steps are not recorded."""
        self.finished = self._last = False
        self.on_disk = False
        """Whether the restored checkpoint, or the last checkpoint of the run, is on disk."""
        self._claimed = False
        self._under_way: dict[Slot, Future[Any]] = {}
        self._pulse: Pending | None = None
        self._staged = 0  # newest staged step; equal on all ranks
        self._sealed = Sealed()  # the sealing thread replaces the whole object, so no lock is needed
        self._lasting = 0  # newest step whose checkpoint survives the end of all ranks' processes
        self._refused = ""  # reason why no more checkpoints are sealed; else empty
        self._fits: bool | None = None  # whether the host's memory has room for this rank's slots; None until known
        self.copied = 0  # number of bytes copied into slots
        self.stalled = self._stall = self._began = 0.0  # seconds: all stalls, current stall; start of newest copy

    def take(self) -> None:
        """Claim the right to write the run's checkpoints, before searching for checkpoints; a collective.

        Raises:
            CheckpointError: another start of the run has claimed this right; raised on all ranks.
        """
        self.claim.take(self.group)
        self._claimed = True

    def begin(
        self,
        restored: CheckpointId | None = None,
        others: Collection[CheckpointId] = (),
        reached: CheckpointId | None = None,
    ) -> None:
        """Record this start of the run as a new epoch in the run's history, and determine which checkpoints in slots
        stay valid; a collective.

        Args:
            restored: the checkpoint that was loaded; None for a new run.
            others: all checkpoints that exist.
            reached: the last step that was replayed after the checkpoint; None if no step was replayed.
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
        if reached is not None:  # write a checkpoint soon, so that another failure does not replay these steps again
            self.schedule.postpone({MEMORY, PEERS} if self.schedule.steps[PEERS] else {MEMORY})

    def capture(self, last: bool, loss: Tensor | None = None) -> None:
        """Start a checkpoint if one is due after this step; after the last step, write a checkpoint to disk.

        Args:
            last: whether this was the last step.
            loss: loss of the step, 0-d. The checkpoint is sealed only if the loss is finite, which another thread
                checks.
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
        if self.schedule.due(step + 1):  # ranks agree during the next step, so that no rank waits
            self._pulse = self.group.all_reduce_min(self._state())
        self._stalled(began)

    def finish_copies(self) -> None:
        """Wait until the state is copied."""
        began = time.perf_counter()
        with span("finish staging", "wait"):
            self.stager.finish()
        self._stalled(began)

    def wait(self) -> None:
        """Wait until the state is copied; called before the optimizer step, which changes the state."""
        self.finish_copies()
        if self._staged == self.progress.step:
            self._stall += self.stager.waited()  # the GPU's wait for the newest copy is added in a later call
            self.schedule.stalled(self._stall)
            self.stalled += self._stall
        self._stall = 0.0

    def _stalled(self, since: float) -> None:
        """Add the time since `since` to the time for which a checkpoint has stopped training."""
        self._stall += time.perf_counter() - since

    def _state(self) -> list[float]:
        """Return the numbers by which ranks decide. The numbers are reduced by a minimum over ranks, so some costs and
        steps are negated."""
        if self._fits is None and self.world.device.type == "cuda":
            # Allocate slots in the background, because allocation takes ten times as long as a copy of a GPU's state.
            self._share()
            sizes = {name: draft.nbytes for name, draft in self.stager.drafts(self.kept, {}).items()}
            self._fit(self.own[0], sum(sizes.values()))
            for slot in self.own:
                if slot.checkpoint is None and not slot.lacking:
                    self._under_way[slot] = self.stager.then(partial(slot.reserve, sizes))
        sealed = self._told()
        slots = [self._slot(self._sealed.step, lasting) for lasting in (False, True)]
        return [
            float(not self.claim.replaced),
            *sealed,
            *(-math.inf if slot is None else -float(_needed(slot)) for slot in slots),
            float(self.keeper.idle),
            *(-cost for cost in self.schedule.costs()),
        ]

    def _told(self) -> list[float]:
        """Return three numbers that describe this rank's sealed checkpoints; `_agree` takes their minima over all
        ranks."""
        step, lasts, since = self._sealed
        newest = next((slot for slot in self.own if slot.checkpoint and slot.checkpoint.step == step), None)
        lasts = lasts and (newest is None or newest.stands)
        return [step, float(lasts) if self._fits is not False else -1.0, -since]

    def _agree(self, sealed: float, lasts: float, since: float) -> tuple[int, bool]:
        """Return the newest step that all ranks have sealed, and whether its checkpoint survives the end of all ranks'
        processes. The arguments are the minima of `_told` over all ranks. Some ranks may have sealed later steps than
        the agreed step. On each rank, the agreed step survives if the step is not before the rank's `since`. The
        argument `since` is the negated value of each rank, so its minimum over ranks stands for the latest step.
        """
        lasting = lasts > 0 and sealed >= -since
        self.safe[MEMORY] = int(sealed) if lasting else 0
        self._lasting = self.safe[MEMORY] or self._lasting
        self.schedule.outlives = lasting
        return int(sealed), lasting

    def _choose(self, sealed: float, lasts: float, since: float, unless: float, needed: float) -> Slot | None:
        """Choose the slot to fill, from the minima of `_state` over all ranks; returns None on all ranks if any rank
        has no free slot.

        Args:
            unless: minimum over ranks of the negated step that all ranks must have sealed before the slot may be
                filled; used if the newest checkpoint does not survive on all ranks.
            needed: the same minimum for the case that the newest checkpoint survives on all ranks.
        """
        step, lasting = self._agree(sealed, lasts, since)
        most_needed = -(needed if lasting else unless)
        if most_needed > step + (not lasting):
            return None
        return self._slot(step, lasting)

    def _slot(self, sealed: int, lasting: bool) -> Slot | None:
        """Return the slot to fill next; None if no slot is free.

        A slot is not free while it is being filled, sealed or read. A slot is not free while it holds the newest
        checkpoint that all ranks have sealed, or a newer checkpoint. A slot is not free while it holds the checkpoint
        of which peers have copies, because all other hosts need this checkpoint after the loss of a host. If the newest
        checkpoint does not survive the end of all processes, its slot is free. But then the slot of the newest
        surviving checkpoint is not free.

        Args:
            sealed: newest step that all ranks have sealed.
            lasting: whether the checkpoint of the step `sealed` survives the end of all ranks' processes.
        """
        in_use = [self.keeper.pinned, self.keeper.reads]
        in_use += [slot for slot, work in self._under_way.items() if not work.done()]
        in_use += [] if lasting else [slot for slot in self.own if self._is_lasting(slot)]
        free = [slot for slot in self.own if slot not in in_use and _needed(slot) <= sealed + (not lasting)]
        return oldest(free) if free else None

    def _is_lasting(self, slot: Slot) -> bool:
        return slot.checkpoint is not None and slot.checkpoint.step == self._lasting

    def _decide(self, step: int, due: set[str], loss: Tensor | None) -> None:
        """Start the checkpoint that is due at some levels, or postpone it; all ranks make the same decision."""
        pulse, self._pulse = self._pulse or self.group.all_reduce_min(self._state()), None
        newest, sealed, lasts, since, unless, needed, idle, *costs = pulse.wait()
        if not newest:
            raise CheckpointError(REPLACED)
        if self.claim.unrecorded:
            self.claim.record(self.group)
        self.schedule.agreed([-cost for cost in costs], step)
        slot = self._choose(sealed, lasts, since, unless, needed)
        if lasts < 0:  # a rank has no room in memory for its slots, now or later
            self.schedule.drop(MEMORY, PEERS)
            due -= {PEERS}
        self.schedule.total = self.progress.total
        if self.world.first and (news := self.schedule.news()):
            log.info("checkpoint.tiered: %s", news)
        further = due & {PEERS, DISK} if idle else set()
        self.schedule.postpone(due)
        if slot is None or not (further or MEMORY in due):  # no slot is free, or the keeper is still busy
            return
        self.schedule.done({MEMORY} | further)
        self.stage(slot, self._checkpoint(step))
        self._then(slot, self._checkpoint(step), further, loss)

    def _checkpoint(self, step: int) -> CheckpointId:
        assert self.claim.history is not None
        run, epoch = self.claim.history.run, self.claim.history.epoch
        return CheckpointId(step, epoch.start, epoch.uid, self.world.size, self.world.local_size, run)

    def stage(self, slot: Slot, checkpoint: CheckpointId) -> None:
        """Start to copy the state into a slot."""
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
        """Determine how much of the host's memory this rank may use; a collective."""
        self._fits = True
        budget.share(self.group, self.world, self.settings, self.folder)

    def _fit(self, slot: Slot, nbytes: int) -> None:
        """Lease host memory for this rank's slots. If memory is short, keep only `slot`, in the process's own
        memory."""
        if self._fits and self.keeper.idle:
            reason = budget.lacking(self.world.memory, budget.OWN, len(self.own), nbytes)
            if reason:
                self._give_back(slot, reason)
        if not self._fits:
            self.world.memory.take(budget.STAGING, nbytes)

    def _give_back(self, slot: Slot, reason: str) -> None:
        """Free this rank's slots except for `slot`, from which checkpoints are still written to disk."""
        self._fits = False
        self._settle()
        self.stager.unpin()
        for own in self.own:
            own.close(reason)
        self.world.memory.give(budget.OWN)
        self.own, self.keeper.pinned = [slot], None

    def _then(self, slot: Slot, checkpoint: CheckpointId, further: set[str], loss: Tensor | None = None) -> None:
        """Seal a slot once all data is in it; then let the keeper copy the slot to the levels in `further`."""
        began, notes = self._began, {"last": self._last}

        def seal() -> str:
            if not self._refused and loss is not None and not math.isfinite(float(loss)):
                self._refused = f"the loss of step {checkpoint.step} is not finite"
            if self._refused:  # refuse all later checkpoints too, because their states derive from this state
                return self._refused
            slot.lacking = slot.lacking or self.claim.unrecorded
            with span("seal", "copy"):
                reason = tried(lambda: slot.seal(checkpoint, notes))
            self.standing.lacks(MEMORY, lacking := slot.lacking or (reason if isinstance(reason, str) else ""))
            slot.checkpoint = checkpoint  # even without a seal, the content can be written to disk
            self._sealed = self._sealed.then(checkpoint.step, not lacking)
            self.schedule.took(MEMORY, time.perf_counter() - began)
            return ""

        self._under_way[slot] = sealing = self.stager.then(seal)
        if further:
            self.keeper.keep(sealing, slot, further, Record(checkpoint, {}, notes))

    def finish(self) -> None:
        """Write the checkpoint of the last step to disk, or to peers if the deadline is too near, and wait for it; a
        collective.

        Raises:
            CheckpointError: the checkpoint could not be written; raised on all ranks.
        """
        self.drain()
        step = self.progress.step
        if self.claim.unrecorded:
            self.claim.record(self.group)
        checkpoint = self._checkpoint(step)
        slot = self._slot(*self._agree(*self.group.all_reduce_min(self._told()).wait()))
        slot = slot or oldest([own for own in self.own if not self._is_lasting(own)] or self.own)
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
        hint = "earlier checkpoints are intact; free disk space, or check the permissions of the folder"
        raise CheckpointError(f"cannot save step {step}: {reason}", hint=hint)

    def drain(self) -> None:
        """Wait until no checkpoint is in progress."""
        self.stager.finish()
        self._settle()
        self.keeper.drain()
        if self.differences is not None:
            self.differences.settle()
        if self._pulse is not None:
            self._pulse.wait()
            self._pulse = None

    def _settle(self) -> None:
        """Wait until none of this rank's slots is being filled or sealed."""
        for work in self._under_way.values():
            result_of(work, "sealing a checkpoint in this host's memory", self.stager.nbytes)

    def close(self) -> None:
        """Stop the threads. If the run has finished, free its slots, because the last checkpoint is on disk."""
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
        """Return figures for the report, such as seconds of stall, steps at risk, and the newest step that is safe at
        each level."""
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
    """Return the step that all ranks must have sealed before a slot may be filled: the step after the slot's
    checkpoint."""
    return 0 if slot.lacking or slot.checkpoint is None else slot.checkpoint.step + 1
