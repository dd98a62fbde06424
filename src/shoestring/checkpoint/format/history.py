"""The history of a run: which run it is, and which checkpoints its newest start continues.

Every start of a run is an epoch, as a database's recovery begins a new timeline. The history lists the epochs that led
to the newest one, each with the last step that was continued; checkpoints off this *line* were abandoned by a rollback
or written by a start that had been replaced meanwhile. It is written in the folder of checkpoints at every start, so
one record answers who may write, what is resumed, and what may be deleted.
"""

from __future__ import annotations

import json
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
_LIMIT = 1_000_000  # bytes of the longest history: some ten thousand epochs


@dataclass(frozen=True)
class Epoch:
    """One start of a run on the line."""

    start: int
    uid: str
    last: int | None = None
    """The last step that a later start continued; None for the newest epoch, which has not ended."""

    def holds(self, checkpoint: CheckpointId) -> bool:
        same = (self.start, self.uid) == (checkpoint.start, checkpoint.uid)
        return same and (self.last is None or checkpoint.step <= self.last)


@dataclass(frozen=True)
class History:
    """The run, and its line of epochs, the newest first."""

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
        """The history of a new start.

        Args:
            known: what the folder said before.
            restored: the checkpoint that it continues; without one it is a new run, whatever else is in the folder.
            others: the checkpoints that there are. Epochs that have left none are dropped from the line.
        """
        newest = Epoch(start, uid)
        if restored is None:
            return cls(secrets.token_hex(8), (newest,))
        ours = known is not None and known.holds(restored)
        run = restored.run or (known.run if known and ours else secrets.token_hex(8))
        left = {(each.start, each.uid) for each in others}
        if known is None:  # checkpoints of format 2, or the record was lost: what came before is continued
            before = {Epoch(*pair, restored.step) for pair in left if pair < (restored.start, restored.uid)}
            earlier = sorted(before, key=lambda epoch: epoch.start, reverse=True)
        else:
            of = [index for index, epoch in enumerate(known.line) if epoch.holds(restored)]
            earlier = [epoch for epoch in known.line[of[0] + 1 :] if (epoch.start, epoch.uid) in left] if of else []
        return cls(run, (newest, Epoch(restored.start, restored.uid, restored.step), *earlier))

    @property
    def epoch(self) -> Epoch:
        return self.line[0]

    def holds(self, checkpoint: CheckpointId) -> bool:
        """Whether a checkpoint is on the line: it may be resumed, and counts among those to keep."""
        return any(epoch.holds(checkpoint) for epoch in self.line)

    def superseded(self, checkpoint: CheckpointId, step: int) -> bool:
        """Whether a checkpoint is of an abandoned branch of this run, which has done that step again by `step`."""
        before = checkpoint.run == self.run and checkpoint.start < self.epoch.start
        return before and checkpoint.step <= step and not self.holds(checkpoint)

    def dumps(self) -> bytes:
        body = json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True)
        return json.dumps({"body": body, "sum": crc32(body.encode())}).encode()

    @classmethod
    def loads(cls, data: bytes, source: str) -> History:
        """The inverse of `dumps`.

        Raises:
            CheckpointError: it is damaged, or of another format.
        """
        try:
            outer = json.loads(data)
            if crc32(outer["body"].encode()) != outer["sum"]:
                raise CheckpointError(f"`{source}` is damaged: its content is not what was written")
            body = json.loads(outer["body"])
            if body["format"] != FORMAT:
                raise CheckpointError(f"`{source}` has format {body['format']!r}, this version reads {FORMAT}")
            line = tuple(_epoch(**each) for each in body["line"])
            if not line or not (isinstance(body["run"], str) and body["run"].isalnum()):
                raise ValueError("it names no run")
            return cls(body["run"], line)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"`{source}` is no history of a run, or damaged: {error}") from error

    @classmethod
    def read(cls, folder: Path) -> History | None:
        """The history in a folder of checkpoints; None where there is none.

        Raises:
            CheckpointError: it is damaged, or cannot be read.
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
            raise ValueError(f"{number!r} for a count")
    if not (isinstance(uid, str) and uid.isalnum()):
        raise ValueError(f"{uid!r} for a start")
    return Epoch(start, uid, last)
