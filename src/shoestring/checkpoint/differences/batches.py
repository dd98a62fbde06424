"""Stores step differences on disk, in the folder of the checkpoints. A file holds the differences of one rank for
several steps. Averaged gradients are equal on all ranks. So among the ranks that share a folder, only one rank writes
the averages, and the other ranks write only their own states. A file is written completely or not at all. The name of a
file contains the steps, the run, the start of the run and the rank; each difference in the file repeats its step, the
run and the start of the run. The rank that wrote a file deletes the file once the file's steps are older than all
checkpoints on disk.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

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
    """A file with the differences of one rank from step `first` to step `last`; the fields are parsed from the file's
    name."""

    path: Path
    first: int
    last: int
    run: str
    start: int
    uid: str
    rank: int

    def holds(self, history: History) -> bool:
        """Whether any step of the file is part of the run's history."""
        return self.run == history.run and history.holds(CheckpointId(self.first, self.start, self.uid, 1, 1))


class Batches:
    """Writes and reads one rank's differences on disk.

    Args:
        claim: the right of this start to write in the folder of checkpoints.
        ring: ring buffer with the differences in memory, from which files are written.
        steps: number of steps per file.
    """

    def __init__(self, claim: Claim, ring: Ring, steps: int) -> None:
        self.claim, self.disk, self.rank, self.ring, self.steps = claim, claim.disk, claim.world.rank, ring, steps
        self.lacking = ""
        """Reason why the newest file could not be written; empty if the file was written."""
        self._last = 0  # newest step whose difference is on disk
        self._nbytes = 0
        self._thread: BackgroundThread | None = None
        self._writing: Future[None] | None = None

    def write(self, checkpoint: CheckpointId, history: History) -> None:
        """If a file ends with the step of `checkpoint`, start to write all differences that are not on disk yet. A
        thread writes the differences while training continues.
        """
        if checkpoint.step % self.steps or (self._writing is not None and not self._writing.done()):
            return
        self._thread = self._thread or BackgroundThread("checkpoint-differences")
        first = max(self._last + 1, checkpoint.step - self.ring.cells + 1)
        self._writing = self._thread.submit(self._write, first, checkpoint, history)

    def _write(self, first: int, checkpoint: CheckpointId, history: History) -> None:
        copies = {step: self.ring.copied(step) for step in range(first, checkpoint.step + 1)}
        encoded: dict[int, Tensor] = {}
        for step, difference in copies.items():
            if difference is None:
                continue
            header, tensors = difference
            if not self.claim.commits:  # another rank writes the averages to this folder
                tensors = {name: tensor for name, tensor in tensors.items() if not shared(name)}
            plan = CellPlan(header, tensors)
            encoded[step] = torch.empty(plan.nbytes, dtype=torch.uint8)
            plan.put(encoded[step])
        if not encoded:
            return
        with span("differences", "disk") as marked:
            data = joined(encoded.values())
            self._nbytes = marked.nbytes = len(data)
            reason = tried(lambda: self._put(min(encoded), checkpoint, data))
            if reason and reason != self.lacking:
                log.warning("cannot write differences to disk: %s; checkpoints continue", reason)
            self.lacking = reason or ""
            if not reason:
                self._last = checkpoint.step
                # Delete files that no resumed run will need: those whose steps are older than all checkpoints on disk,
                # those of abandoned steps that were repeated, and temporary files of earlier starts of the run.
                with suppress(OSError):
                    saved = [record.checkpoint.step for _, record in manifests(self.disk.folder)]
                    for batch in self._deletable(history):
                        repeated = (
                            not batch.holds(history) and batch.start < history.epoch.start and batch.last <= self._last
                        )
                        if batch.last <= min(saved, default=0) or repeated:
                            self.disk.files.unlink(batch.path)
                    for path in self.disk.folder.glob(f".steps-*-{history.run}-*-{self.rank}.differences.tmp"):
                        self.disk.files.unlink(path)

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

    def _deletable(self, history: History) -> Iterator[BatchFile]:
        """Yield the run's files that this rank may delete.

        A rank may delete the files that it wrote itself. One rank per folder may also delete the files of ranks that no
        longer exist.
        """
        size = self.claim.world.size
        for batch in batch_files(self.disk.folder):
            if batch.run == history.run and (batch.rank == self.rank or (self.claim.commits and batch.rank >= size)):
                yield batch

    def reader(self, history: History) -> Callable[[int], Found | None]:
        """Build a function that reads this rank's difference of a step from the files of the run's history.

        The function returns None if there is no difference of the step. If this rank did not write the averages, they
        are read from another rank's file.
        """
        batches = [batch for batch in batch_files(self.disk.folder) if batch.holds(history)]
        own = _Files([batch for batch in batches if batch.rank == self.rank])
        others = _Files([batch for batch in batches if batch.rank != self.rank])

        def read(step: int) -> Found | None:
            if (difference := own.find(step)) is None or any(map(shared, difference[1])):
                return difference
            header, tensors = difference

            def has_averages(candidate: Found) -> bool:
                return any(map(shared, candidate[1])) and same(candidate, difference)

            if (match := others.find(step, has_averages)) is None:
                return None
            return header, tensors | {name: tensor for name, tensor in match[1].items() if shared(name)}

        return read

    def close(self, *, forget: bool) -> None:
        """Stop writing. If `forget`, delete all files, because the run has finished."""
        if self._thread is not None:
            self._thread.stop(WRITING, self._nbytes)
        if forget and self.claim.history is not None:
            with suppress(OSError):
                for batch in self._deletable(self.claim.history):
                    self.disk.files.unlink(batch.path)

    def drain(self) -> None:
        """Wait until all pending writes have ended."""
        if self._writing is not None:
            result_of(self._writing, WRITING, self._nbytes)


def batch_files(folder: Path) -> Iterator[BatchFile]:
    """Yield the files with differences of all ranks in a folder of checkpoints, ordered by step."""
    for path in sorted(folder.glob("steps-*")):
        if match := _NAME.fullmatch(path.name):
            first, last, run, start, uid, rank = match.groups()
            yield BatchFile(path, int(first), int(last), run, int(start), uid, int(rank))


class _Files:
    """Reads differences from files; the newest file that was read stays memory-mapped."""

    def __init__(self, batches: Sequence[BatchFile]) -> None:
        self.batches = batches
        self._mapped: tuple[Path | None, list[Tensor]] = None, []

    def find(self, step: int, fits: Callable[[Found], bool] = lambda _: True) -> Found | None:
        """Return the undamaged difference of a step for which `fits` returns True; if there are several, the one from
        the newest start of the run."""
        for batch in sorted(self.batches, key=lambda batch: -batch.start):
            if batch.first <= step <= batch.last:
                if self._mapped[0] != batch.path:
                    self._mapped = batch.path, _read(batch.path)
                for whole in self._mapped[1]:
                    if (difference := parsed(whole))[0]["step"] == step and fits(difference):
                        return difference
        return None


def same(first: Found, second: Found) -> bool:
    """Whether two differences belong to the same step of the same start of a run, and have the same encoding."""
    return all(first[0][name] == second[0][name] for name in ("step", "start", "uid", "run", "form"))


def _read(path: Path) -> list[Tensor]:
    """Memory-map a file, and return its differences as bytes, up to the first damaged difference."""
    try:
        with open_regular(path) as file:
            return list(wholes(mapped(file, file.seek(0, 2))))
    except OSError as error:
        log.warning("cannot read `%s`: %s", path, error.strerror)
        return []
