"""Sends the folder of a run to the hub."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from shoestring import figures
from shoestring.storage import foreign
from shoestring_hub.client.connection import Connection, HubError
from shoestring_hub.client.logins import login_for
from shoestring_hub.client.metrics_log import MetricsLog
from shoestring_hub.client.run_files import key_of, list_files
from shoestring_hub.protocol import BATCH, CHUNK, LOG, digest

ATTEMPTS = 5
"""Maximum number of attempts to send a file that changes while it is sent."""
FILES_AT_ONCE = 200
"""Maximum number of files that are open at the same time."""


@dataclass(frozen=True)
class Pushed:
    """The result of a push: lines to print, and the number of files that could not be sent."""

    lines: Sequence[str]
    left_out: int
    """Number of files that could not be sent, so that the hub lacks them or has an older version."""


@dataclass
class Snapshot:
    """A file in the state in which it was opened: its size and the digests of its chunks."""

    path: str
    file: BinaryIO
    size: int
    chunks: list[str]

    def read(self, index: int) -> bytes:
        """The bytes of a chunk; they do not match its digest if the file has changed since."""
        self.file.seek(index * CHUNK)
        return self.file.read(min(CHUNK, self.size - index * CHUNK))


def push(folder: Path, *, project: str = "", checkpoints: bool = False, patience: float = 60.0) -> Pushed:
    """Send the files of a run folder, and make the hub's copy equal to it.

    If the run is still training, each file is sent in the state in which it is opened. Without `checkpoints`, the hub
    keeps the checkpoints that it already has.

    Args:
        project: project of the hub; defaults to the project of the last login.
        patience: seconds for which a request is tried again while the hub cannot be reached.

    Raises:
        ConfigError: there is no login, or `folder` is not a run folder.
        ShoestringError: the hub refuses the request or cannot be reached; a later push continues.
    """
    folder = Path(folder)
    connection = Connection(login_for(project), patience)
    key = key_of(folder)
    log = MetricsLog(connection, key, folder.resolve().name, begin=False)
    log.look_up()
    listing = list_files(folder, checkpoints=checkpoints)
    sent, lines = 0, list(listing.left_out)
    paths = list(listing.paths)
    while paths:
        count, done, gone = _send_batch(connection, key, folder, paths)
        sent, paths = sent + count, paths[done:]
        lines += gone
    if (folder / LOG).is_file():
        sent += log.catch_up(folder / LOG)
    connection.ask("POST", f"own/{key}/keep", {"paths": listing.paths, "checkpoints": checkpoints})
    connection.close()
    lines.append(f"{log.page}: {len(listing.paths)} files and the metrics are there, {figures.size(sent)} were sent")
    return Pushed(lines, sum(line.startswith("left out") for line in lines))


def send_files(connection: Connection, key: str, folder: Path, paths: Sequence[str]) -> None:
    """Send some small files of a run folder; files that do not exist are skipped."""
    there = [path for path in paths if (folder / path).is_file()]
    if there:
        _send_batch(connection, key, folder, there)


def _send_batch(connection: Connection, key: str, folder: Path, paths: Sequence[str]) -> tuple[int, int, list[str]]:
    """Send the first files of `paths`, up to about `BATCH` bytes in total.

    Returns:
        The number of bytes sent, the number of paths processed, and a line for each file that could not be sent.
    """
    lines: list[str] = []
    with ExitStack() as stack:
        snapshots: list[Snapshot] = []
        done = total = 0
        while done < min(len(paths), FILES_AT_ONCE) and total < BATCH:
            try:
                file = stack.enter_context(foreign.open_file(folder / paths[done], folder))
            except FileNotFoundError:  # deleted since it was listed, as happens to old checkpoints
                pass
            except OSError as error:
                lines.append(f"left out: {paths[done]}: {error.strerror}")
            else:
                snapshots.append(take_snapshot(paths[done], file))
                total += snapshots[-1].size
            done += 1
        sent = 0
        for _ in range(ATTEMPTS):
            count, changed = send_chunks(connection, snapshots)
            sent += count
            settled = [snapshot for snapshot in snapshots if snapshot not in changed]
            if _commit(connection, key, settled):
                snapshots = [take_snapshot(snapshot.path, snapshot.file) for snapshot in changed]
            if not snapshots:
                break
        lines += [f"left out: {snapshot.path}: it keeps changing while it is sent" for snapshot in snapshots]
    return sent, done, lines


def take_snapshot(path: str, file: BinaryIO) -> Snapshot:
    """Record the present size of an open file and the digests of its chunks."""
    snapshot = Snapshot(path, file, file.seek(0, 2), [])
    snapshot.chunks = [digest(snapshot.read(index)) for index in range(-(-snapshot.size // CHUNK))]
    return snapshot


def send_chunks(connection: Connection, snapshots: Sequence[Snapshot]) -> tuple[int, list[Snapshot]]:
    """Send the chunks that the hub lacks; returns the number of bytes sent, and the files that changed meanwhile."""
    names = list(dict.fromkeys(name for snapshot in snapshots for name in snapshot.chunks))
    missing: set[str] = set()
    for start in range(0, len(names), 1000):
        missing.update(connection.ask("POST", "chunks/missing", {"digests": names[start : start + 1000]})["missing"])
    sent, changed = 0, []
    for snapshot, index, name in _places(snapshots):
        if name in missing and snapshot not in changed:
            data = snapshot.read(index)
            if digest(data) != name:
                changed.append(snapshot)
                continue
            connection.ask("PUT", f"chunks/{name}", data)
            missing.discard(name)
            sent += len(data)
    return sent, changed


def _places(snapshots: Sequence[Snapshot]) -> Iterator[tuple[Snapshot, int, str]]:
    return ((snapshot, index, name) for snapshot in snapshots for index, name in enumerate(snapshot.chunks))


def _commit(connection: Connection, key: str, snapshots: Sequence[Snapshot]) -> bool:
    """Register the files whose chunks were sent; returns False if the hub has lost chunks, which must be sent again."""
    files: list[dict[str, Any]] = [
        {"path": snapshot.path, "size": snapshot.size, "chunks": snapshot.chunks} for snapshot in snapshots
    ]
    try:
        if files:
            connection.ask("POST", f"own/{key}/files", {"files": files})
    except HubError as error:
        if error.status == 409 and "missing" in error.facts:
            return False
        raise
    return True
