"""Downloads the folder of a run from the hub, and checks the digests of all bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoestring import figures
from shoestring.core.errors import ConfigError, DataError
from shoestring.storage import foreign
from shoestring.storage.fields import Fields
from shoestring.storage.whole import write_atomic
from shoestring_hub.client.connection import Connection
from shoestring_hub.client.logins import login_for
from shoestring_hub.protocol import CHUNK, DIGEST, LOG, digest, fault_of_path

LOG_LIMIT = 1 << 32
"""Maximum size of a log, in bytes."""
_OWN = "trackers.json"


def pull(run: int, folder: Path | None = None, *, project: str = "", patience: float = 60.0) -> list[str]:
    """Download the files of a run to a folder; files that are already there with the right bytes are not written again.

    Args:
        run: number of the run in its project.
        folder: defaults to `runs/NAME`, or to `runs/NAME-NUMBER` if `runs/NAME` belongs to another run.

    Raises:
        ConfigError: the folder belongs to another run.
        DataError: the hub sends paths that are not valid in a run folder, or bytes that do not match their digests.
        ShoestringError: the hub refuses the request or cannot be reached; a later pull to the same folder continues.
    """
    connection = Connection(login_for(project), patience)
    fields = Fields(connection.ask("GET", f"runs/{run}"), "the hub's answer", DataError)
    key, files = fields.text("key"), [_checked(entry) for entry in fields.tables("files")]
    target = _target(folder, fields.text("name"), run, key)
    received = 0
    for path, size, chunks in sorted(files, key=lambda file: file[0] != _OWN):  # first the file with the run's key
        if _digests(target / path, size) != chunks:
            write_atomic(target / path, _download(connection, run, path, chunks))
            received += size
    log = fields.entries("log")
    if (size := log.count("size", least=0, most=LOG_LIMIT)) and not _has_log(target / LOG, size, log.get("segments")):
        data = connection.fetch(f"runs/{run}/log", LOG_LIMIT)
        if len(data) < size or not _is_log(data[:size], log.get("segments")):
            raise DataError("the hub's metrics have changed while they were received", hint="pull again")
        write_atomic(target / LOG, data[:size])
        received += size
    return [f"{target}: {len(files)} files and the metrics, {figures.size(received)} were received"]


def _checked(entry: dict[str, Any]) -> tuple[str, int, list[str]]:
    fields = Fields(entry, "the hub's list of files", DataError)
    path, size = fields.text("path"), fields.count("size", least=0, most=1 << 50)
    chunks = fields.texts("chunks")
    if reason := fault_of_path(path):
        raise DataError(f"the hub names a file `{foreign.one_line(path)[:100]}`: {reason}")
    if len(chunks) != -(-size // CHUNK) or not all(map(DIGEST.fullmatch, chunks)):
        raise DataError(f"the hub lists malformed chunks for `{path}`")
    return path, size, chunks


def _target(folder: Path | None, name: str, run: int, key: str) -> Path:
    """Choose the folder to write: a new or empty folder, or one that already belongs to this run."""
    base = name.replace("/", "_").strip(".")[:100] or "run"
    choices = [Path(folder)] if folder else [Path("runs") / base, Path("runs") / f"{base}-{run}"]
    for choice in choices:
        if not choice.exists() or (choice.is_dir() and not any(choice.iterdir())) or _key_in(choice) == key:
            return choice
    raise ConfigError(f"`{choices[-1]}` exists, but is not the folder of this run", hint="choose another with --folder")


def _key_in(folder: Path) -> str:
    try:
        return str(foreign.read_json_object(folder / _OWN, within=folder).get("hub", ""))
    except (OSError, ValueError):
        return ""


def _digests(path: Path, size: int) -> list[str] | None:
    """The digests of a file's chunks; None if the file is missing or does not have this size."""
    try:
        with foreign.open_file(path) as file:
            if file.seek(0, 2) != size:
                return None
            file.seek(0)
            return [digest(file.read(CHUNK)) for _ in range(-(-size // CHUNK))]
    except OSError:
        return None


def _download(connection: Connection, run: int, path: str, chunks: list[str]) -> Iterator[bytes]:
    for index, name in enumerate(chunks):
        data = connection.fetch(f"runs/{run}/chunk", CHUNK, {"path": path, "chunk": index})
        if digest(data) != name:
            raise DataError(f"the bytes that the hub sent for `{path}` do not match their digest", hint="pull again")
        yield data


def _has_log(path: Path, size: int, segments: Any) -> bool:
    try:
        return path.stat().st_size == size and _is_log(foreign.read_bytes(path, LOG_LIMIT), segments)
    except OSError:
        return False


def _is_log(data: bytes, segments: Any) -> bool:
    """Whether `data` consists of exactly these segments, which are triples of offset, size and digest."""
    end = 0
    for offset, length, name in segments if isinstance(segments, list) else []:
        if offset != end or digest(data[offset : offset + length]) != name:
            return False
        end = offset + length
    return end == len(data)
