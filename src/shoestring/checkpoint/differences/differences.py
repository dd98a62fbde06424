"""Records the difference of each step (the data with which the step can be replayed), and replays the differences after
a failure instead of training the steps again."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shoestring.checkpoint.differences.batches import Batches
from shoestring.checkpoint.differences.difference import Basis, StepContent
from shoestring.checkpoint.differences.partner import Partner
from shoestring.checkpoint.differences.ring import Found, Ring, named
from shoestring.checkpoint.format.checksum import crc32
from shoestring.checkpoint.format.history import History
from shoestring.checkpoint.format.manifest import CheckpointId
from shoestring.checkpoint.format.state import reason_of
from shoestring.checkpoint.tiers import budget
from shoestring.checkpoint.tiers.keeper import kind_of
from shoestring.core.attachments import Attachments
from shoestring.core.errors import CheckpointError
from shoestring.core.feature import Phase
from shoestring.core.trace import span

if TYPE_CHECKING:
    from shoestring.checkpoint.differences.averages import KeptAverages
    from shoestring.checkpoint.tiers.claim import Claim
    from shoestring.checkpoint.tiers.rank_group import RankGroup
    from shoestring.checkpoint.tiers.slots import Slot

log = logging.getLogger("shoestring")

STEPS = "steps"
"""Prefix of the names of files with differences in this host's memory."""


class Differences:
    """Records and replays the differences of one rank.

    Call `begin_step` before each optimizer step, `record` after it, and `replay` when the run is resumed. The
    difference is complete when `record` returns, so a process that is killed afterwards loses no step.

    Args:
        slot: the file in this host's memory that holds the differences.
        steps: number of steps whose differences are kept in memory.
        on_disk: whether to write differences to disk too, in files of `steps` / 2 steps.
        partners: the file in this host's memory that holds the differences of a rank on another host; None if hosts
            store no copies for each other.
    """

    def __init__(
        self,
        attachments: Attachments,
        averages: KeptAverages,
        slot: Slot,
        claim: Claim,
        group: RankGroup,
        steps: int,
        *,
        on_disk: bool,
        partners: Slot | None = None,
    ) -> None:
        self.attachments, self.claim, self.group = attachments, claim, group
        self._leases: dict[Slot, int] = {}
        self.content, self.ring = StepContent(attachments, averages), self._ring(slot, steps)
        self.partner = None
        if partners is not None:
            self.partner = Partner(group, attachments.world.local_size, self._ring(partners, steps))
        self.batches = Batches(claim, self.ring, steps // 2) if on_disk else None
        self.form = f"{crc32(averages.averages_form.encode()):08x} {attachments.world.size}"
        self.replayed = 0
        """Number of steps that this start of the run replayed instead of training again."""
        self.nbytes, self.seconds = 0, 0.0
        """Number of bytes recorded by this start of the run, and seconds that recording took in the training thread."""
        self._total = attachments.progress.total
        self._basis: Basis | None = None
        self._lacking: dict[str, str] = {}
        averages.keep_averages()

    # -- recording ----------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Store the inputs of the next optimizer step; called directly before the step."""
        began = time.perf_counter()
        self.settle()
        self._basis = self.content.basis()
        self.seconds += time.perf_counter() - began

    def record(self, checkpoint: CheckpointId, loss: Tensor | None) -> None:
        """Record the difference of the newest step.

        Args:
            checkpoint: identity that a checkpoint of this step would have.
        """
        began, basis, self._basis = time.perf_counter(), self._basis, None
        if reason := budget.called_back(self.attachments.world.memory, budget.DIFFERENCES):
            for ring in [self.ring, *([self.partner.ring] if self.partner is not None else [])]:
                ring.close(reason)
            self.attachments.world.memory.give(budget.DIFFERENCES)
        difference: Found | None = None
        with span("difference", "copy") as marked:
            described = None if basis is None else self.content.describe(basis)
            # On an accelerator, a step is done before its loss is read. A step whose loss is not finite is not
            # recorded, so that no run resumes after this step.
            if described is not None and not self.ring.refused and (loss is None or math.isfinite(float(loss))):
                header, tensors = described
                about = {**checkpoint.identity, "ranks": checkpoint.ranks, "local": checkpoint.local, "form": self.form}
                difference = about | header, tensors
                marked.nbytes = self.ring.write(*difference)
        self._warn("a failure", self.ring.refused or self.ring.slot.lacking)
        if self.partner is not None:
            with span("difference to partner", "wire") as sent:
                sent.nbytes = self.partner.send(checkpoint.step, difference if marked.nbytes else None)
            self._warn("the loss of a host", self.partner.lacking)
        if self.batches is not None and marked.nbytes:
            assert self.claim.history is not None
            self.batches.write(checkpoint, self.claim.history)
        self.nbytes += marked.nbytes
        self.seconds += time.perf_counter() - began

    def settle(self) -> None:
        """Wait until the newest difference has arrived at the partner rank on another host; a collective."""
        if self.partner is not None:
            with span("difference to partner", "wait"):
                self.partner.settle()

    def _ring(self, slot: Slot, steps: int) -> Ring:
        """Create a ring buffer. All ring buffers of a rank share one lease (reserved amount) of host memory."""

        def lease(nbytes: int) -> str:
            leases = self._leases | {slot: nbytes}
            reason = budget.lacking(self.attachments.world.memory, budget.DIFFERENCES, 1, sum(leases.values()))
            self._leases = self._leases if reason else leases
            return reason

        return Ring(slot, steps, lease)

    @property
    def works(self) -> bool:
        """Whether differences are recorded, so that a killed process loses no step."""
        return not self._lacking.get("a failure")

    def _warn(self, failure: str, lacking: str) -> None:
        """Warn, once for each reason, that steps would be lost after the given kind of failure.

        Args:
            lacking: reason why no difference is stored; empty if differences are stored.
        """
        if lacking and kind_of(lacking) != kind_of(self._lacking.get(failure, "")):
            log.warning("no steps can be replayed after %s: %s; checkpoints continue", failure, lacking)
        self._lacking[failure] = lacking

    # -- replaying ----------------------------------------------------------------------------------------------------

    def replay(self, base: CheckpointId, history: History, reload: Callable[[], None]) -> list[CheckpointId]:
        """Replay the steps after a checkpoint that has just been loaded; a collective.

        Args:
            base: the checkpoint that was loaded.
            reload: function that loads the checkpoint again.

        Returns:
            The replayed steps, as the identities that checkpoints of these steps would have.
        """
        began = time.perf_counter()
        read = self._reader(history)
        recorded = self._recorded(base, read)
        if self.partner is not None:
            self.partner.give_back(
                base.step, len(recorded), read, self.ring, lambda difference: self._continues(difference[0], history)
            )
            read = self._reader(history)
            recorded = self._recorded(base, read)
        count = min(self.group.all_gather(len(recorded)))  # all ranks must replay the same steps
        with span("replay", "compute"):
            done, last = self._replay(recorded[:count], read)
            agreed = min(self.group.all_gather(done))
            if agreed < count:
                log.warning(
                    "replaying step %d gave different weights than training: the run continues after the previous step",
                    base.step + agreed + 1,
                )
                reload()  # the failed replay has changed weights and optimizer state
                _, last = self._replay(recorded[:agreed], read)
            self._finish(last)
        self.replayed, seconds = agreed, time.perf_counter() - began
        if agreed and self.attachments.world.first:
            log.info("replayed %d steps after step %d in %.2f s", agreed, base.step, seconds)
        return recorded[:agreed]

    def _reader(self, history: History) -> Callable[[int], Found | None]:
        """Build a function that reads this rank's difference of a step from memory or, if memory lacks the difference,
        from disk.

        The function returns None if there is no undamaged difference of that step in the run's history.
        """
        places = [self.ring.read] if self.ring.open() else []
        places += [self.batches.reader(history)] if self.batches is not None else []

        def read(step: int) -> Found | None:
            for place in places:
                difference = place(step)
                if difference is not None and self._continues(difference[0], history):
                    return difference
            return None

        return read

    def _continues(self, header: Mapping[str, Any], history: History) -> bool:
        """Whether a difference belongs to this run's history, and has the encoding of the current gradient exchange."""
        checkpoint = named(header)
        return header["form"] == self.form and checkpoint.run == history.run and history.holds(checkpoint)

    def _recorded(self, base: CheckpointId, read: Callable[[int], Found | None]) -> list[CheckpointId]:
        """Return the steps directly after a checkpoint for which this rank has differences, without gaps."""
        steps: list[CheckpointId] = []
        while (difference := read(base.step + len(steps) + 1)) is not None:
            steps.append(named(difference[0]))
        return steps

    def _replay(self, steps: Sequence[CheckpointId], read: Callable[[int], Found | None]) -> tuple[int, Found | None]:
        """Replay steps until the result of a step differs from the recorded result.

        Returns:
            The number of correctly replayed steps, and the difference of the last of these steps.
        """
        last: Found | None = None
        phases = self.attachments.phases
        # The functions of this phase already ran when the steps were trained.
        suspended, phases[Phase.CAPTURE] = phases[Phase.CAPTURE], []
        try:
            for count, checkpoint in enumerate(steps):
                if (difference := read(checkpoint.step)) is None:
                    return count, last
                try:
                    same = self.content.step(*difference)
                except (LookupError, TypeError, ValueError) as error:  # do not raise: other ranks wait for this rank
                    log.warning("cannot replay step %d: %s", difference[0]["step"], error)
                    same = False
                if not same:
                    return count, last
                last = difference
            return len(steps), last
        finally:
            phases[Phase.CAPTURE] = suspended

    def _finish(self, last: Found | None) -> None:
        """Load the states that were recorded at the last replayed step; a collective.

        Raises:
            CheckpointError: a state does not fit this run; raised on all ranks.
        """
        self.attachments.progress.total, reason = self._total, ""
        try:
            if last is not None:
                self.content.finish(*last)
        except Exception as error:  # a user's `load_state_dict` may raise any exception
            reason = reason_of(error)
        if reason := next(filter(None, self.group.all_gather(reason)), ""):
            hint = "set checkpoint.tiered.differences = 0 to continue from the checkpoint before it"
            raise CheckpointError(f"a replayed step has states that do not fit this run: {reason}", hint=hint)

    def begin(self) -> None:
        """Begin recording from the current state; called when a start of the run begins."""
        self.content.begin()

    def close(self, *, forget: bool) -> None:
        """Stop recording. If `forget`, delete all differences, because the run has finished."""
        if self.batches is not None:
            self.batches.close(forget=forget)
        if forget:
            self.ring.close()
            if self.partner is not None:
                self.partner.ring.close()
        self.attachments.world.memory.give(budget.DIFFERENCES)

    def facts(self) -> dict[str, float]:
        """Return figures for the report: number of replayed steps, recorded bytes, and seconds that recording took."""
        return {
            "checkpoint_replayed": self.replayed,
            "checkpoint_differences": float(self.nbytes if self.works else 0),
            "checkpoint_differing": self.seconds,
        }
