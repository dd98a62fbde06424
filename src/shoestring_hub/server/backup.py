"""Backup and restore of a hub: its rows as JSON (for SQLite and PostgreSQL alike), secret key, chunks and clips.

Chunks and clips never change, so a backup copies only those that it lacks. All rows are those of one moment, and are
read before the files, so that no row of the backup refers to a file that arrives later. `clean`, which alone removes
files, does not run beside a backup.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from shoestring import figures
from shoestring.core.errors import ConfigError, DataError
from shoestring.storage import foreign
from shoestring.storage.guarded import private_folder
from shoestring.storage.whole import put_aside, write_atomic
from shoestring_hub.server.configure import KEY, Place, configure, require_hub
from shoestring_hub.server.serve import prepare

ROWS = "rows.jsonl"
FOLDERS = ("chunks", "clips")
"""Folders of a hub with files that never change, in a folder for each project, and named by their digest."""


def back_up(place: Place, to: Path) -> str:
    """Copy a hub to a folder while the hub may be serving.

    Raises:
        ConfigError: there is no hub, or `clean` is running.
        OSError: the folder cannot be written; an earlier backup in it stays intact.
    """
    require_hub(place)
    configure(place)
    prepare()
    from django.core import serializers

    from shoestring_hub.server.clip_files import read_blocks

    to, copied = private_folder(to.resolve().parent, to.name), 0
    with files_stay(place):
        with _one_moment(), put_aside(to / ROWS) as file:
            for model in _models():
                rows = model.objects.order_by("pk").iterator(chunk_size=200)
                for text in (serializers.serialize("jsonl", [row]) for row in rows):
                    file.write(text.encode())
        for name in FOLDERS:
            for path in sorted((place.folder / name).glob("*/*/*")):
                target = to / name / path.relative_to(place.folder / name)
                if not target.exists() and not path.name.startswith("."):
                    write_atomic(target, read_blocks(path))
                    copied += path.stat().st_size
    shutil.copyfile(place.folder / KEY, to / KEY)  # own file: serve wrote it
    (to / KEY).chmod(0o600)
    return f"{to}: all rows, and {figures.size(copied)} of new chunks and clips"


@contextmanager
def files_stay(place: Place, *, removing: bool = False) -> Iterator[None]:
    """Context in which nothing else removes chunks or clips of a hub.

    Args:
        removing: whether the context itself removes them: then no backup runs meanwhile. Other backups may.

    Raises:
        ConfigError: files are being removed, or, if `removing`, a backup is being made.
    """
    # The folder itself is locked: a lock file that root made could not be opened by the hub's own user.
    folder = os.open(place.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # own file: the folder
    try:
        try:
            fcntl.flock(folder, (fcntl.LOCK_EX if removing else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            other = "a backup of this hub is being made" if removing else "`shoestring hub clean` is running"
            raise ConfigError(other, hint="try again when it has ended") from error
        yield
    finally:
        os.close(folder)


@contextmanager
def _one_moment() -> Iterator[None]:
    """Transaction that reads the database as it is at its first query, while others go on to write.

    In PostgreSQL's default transactions each query sees what was committed before it: rows of a later table could refer
    to rows that an earlier table did not have yet. In SQLite the hub's transactions lock out all writers.
    """
    from django.db import connection, transaction

    with ExitStack() as stack:
        if connection.vendor == "sqlite":
            stack.callback(setattr, connection, "transaction_mode", connection.transaction_mode)
            connection.transaction_mode = "DEFERRED"
        stack.enter_context(transaction.atomic())
        if connection.vendor != "sqlite":
            connection.cursor().execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        yield


def restore(backup: Path, place: Place) -> str:
    """Create a hub from a backup, in an empty folder and an empty database.

    Raises:
        ConfigError: there is no backup, or the hub is not empty.
        DataError: the backup is damaged: rows cannot be read, or chunks are missing or do not match their digests.
    """
    if not (backup / ROWS).is_file():
        raise ConfigError(f"there is no backup in {backup}")
    if place.folder.exists() and any(place.folder.iterdir()):
        raise ConfigError(f"`{place.folder}` is not empty", hint="restore to a new folder")
    private_folder(place.folder.resolve().parent, place.folder.name)
    write_atomic(place.folder / KEY, foreign.read_bytes(backup / KEY, 1000))
    (place.folder / KEY).chmod(0o600)
    configure(place)
    prepare()
    from django.core import serializers
    from django.core.management import call_command
    from django.core.management.color import no_style
    from django.db import connection, transaction

    from shoestring_hub.server.models import File, HubClip, Person

    if Person.objects.exists():
        raise ConfigError("the database is not empty", hint="name another one with --database")
    with transaction.atomic():
        for number, line in enumerate(foreign.read_lines(backup / ROWS), 1):
            try:
                for row in serializers.deserialize("jsonl", line.decode()):
                    row.save()
            except (serializers.base.DeserializationError, ValueError) as error:
                raise DataError(f"{backup / ROWS}: line {number} is damaged: {error}") from error
        for statement in connection.ops.sequence_reset_sql(no_style(), _models()):
            connection.cursor().execute(statement)
    count = _copy_files(backup, place)
    rows = [*File.objects.values_list("run__project", "chunks"), *HubClip.objects.values_list("project", "chunks")]
    needed = [("chunks", project, name) for project, named in rows for name in named]
    for project, *named in HubClip.objects.values_list("project", "video", "poster"):
        needed += [("clips", project, name) for name in named if name]
    for folder, project, name in needed:
        if not (place.folder / folder / str(project) / name[:2] / name).is_file():
            raise DataError(f"the backup lacks the file {name} of `{folder}`")
    call_command("clearsessions")
    return f"{place.folder}: all rows and {count} chunks and clips, each of them checked"


def _copy_files(backup: Path, place: Place) -> int:
    count = 0
    for name in FOLDERS:
        for path in sorted((backup / name).glob("*/*/*")):
            write_atomic(place.folder / name / path.relative_to(backup / name), _checked(path))
            count += 1
    return count


def _checked(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file; raises DataError at the end if they do not match the digest in its name."""
    from shoestring_hub.server.clip_files import read_blocks

    checked = hashlib.sha256()
    for block in read_blocks(path):
        checked.update(block)
        yield block
    if checked.hexdigest() != path.name:
        raise DataError(f"`{path}` is damaged: its bytes do not match the digest in its name")


def _models() -> list[type]:
    """The tables, ordered so that rows refer only to rows of earlier tables."""
    from shoestring_hub.server import models

    names = ("Person", "Project", "Member", "Invitation", "Token", "Deposit", "HubRun", "Tag", "File", "Segment")
    names += ("ValueKey", "Points", "RunValue", "HubClip", "ClipJob", "ClipShare", "Comment", "Mention", "Follow")
    names += ("AuditEvent",)
    return [getattr(models, name) for name in names]
