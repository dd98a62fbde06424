"""The history of a run: its identity, and the starts of the run that led to the newest start.

Every start of a run (the first launch and each restart) is called an epoch. The history lists the epochs that led to
the newest epoch, each with the step from which the next epoch continued. The list of these epochs is called the run's
*line*. A checkpoint that is not on the line was abandoned by a rollback, or written by a process after another start
had replaced it. Every start writes the history to the folder of checkpoints. The history determines which process may
write, from which checkpoints a run may resume, and which checkpoints may be deleted.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path

from shoestring.checkpoint.format.checksum import crc32
from shoestring.checkpoint.format.manifest import CheckpointId
from shoestring.core.errors import CheckpointError
from shoestring.storage.guarded import read_regular

HISTORY = "history.json"
FORMAT = 1
_LIMIT = 1_000_000  # maximum size of a history in bytes: about ten thousand epochs


@dataclass(frozen=True)
class Epoch:
    """One start of a run: its number, a random identity, and the last step that belongs to the run's history."""

    start: int
    uid: str
    last: int | None = None
    """The step from which the next epoch continued; None for the newest epoch, which has not ended."""

    def holds(self, checkpoint: CheckpointId) -> bool:
        """Whether this start wrote the checkpoint, and the checkpoint's step is not after `last`."""
        same = (self.start, self.uid) == (checkpoint.start, checkpoint.uid)
        return same and (self.last is None or checkpoint.step <= self.last)


@dataclass(frozen=True)
class History:
    """Identity of a run, and the epochs that led to the newest epoch, the newest first."""

    run: str
    line: tuple[Epoch, ...]

    @classmethod
    def following(
        cls,
        known: History | None,
        restored: CheckpointId | None,
        others: Collection[CheckpointId],
        start: int,
        uid: str,
    ) -> History:
        """Build the history for a new start of a run.

        Args:
            known: the previous history in the folder; None if there was none.
            restored: the checkpoint from which the start resumes; None begins a new run, even if the folder contains
                checkpoints.
            others: all checkpoints that exist. Epochs without existing checkpoints are dropped from the line.
            start: number of the new start.
            uid: random identity of the new start.
        """
        newest = Epoch(start, uid)
        if restored is None:
            return cls(secrets.token_hex(8), (newest,))
        ours = known is not None and known.holds(restored)
        run = restored.run or (known.run if known and ours else secrets.token_hex(8))
        left = {(checkpoint.start, checkpoint.uid) for checkpoint in others}
        if known is None:  # checkpoints of format 2, or a lost history: assume that all earlier starts are on the line
            before = {Epoch(*pair, restored.step) for pair in left if pair < (restored.start, restored.uid)}
            earlier = sorted(before, key=lambda epoch: epoch.start, reverse=True)
        else:
            places = [index for index, epoch in enumerate(known.line) if epoch.holds(restored)]
            below = known.line[places[0] + 1 :] if places else ()
            earlier = [epoch for epoch in below if (epoch.start, epoch.uid) in left]
        return cls(run, (newest, Epoch(restored.start, restored.uid, restored.step), *earlier))

    @classmethod
    def of_what_is_there(cls, checkpoints: Collection[CheckpointId]) -> History | None:
        """Reconstruct a lost or damaged history from the existing checkpoints; returns None if no checkpoint names its
        run.

        The newest start becomes the newest epoch. Of each earlier start, the line includes the steps up to the last
        step that no later start has repeated.
        """
        named = [checkpoint for checkpoint in checkpoints if checkpoint.run]
        newest = max(named, key=lambda checkpoint: (checkpoint.start, checkpoint.step), default=None)
        if newest is None:
            return None
        line, redone = [Epoch(newest.start, newest.uid)], math.inf
        own = [checkpoint for checkpoint in named if checkpoint.run == newest.run]
        for start in sorted({checkpoint.start for checkpoint in own}, reverse=True):
            written = [checkpoint for checkpoint in own if checkpoint.start == start]
            left = [checkpoint for checkpoint in written if checkpoint.step < redone]
            if start < newest.start and left:
                last = max(left)
                line.append(Epoch(start, last.uid, last.step))
            redone = min(redone, *(checkpoint.step for checkpoint in written))
        return cls(newest.run, tuple(line))

    @property
    def epoch(self) -> Epoch:
        return self.line[0]

    def holds(self, checkpoint: CheckpointId) -> bool:
        """Whether a checkpoint is on the line, so that the run may resume from it."""
        return any(epoch.holds(checkpoint) for epoch in self.line)

    def superseded(self, checkpoint: CheckpointId, step: int) -> bool:
        """Whether a checkpoint lies on an abandoned branch, and the run has since trained the checkpoint's step again.

        Args:
            step: the newest step of the run.
        """
        before = checkpoint.run == self.run and checkpoint.start < self.epoch.start
        return before and checkpoint.step <= step and not self.holds(checkpoint)

    def dumps(self) -> bytes:
        body = json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True)
        return json.dumps({"body": body, "sum": crc32(body.encode())}).encode()

    @classmethod
    def loads(cls, data: bytes, source: str) -> History:
        """Parse a history that `dumps` has encoded.

        Raises:
            CheckpointError: the data is damaged, or has another format.
        """
        try:
            outer = json.loads(data)
            if crc32(outer["body"].encode()) != outer["sum"]:
                raise CheckpointError(f"`{source}` is damaged: its checksum does not match")
            body = json.loads(outer["body"])
            if body["format"] != FORMAT:
                raise CheckpointError(f"`{source}` has format {body['format']!r}, this version reads {FORMAT}")
            line = tuple(_epoch(**fields) for fields in body["line"])
            if not line or not (isinstance(body["run"], str) and body["run"].isalnum()):
                raise ValueError("it does not name a run")
            return cls(body["run"], line)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"`{source}` is not the history of a run, or damaged: {error}") from error

    @classmethod
    def read(cls, folder: Path) -> History | None:
        """Read the history in a folder of checkpoints; returns None if the folder has no history.

        Raises:
            CheckpointError: the history is damaged, or cannot be read.
        """
        path = folder / HISTORY
        try:
            return cls.loads(read_regular(path, _LIMIT), str(path))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CheckpointError(f"cannot read `{path}`: {error.strerror}") from error


def _epoch(start: int, uid: str, last: int | None) -> Epoch:
    for number in (start, 0 if last is None else last):
        if type(number) is not int or not 0 <= number < 1 << 60:
            raise ValueError(f"{number!r} is not a valid number")
    if not (isinstance(uid, str) and uid.isalnum()):
        raise ValueError(f"{uid!r} is not the identity of a start")
    return Epoch(start, uid, last)
