"""The log of a run, a copy of its `metrics.jsonl`: segments of at most `SEGMENT` bytes, and the values in them.

Only `splice` changes a log: it replaces all bytes from `at` on, if the log still has the size and the attempt number
that the client has seen. Repeated requests, requests from an earlier start of the run and requests from two clients at
the same time therefore never overwrite rows that the client has not seen. A request is carried out completely or not at
all, even if the server is killed.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from django.db import transaction
from django.db.models import Max
from django.utils import timezone

from shoestring import figures
from shoestring.storage.foreign import one_line
from shoestring_hub.protocol import digest
from shoestring_hub.server import numbers
from shoestring_hub.server.access import RefusedError
from shoestring_hub.server.models import TEXT, HubRun, Points, RunValue, Segment, ValueKey

SEGMENT = 128 << 10
"""Maximum size of a segment in bytes. The last segment is rewritten with every request until it is full."""


def describe(run: HubRun) -> dict[str, Any]:
    """The size, attempt number and segments of a log; a client uses them to locate where its file differs."""
    segments = Segment.objects.filter(run=run).order_by("offset").values_list("offset", "size", "digest")
    return {"size": run.size, "attempt": run.attempt, "segments": list(segments)}


def begin(run: HubRun) -> HubRun:
    """Begin the next attempt of a run; requests from earlier attempts are refused from now on."""
    with transaction.atomic():
        run = HubRun.objects.select_for_update().get(pk=run.pk)
        run.attempt += 1
        run.save(update_fields=["attempt"])
    return run


def splice(run: HubRun, data: bytes, *, at: int, have: int, attempt: int) -> int:
    """Replace all bytes of a log from `at` on by `data`.

    Args:
        have: size of the log as the client knows it.
        attempt: attempt of the run as the client knows it.

    Returns:
        The new size of the log in bytes.

    Raises:
        RefusedError: the log now has another size or attempt number, or `at` is outside of the log.
    """
    with transaction.atomic():
        run = HubRun.objects.select_for_update().get(pk=run.pk)
        if attempt != run.attempt:
            raise RefusedError(409, "a later start of the run writes this log", attempt=run.attempt, size=run.size)
        if have != run.size:
            raise RefusedError(409, "the log has another size", attempt=run.attempt, size=run.size)
        if not 0 <= at <= have:
            raise RefusedError(400, "`at` lies outside of the log")
        if at == have and not data:
            return have
        start, head = _open_end(run, at)
        Segment.objects.filter(run=run, offset__gte=start).delete()
        last = _store(run, start, head + data)
        if at < have:
            points = Points.objects.filter(run=run)
            newest = points.values("key").annotate(offset=Max("offset"))
            rows = (points.filter(**place).values_list("key__name", "data").first() for place in newest)
            last = {row[0]: bytes(row[1]) for row in rows if row}
            RunValue.objects.filter(run=run, key__kind=ValueKey.METRIC).exclude(key__name__in=last).delete()
        newest_points = {key: numbers.unpack(packed) for key, packed in last.items()}
        store_values(
            run,
            ValueKey.METRIC,
            {
                key: float(values[steps.argmax()]) if len(values) else float("nan")
                for key, (steps, values) in newest_points.items()
            },
        )
        rewrites = run.rewrites + (at < have)
        HubRun.objects.filter(pk=run.pk).update(size=at + len(data), rewrites=rewrites, updated=timezone.now())
    return at + len(data)


def _open_end(run: HubRun, at: int) -> tuple[int, bytes]:
    """Offset of the first segment that a change at `at` rewrites, and the bytes of this segment before `at`."""
    last = Segment.objects.filter(run=run, offset__lt=at).order_by("-offset").first()
    if last is None:
        return 0, b""
    if last.size >= SEGMENT and last.offset + last.size == at:
        return at, b""
    return last.offset, zlib.decompress(last.data)[: at - last.offset]


def _store(run: HubRun, offset: int, data: bytes) -> dict[str, bytes]:
    """Store `data` as segments from `offset` on; returns the last points of each metric in `data`."""
    last: dict[str, bytes] = {}
    for piece in cut(data):
        segment = Segment.objects.create(
            run=run, offset=offset, size=len(piece), digest=digest(piece), data=zlib.compress(piece, 1)
        )
        points = numbers.parse(piece)
        keys = keys_of(run, ValueKey.METRIC, points)
        Points.objects.bulk_create(
            Points(segment=segment, run=run, key_id=keys[key], offset=offset, data=packed)
            for key, packed in points.items()
        )
        last |= points
        offset += len(piece)
    return last


def cut(data: bytes) -> Iterator[bytes]:
    """Split part of a log into segments at line ends; only a line longer than a segment is split inside."""
    start = 0
    while start < len(data):
        end = min(start + SEGMENT, len(data))
        if end < len(data) and (line_end := data.rfind(b"\n", start, end)) >= 0:
            end = line_end + 1
        yield data[start:end]
        start = end


def keys_of(run: HubRun, kind: str, names: Mapping[str, Any]) -> dict[str, int]:
    """Map names of settings or metrics to the ids of their keys in the run's project; creates missing keys."""
    named = ValueKey.objects.filter(project=run.project_id, kind=kind, name__in=names).values_list("name", "pk")
    known = dict(named)
    if new := [ValueKey(project_id=run.project_id, kind=kind, name=name) for name in names if name not in known]:
        ValueKey.objects.bulk_create(new, ignore_conflicts=True)
        known = dict(
            ValueKey.objects.filter(project=run.project_id, kind=kind, name__in=names).values_list("name", "pk")
        )
    return known


def store_values(run: HubRun, kind: str, values: Mapping[str, float | str]) -> None:
    """Store settings, or last values of metrics, of a run for the table of runs."""
    keys = keys_of(run, kind, values)
    rows = [RunValue(run=run, key_id=keys[name], **_shown(value)) for name, value in values.items()]
    RunValue.objects.bulk_create(
        rows, update_conflicts=True, unique_fields=["run", "key"], update_fields=["text", "number"]
    )


def _shown(value: float | str) -> dict[str, Any]:
    if isinstance(value, str):
        text, number = one_line(value)[:TEXT], math.nan
        with suppress(ValueError):
            number = float(value)
    else:
        text, number = figures.plain(value), value
        if "e+" in text and abs(value) < 1e15:  # 14k rather than 1.4e+04
            text = figures.count(value)
    return {"text": text, "number": number if math.isfinite(number) else None}


def read(run: HubRun, start: int = 0, end: int | None = None) -> Iterator[bytes]:
    """Yield the bytes of a log from `start` to `end`; `end` defaults to the present size of the log."""
    end = run.size if end is None else end
    segments = Segment.objects.filter(run=run, offset__lt=end).order_by("offset").values_list("offset", "size", "data")
    for offset, size, data in segments.iterator(chunk_size=64):
        if offset + size > start:
            yield zlib.decompress(data)[max(0, start - offset) : end - offset]
