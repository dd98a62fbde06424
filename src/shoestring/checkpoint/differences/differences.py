"""Keeping the difference of each step, and replaying them after a failure: the run continues with the next step."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shoestring.checkpoint.differences.batches import Batches
from shoestring.checkpoint.differences.difference import Basis, StepContent
from shoestring.checkpoint.differences.partner import Partner
from shoestring.checkpoint.differences.ring import Found, Ring
from shoestring.checkpoint.format.checksum import crc32
from shoestring.checkpoint.format.history import History
from shoestring.checkpoint.format.manifest import CheckpointId
from shoestring.checkpoint.format.state import reason_of
from shoestring.checkpoint.tiers import budget
from shoestring.checkpoint.tiers.keeper import kind_of
from shoestring.core.errors import CheckpointError
from shoestring.core.feature import Phase
from shoestring.core.job import Job
from shoestring.core.trace import span

if TYPE_CHECKING:
    from shoestring.checkpoint.differences.averages import KeptAverages
    from shoestring.checkpoint.tiers.claim import Claim
    from shoestring.checkpoint.tiers.rank_group import RankGroup
    from shoestring.checkpoint.tiers.slots import Slot

log = logging.getLogger("shoestring")

STEPS = "steps"
"""Begins the names of files with differences in this host's memory."""


class Differences:
    """One rank's part in it: `begin_step` before the optimizer's step, `record` after it, `replay` at a start.

    A record is whole when `record` returns: whatever ends the process later costs no step.

    Args:
        slot: names the file in this host's memory.
        steps: number of steps to keep in memory.
        on_disk: write them to disk as well, half as many at once.
        partners: names the file with what this rank keeps for one of another host; None where hosts keep no copies.
    """

    def __init__(
        self,
        job: Job,
        averages: KeptAverages,
        slot: Slot,
        claim: Claim,
        group: RankGroup,
        steps: int,
        *,
        on_disk: bool,
        partners: Slot | None = None,
    ) -> None:
        self.job, self.claim, self.group = job, claim, group
        self._leases: dict[Slot, int] = {}
        self.content, self.ring = StepContent(job, averages), self._ring(slot, steps)
        self.partner = None
        if partners is not None:
            self.partner = Partner(group, job.world.local_size, self._ring(partners, steps))
        self.batches = Batches(claim, self.ring, steps // 2) if on_disk else None
        self.form = f"{crc32(averages.averages_form.encode()):08x} {job.world.size}"
        self.replayed = 0
        """Steps that this start did not have to train again."""
        self.nbytes, self.seconds = 0, 0.0
        """Of all records of this start, and what they took of the training thread."""
        self._total = job.progress.total
        self._basis: Basis | None = None
        self._lacking: dict[str, str] = {}
        averages.keep_averages()

    # -- recording ----------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Note what the optimizer's step depends on, right before it."""
        began = time.perf_counter()
        self.settle()
        self._basis = self.content.basis()
        self.seconds += time.perf_counter() - began

    def record(self, checkpoint: CheckpointId, loss: Tensor | None) -> None:
        """Keep the difference of the step just done, which leads to a checkpoint of that name."""
        began, basis, self._basis = time.perf_counter(), self._basis, None
        if reason := budget.called_back(self.job.world.memory, budget.DIFFERENCES):
            for ring in [self.ring, *([self.partner.ring] if self.partner is not None else [])]:
                ring.close(reason)
            self.job.world.memory.give(budget.DIFFERENCES)
        with span("difference", "copy") as marked:
            found = self._found(checkpoint, basis, loss)
            if found is not None:
                marked.nbytes = self.ring.write(*found)
        self._says("a failure", self.ring.refused or self.ring.slot.lacking)
        if self.partner is not None:
            with span("difference to partner", "wire") as sent:
                sent.nbytes = self.partner.send(checkpoint.step, found if marked.nbytes else None)
            self._says("the loss of a host", self.partner.lacking)
        if self.batches is not None and marked.nbytes:
            assert self.claim.history is not None
            self.batches.write(checkpoint, self.claim.history)
        self.nbytes += marked.nbytes
        self.seconds += time.perf_counter() - began

    def _found(self, checkpoint: CheckpointId, basis: Basis | None, loss: Tensor | None) -> Found | None:
        """The header and tensors of the step just done; None where it cannot be replayed, or is not kept."""
        described = None if basis is None else self.content.describe(basis)
        if described is None or self.ring.refused or not self._finite(loss):
            return None
        header, tensors = described
        about = {**checkpoint.identity, "ranks": checkpoint.ranks, "local": checkpoint.local, "form": self.form}
        return about | header, tensors

    def settle(self) -> None:
        """Wait until another host has what was sent to it; a collective."""
        if self.partner is not None:
            with span("difference to partner", "wait"):
                self.partner.settle()

    def _ring(self, slot: Slot, steps: int) -> Ring:
        """A ring; the rings of a rank have one lease on its host's memory."""

        def lease(nbytes: int) -> str:
            leases = self._leases | {slot: nbytes}
            reason = budget.lacking(self.job.world.memory, budget.DIFFERENCES, 1, sum(leases.values()))
            self._leases = self._leases if reason else leases
            return reason

        return Ring(slot, steps, lease)

    def _finite(self, loss: Tensor | None) -> bool:
        """Whether the step may be continued: an accelerator does steps with a loss that is not finite."""
        return loss is None or math.isfinite(float(loss))

    @property
    def works(self) -> bool:
        """Whether steps are kept for the case that a process is killed."""
        return not self._lacking.get("a failure")

    def _says(self, failure: str, lacking: str) -> None:
        if lacking and kind_of(lacking) != kind_of(self._lacking.get(failure, "")):
            log.warning("no steps to replay after %s: %s; checkpoints are made as before", failure, lacking)
        self._lacking[failure] = lacking

    # -- replaying ----------------------------------------------------------------------------------------------------

    def replay(self, base: CheckpointId, history: History, reload: Callable[[], None]) -> list[CheckpointId]:
        """Make the steps again that were done after a checkpoint, which has been loaded; a collective.

        Args:
            reload: loads the checkpoint once more.

        Returns:
            The steps that were replayed, by the names that checkpoints of them would have.
        """
        began = time.perf_counter()
        read = self._reader(history)
        there = self._there(base, read)
        if self.partner is not None:
            self.partner.give_back(
                base.step, len(there), read, self.ring, lambda found: self._continues(found[0], history)
            )
            read = self._reader(history)
            there = self._there(base, read)
        count = min(self.group.all_gather(len(there)))
        with span("replay", "compute"):
            done, last = self._replayed(there[:count], read)
            agreed = min(self.group.all_gather(done))
            if agreed < count:
                log.warning(
                    "step %d, replayed, is not what it was: the run continues after the step before it",
                    base.step + agreed + 1,
                )
                reload()
                _, last = self._replayed(there[:agreed], read)
            self._finish(last)
        self.replayed, seconds = agreed, time.perf_counter() - began
        if agreed and self.job.world.first:
            log.info("replayed %d steps after step %d in %.2f s", agreed, base.step, seconds)
        return there[:agreed]

    def _reader(self, history: History) -> Callable[[int], Found | None]:
        """(step) -> its difference, from memory or else from disk; None if none is whole and on the run's line."""
        places = [self.ring.read] if self.ring.open() else []
        places += [self.batches.reader(history)] if self.batches is not None else []

        def read(step: int) -> Found | None:
            found = (place(step) for place in places)
            return next((each for each in found if each is not None and self._continues(each[0], history)), None)

        return read

    def _continues(self, header: Mapping[str, Any], history: History) -> bool:
        """Whether a difference is one of this run as its newest start continued it, under the same exchange."""
        checkpoint = _named(header)
        return header["form"] == self.form and checkpoint.run == history.run and history.holds(checkpoint)

    def _there(self, base: CheckpointId, read: Callable[[int], Found | None]) -> list[CheckpointId]:
        """The steps after a checkpoint whose differences this rank has, one after the other."""
        found: list[CheckpointId] = []
        while (difference := read(base.step + len(found) + 1)) is not None:
            found.append(_named(difference[0]))
        return found

    def _replayed(self, steps: Sequence[CheckpointId], read: Callable[[int], Found | None]) -> tuple[int, Found | None]:
        """Replay steps, up to the first that did something else than then; how many did not, and the last of them."""
        last: Found | None = None
        with self._no_capture():
            for count, checkpoint in enumerate(steps):
                difference = read(checkpoint.step)
                if difference is None or not self._same(*difference):
                    return count, last
                last = difference
        return len(steps), last

    def _same(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bool:
        """Replay a step; whether it did the same as then."""
        try:
            return self.content.step(header, tensors)
        except (LookupError, TypeError, ValueError) as error:  # another rank must not wait for this one
            log.warning("cannot replay step %d: %s", header["step"], error)
            return False

    def _finish(self, last: Found | None) -> None:
        """Take the states after the last replayed step; a collective.

        Raises:
            CheckpointError: on all ranks: they do not fit.
        """
        self.job.progress.total, reason = self._total, ""
        try:
            if last is not None:
                self.content.finish(*last)
        except Exception as error:  # whatever a state of the user's own raises
            reason = reason_of(error)
        if reason := next(filter(None, self.group.all_gather(reason)), ""):
            hint = "set checkpoint.tiered.differences = 0 to continue from the checkpoint before it"
            raise CheckpointError(f"a replayed step has states that do not fit this run: {reason}", hint=hint)

    @contextmanager
    def _no_capture(self) -> Iterator[None]:
        """Nobody reads the state of a step that is replayed: it was saved, counted and told before."""
        phases = self.job.phases
        works, phases[Phase.CAPTURE] = phases[Phase.CAPTURE], []
        try:
            yield
        finally:
            phases[Phase.CAPTURE] = works

    def begin(self) -> None:
        """Begin a start of the run, from the state as it is now."""
        self.content.begin()

    def close(self, *, forget: bool) -> None:
        """Stop; the ring of a run that ended by itself is removed."""
        if self.batches is not None:
            self.batches.close(forget=forget)
        if forget:
            self.ring.close()
            if self.partner is not None:
                self.partner.ring.close()
        self.job.world.memory.give(budget.DIFFERENCES)

    def facts(self) -> dict[str, float]:
        """For the report: steps replayed at the start, bytes kept, and seconds that it took of the training thread."""
        return {
            "checkpoint_replayed": self.replayed,
            "checkpoint_differences": float(self.nbytes if self.works else 0),
            "checkpoint_differing": self.seconds,
        }


def _named(header: Mapping[str, Any]) -> CheckpointId:
    """The name that a checkpoint after a difference's step would have."""
    return CheckpointId(**{name: header[name] for name in ("step", "start", "uid", "ranks", "local", "run")})
