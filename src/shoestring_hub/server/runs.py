"""Runs that programs send: opening a run, storing its files, and updating its entry in the table of runs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from django.db import IntegrityError, transaction
from django.db.models import Max
from django.utils import timezone

from shoestring.report import digest, history_file
from shoestring.report.reading import RunFolder, flat, standing
from shoestring.storage import foreign
from shoestring_hub.protocol import CHECKPOINTS, CHUNK, DIGEST, FILES_LIMIT, LOG, fault_of_path
from shoestring_hub.server import chunks, logs, numbers
from shoestring_hub.server.access import Access, RefusedError
from shoestring_hub.server.models import NAME, Deposit, File, HubRun, Points, RunValue, Token, ValueKey

log = logging.getLogger("shoestring")

DESCRIBING = ("run.toml", "environment.json", "summary.json", "history.jsonl")
"""Files of a run folder that describe the run and how it ended."""
SETTINGS_LIMIT = 1000
"""Maximum number of a run's settings in the table of runs."""


def open_run(access: Access, key: str, name: str) -> HubRun:
    """Find the run with this key in the token's project, or create it.

    Raises:
        RefusedError: the token is write-only and the run was created with another token, or the run was deleted.
    """
    run = HubRun.objects.filter(project=access.project, key=key).first() or _make(access, key, name)
    check_run(access, run)
    return run


def _make(access: Access, key: str, name: str) -> HubRun:
    for _ in range(100):
        newest = HubRun.objects.filter(project=access.project).aggregate(newest=Max("number"))["newest"] or 0
        try:
            with transaction.atomic():
                return HubRun.objects.create(
                    project=access.project,
                    number=newest + 1,
                    key=key,
                    name=foreign.one_line(name)[:NAME] or "run",
                    person=access.person,
                    token=access.token,
                )
        except IntegrityError:  # another request took the number or created the run
            if run := HubRun.objects.filter(project=access.project, key=key).first():
                return run
    raise RefusedError(503, "too many runs are being created at the same time")


def check_run(access: Access, run: HubRun) -> None:
    """Refuse a deleted run, and, for a write-only token, a run that was not created with this token."""
    token = access.token
    if token is not None and token.write_only and run.token_id != token.pk:
        raise RefusedError(404, "this token may only write, and did not make this run")
    if run.deleted:
        raise RefusedError(410, "the run was deleted on the hub; restore it there first")


def commit(run: HubRun, files: Sequence[Mapping[str, Any]], token: Token | None = None) -> list[str]:
    """Set files of a run to the chunks in `files`, either all or none; only the last chunk of a file may be shorter.

    Args:
        token: the token of the request. A write-only token may refer only to chunks that were sent with it, because
            the answer would otherwise reveal whether the project has a chunk.

    Returns:
        Digests of chunks that the project lacks; if there are any, nothing was changed.

    Raises:
        RefusedError: an entry is malformed.
    """
    entries = [_checked(entry) for entry in files]
    missing = missing_chunks(run.project_id, {chunk for entry in entries for chunk in entry.chunks}, token)
    if missing:
        return missing
    for entry in entries:
        entry.run, entry.changed = run, timezone.now()
        if not chunks.add_up(run.project_id, entry.chunks, entry.size):
            raise RefusedError(400, f"the chunks of `{entry.path}` do not add up to the size of the file")
    with transaction.atomic():
        HubRun.objects.select_for_update().get(pk=run.pk)  # the lock prevents two commits from counting files at once
        File.objects.bulk_create(
            entries,
            update_conflicts=True,
            unique_fields=["run", "path"],
            update_fields=["size", "chunks", "changed"],
        )
        if File.objects.filter(run=run).count() > FILES_LIMIT:
            raise RefusedError(400, f"a run has at most {FILES_LIMIT:,} files")
        HubRun.objects.filter(pk=run.pk).update(updated=timezone.now())
        if any(entry.path in DESCRIBING for entry in entries):
            describe(run)
    return []


def missing_chunks(project: int, named: set[str], token: Token | None) -> list[str]:
    """Chunks that a project lacks; for a write-only token, also those that were not sent with it."""
    allowed = named
    if token is not None and token.write_only:
        allowed = set(Deposit.objects.filter(token=token, digest__in=named).values_list("digest", flat=True))
    return [chunk for chunk in sorted(named) if chunk not in allowed or not chunks.touch(project, chunk)]


def _checked(entry: Mapping[str, Any]) -> File:
    path, size, named = (entry.get(key) for key in ("path", "size", "chunks"))
    if not isinstance(path, str) or not isinstance(size, int) or not isinstance(named, list):
        raise RefusedError(400, "a file needs `path`, `size` and `chunks`")
    if path == LOG or (reason := fault_of_path(path)):
        reason = "it is sent as a log" if path == LOG else reason
        raise RefusedError(400, f"`{foreign.one_line(path)[:100]}` cannot be a file of a run: {reason}")
    if len(named) != -(-size // CHUNK) or not all(isinstance(name, str) and DIGEST.fullmatch(name) for name in named):
        raise RefusedError(400, f"`{foreign.one_line(path)[:100]}` has malformed chunks")
    return File(path=path, size=size, chunks=named)


def keep_only(run: HubRun, paths: Sequence[str], *, checkpoints: bool) -> None:
    """Remove the files of a run that its folder no longer has.

    Args:
        checkpoints: whether the client has sent checkpoints; if not, the hub keeps the checkpoints that it has.
    """
    gone = set(File.objects.filter(run=run).values_list("path", flat=True)) - set(paths)
    gone = {path for path in gone if checkpoints or not path.startswith(CHECKPOINTS)}
    with transaction.atomic():
        for path in gone:
            File.objects.filter(run=run, path=path).delete()
        if gone.intersection(DESCRIBING):
            describe(run)


# -- what is shown of a run -------------------------------------------------------------------------------------------


def describe(run: HubRun) -> None:
    """Update the run's name, status and settings in the table of runs from the files in `DESCRIBING`."""
    folder = read(run, ())
    settings = dict(list(flat(folder.settings).items())[:SETTINGS_LIMIT])
    settings = {key: value for key, value in settings.items() if len(key) <= NAME and key.isprintable()}
    name = foreign.one_line(digest.name(folder))[:NAME] if folder.settings or folder.summary else run.name
    HubRun.objects.filter(pk=run.pk).update(status=digest.status(folder)[:20], name=name)
    RunValue.objects.filter(run=run, key__kind=ValueKey.SETTING).exclude(key__name__in=settings).delete()
    logs.store_values(run, ValueKey.SETTING, settings)


def label_of(run: HubRun) -> Path:
    """A path, made of the run's name and number, that is unique in the project; reports take their labels from it."""
    return Path(f"/{run.name.replace('/', '_')} {run.number}")


def read(run: HubRun, metrics: Sequence[str] | None = None) -> RunFolder:
    """Read a run in the form that report functions expect, with some or all metrics; never unpickles uploaded data."""
    stored = {file.path: file for file in File.objects.filter(run=run, path__in=DESCRIBING)}
    problems: list[str] = []
    documents = {name: _document(run, stored.get(name), problems) for name in DESCRIBING[:3]}
    lines: list[bytes] = []
    if (file := stored.get("history.jsonl")) is not None and len(file.chunks) == 1:
        lines = chunks.read(run.project_id, file.chunks[0]).split(b"\n")
    history = history_file.parse(lines)
    points = Points.objects.filter(run=run).order_by("key", "offset")
    if metrics is not None:
        points = points.filter(key__name__in=metrics)
    return RunFolder(
        path=label_of(run),
        settings=documents["run.toml"],
        environment=documents["environment.json"],
        summary=standing(documents["summary.json"], history),
        history=history,
        columns=numbers.columns_of(points.values_list("key__name", "data").iterator(chunk_size=500)),
        problems=problems,
    )


def _document(run: HubRun, file: File | None, problems: list[str]) -> dict[str, Any]:
    """Parse a file that describes the run; {} if the file is missing, longer than one chunk, or damaged."""
    if file is None or len(file.chunks) != 1:
        return {}
    path = chunks.path_of(run.project_id, file.chunks[0])
    try:
        if file.path.endswith(".toml"):
            return foreign.read_toml(path, CHUNK)
        return foreign.read_json_object(path, CHUNK)
    except (OSError, ValueError) as error:
        problems.append(f"{file.path} could not be read: {error}")
        return {}
