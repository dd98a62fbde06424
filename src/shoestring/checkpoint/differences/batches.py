"""Differences on disk: a rank's newest ones in one file, every few steps, beside the checkpoints that they follow.

Averages are equal on all ranks, so one rank of each folder writes them, and the others only their own states. A file is
written whole or not at all. It says by its name of which steps, start of the run, and rank it is, and each difference
in it says so again. Files that lead on from no checkpoint any more are deleted by the rank that wrote them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoestring.checkpoint.differences.difference import shared
from shoestring.checkpoint.differences.ring import CellPlan, Found, Ring, joined, parsed, wholes
from shoestring.checkpoint.format.history import History
from shoestring.checkpoint.format.manifest import CheckpointId
from shoestring.checkpoint.format.part import mapped
from shoestring.checkpoint.tiers.claim import Claim
from shoestring.checkpoint.tiers.disk import manifests
from shoestring.checkpoint.tiers.file_acts import tried
from shoestring.checkpoint.tiers.waits import BackgroundThread, result_of
from shoestring.core.trace import span
from shoestring.storage.guarded import open_regular

log = logging.getLogger("shoestring")

_NAME = re.compile(r"steps-(\d{8,})-(\d{8,})-([0-9a-z]+)-(\d{4,})-([0-9a-z]+)-(\d+)\.differences")
WRITING = "writing differences to disk"


@dataclass(frozen=True)
class BatchFile:
    """A file with the differences of some steps of one rank."""

    path: Path
    first: int
    last: int
    run: str
    start: int
    uid: str
    rank: int

    def holds(self, history: History) -> bool:
        """Whether any of its steps is on the line of the run."""
        return self.run == history.run and history.holds(CheckpointId(self.first, self.start, self.uid, 1, 1))


class Batches:
    """One rank's differences on disk.

    Args:
        steps: number of steps in a file.
    """

    def __init__(self, claim: Claim, ring: Ring, steps: int) -> None:
        self.claim, self.disk, self.rank, self.ring, self.steps = claim, claim.disk, claim.world.rank, ring, steps
        self.lacking = ""
        """Why the newest file could not be written."""
        self._last = 0  # the newest step on disk
        self._nbytes = 0
        self._thread: BackgroundThread | None = None
        self._writing: Future[None] | None = None

    def write(self, checkpoint: CheckpointId, history: History) -> None:
        """Write what is not on disk yet, up to the step of that name, beside training; at the end of each file."""
        if checkpoint.step % self.steps or (self._writing is not None and not self._writing.done()):
            return
        self._thread = self._thread or BackgroundThread("checkpoint-differences")
        first = max(self._last + 1, checkpoint.step - self.ring.cells + 1)
        self._writing = self._thread.submit(self._write, first, checkpoint, history)

    def _write(self, first: int, checkpoint: CheckpointId, history: History) -> None:
        there = {step: self.ring.copied(step) for step in range(first, checkpoint.step + 1)}
        found = {step: self._shortened(*whole) for step, whole in there.items() if whole is not None}
        if not found:
            return
        with span("differences", "disk") as marked:
            data = joined(found.values())
            self._nbytes = marked.nbytes = len(data)
            reason = tried(lambda: self._put(min(found), checkpoint, data))
            if reason and reason != self.lacking:
                log.warning("no differences on disk: %s; checkpoints are made as before", reason)
            self.lacking = reason or ""
            if not reason:
                self._last = checkpoint.step
                self._retire(history)

    def _shortened(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> Tensor:
        """A difference as bytes; without averages if another rank writes them to this folder."""
        own = tensors if self.claim.commits else {name: each for name, each in tensors.items() if not shared(name)}
        plan = CellPlan(header, own)
        data = torch.empty(plan.nbytes, dtype=torch.uint8)
        plan.put(data)
        return data

    def _put(self, first: int, checkpoint: CheckpointId, data: Tensor) -> None:
        files, folder = self.disk.files, self.disk.folder
        files.folder(folder)
        run, start, uid = checkpoint.run, checkpoint.start, checkpoint.uid
        name = f"steps-{first:08d}-{checkpoint.step:08d}-{run}-{start:04d}-{uid}-{self.rank}.differences"
        aside = folder / f".{name}.tmp"
        files.unlink(aside)
        files.write(aside, data)
        files.rename(aside, folder / name)
        files.sync(folder)

    def _retire(self, history: History) -> None:
        """Delete the files of this run and rank whose steps come before all checkpoints that are kept, or that were
        abandoned and are done again; and what was being written when an earlier start ended."""
        with suppress(OSError):
            kept = [record.checkpoint.step for _, record in manifests(self.disk.folder)]
            for batch in self._mine(history):
                done_again = not batch.holds(history) and batch.start < history.epoch.start and batch.last <= self._last
                if batch.last <= min(kept, default=0) or done_again:
                    self.disk.files.unlink(batch.path)
            for path in self.disk.folder.glob(f".steps-*-{history.run}-*-{self.rank}.differences.tmp"):
                self.disk.files.unlink(path)

    def _there(self) -> Iterator[BatchFile]:
        """The files of all ranks in this folder, in the order of their steps."""
        for path in sorted(self.disk.folder.glob("steps-*")):
            if found := _NAME.fullmatch(path.name):
                yield BatchFile(path, int(found[1]), int(found[2]), found[3], int(found[4]), found[5], int(found[6]))

    def _mine(self, history: History) -> Iterator[BatchFile]:
        """The run's files that this rank deletes: its own, and on one rank of each folder those of former ranks."""
        size = self.claim.world.size
        for each in self._there():
            if each.run == history.run and (each.rank == self.rank or (self.claim.commits and each.rank >= size)):
                yield each

    def reader(self, history: History) -> Callable[[int], Found | None]:
        """(step) -> what is on disk of it, on the line of a run: header and tensors; None where it is not whole."""
        batches = [batch for batch in self._there() if batch.holds(history)]
        own, averages = (_Files([b for b in batches if (b.rank == self.rank) is mine]) for mine in (True, False))

        def read(step: int) -> Found | None:
            if (found := own.find(step)) is None or any(map(shared, found[1])):
                return found
            if (other := averages.find(step, lambda each: any(map(shared, each[1])) and same(each, found))) is None:
                return None
            return found[0], found[1] | {name: each for name, each in other[1].items() if shared(name)}

        return read

    def close(self, *, forget: bool) -> None:
        """Stop; of a run that ended by itself nothing stays."""
        if self._thread is not None:
            self._thread.stop(WRITING, self._nbytes)
        if forget and self.claim.history is not None:
            with suppress(OSError):
                for batch in self._mine(self.claim.history):
                    self.disk.files.unlink(batch.path)

    def drain(self) -> None:
        """Wait until nothing is being written."""
        if self._writing is not None:
            result_of(self._writing, WRITING, self._nbytes)


class _Files:
    """Files with differences, of which the newest that was needed is mapped."""

    def __init__(self, batches: Sequence[BatchFile]) -> None:
        self.batches = batches
        self._mapped: tuple[Path | None, list[Tensor]] = None, []

    def find(self, step: int, fits: Callable[[Found], bool] = lambda _: True) -> Found | None:
        """A step's difference that fits, whole; the newest start's, if there are several."""
        for batch in sorted(self.batches, key=lambda batch: -batch.start):
            if batch.first <= step <= batch.last:
                if self._mapped[0] != batch.path:
                    self._mapped = batch.path, _read(batch.path)
                for whole in self._mapped[1]:
                    if (found := parsed(whole))[0]["step"] == step and fits(found):
                        return found
        return None


def same(one: Found, other: Found) -> bool:
    """Whether two differences are of one step of one start of a run."""
    return all(one[0][name] == other[0][name] for name in ("step", "start", "uid", "run", "form"))


def _read(path: Path) -> list[Tensor]:
    """The differences in a file, mapped; those behind damage are not found."""
    try:
        with open_regular(path) as file:
            return list(wholes(mapped(file, file.seek(0, 2))))
    except OSError as error:
        log.warning("cannot read `%s`: %s", path, error.strerror)
        return []
