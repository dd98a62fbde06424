"""Updates the hub's copy of a run's metrics log from the run's `metrics.jsonl`.

There is no separate record of what was sent. The hub reports the size of its log and the digest of each segment, and
the client compares both with the file. The digests also show where the file was rewritten, which happens when a run
resumes from a checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

from shoestring.core.errors import DataError, ShoestringError
from shoestring.storage import foreign
from shoestring.storage.fields import Fields
from shoestring_hub.client.connection import Connection, HubError
from shoestring_hub.protocol import LOG_PART, digest


class SupersededError(ShoestringError):
    """Another process, usually a later start of the run, now writes the run's log on the hub."""


class MetricsLog:
    """The client's view of the hub's log of one run.

    Args:
        key: the run's key.
        title: name for the run, used only if the hub does not know the run yet.
        begin: whether this process is a new start of the run; the hub then refuses requests from earlier starts.
    """

    def __init__(self, connection: Connection, key: str, title: str, *, begin: bool) -> None:
        self.connection, self.key, self.title, self.begin = connection, key, title, begin
        self.page, self.size, self.attempt = "", 0, 0
        self._segments: list[Any] = []
        self._opened, self._compare = False, True

    def look_up(self, *, begin: bool = False) -> None:
        """Find or create the run on the hub, and read the size, attempt number and segments of the hub's log."""
        answer = self.connection.ask("POST", f"own/{self.key}", {"name": self.title, "begin": begin})
        facts = Fields(answer, "the hub's answer", DataError)
        attempt = facts.count("attempt", least=0)
        if self._opened and self.begin and attempt != self.attempt:
            raise SupersededError("a later start of this run writes to the hub")
        self.size, self.attempt = facts.count("size", least=0, most=1 << 50), attempt
        self._segments, self._compare = answer.get("segments") or [], True
        self.page, self._opened = f"{self.connection.login.address.rstrip('/')}{facts.text('page')}", True

    def catch_up(self, path: Path) -> int:
        """Send the part of a file that the hub lacks; returns the number of bytes sent.

        Raises:
            SupersededError: a later start of the run has begun to write the log.
            OSError, ShoestringError: the file cannot be read, or the hub refuses the request or cannot be reached.
        """
        if not self._opened:
            self.look_up(begin=self.begin)
        with foreign.open_file(path, path.parent) as file:
            size = file.seek(0, 2)
            if size == self.size and not self._compare:
                return 0
            return self._send(file, size)

    def _send(self, file: BinaryIO, size: int) -> int:
        sent = 0
        for _ in range(10):  # another program may write the same log; compare again each time
            at = self._common(file, size) if self._compare or size < self.size else self.size
            try:
                while at < size or at < self.size:
                    data = _read(file, at, min(LOG_PART, size - at))
                    if not data and at == self.size:  # the file was truncated in the meantime
                        break
                    query = {"at": at, "have": self.size, "attempt": self.attempt}
                    at = self.size = int(self.connection.ask("PUT", f"own/{self.key}/log", data, **query)["size"])
                    sent += len(data)
                self._compare = False
                return sent
            except HubError as error:
                if error.status != 409:
                    raise
                self.look_up()
        raise SupersededError("another program keeps writing the log of this run to the hub")

    def _common(self, file: BinaryIO, size: int) -> int:
        """Number of leading bytes that the file shares with the hub's log, counted in whole segments."""
        if self.size and not self._segments:
            self.look_up()
        end = 0
        for offset, length, name in self._segments:
            if offset != end or offset + length > size or digest(_read(file, offset, length)) != name:
                break
            end = offset + length
        self._segments = []
        return end


def _read(file: BinaryIO, at: int, size: int) -> bytes:
    file.seek(at)
    return file.read(size)
