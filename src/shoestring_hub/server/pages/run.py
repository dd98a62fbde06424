"""The page of a run, the comparison of runs, and the data that both fetch: new points, files and the report."""

from __future__ import annotations

import io
import operator
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import IO, Any, cast

from django.db.models import Q
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase, JsonResponse, StreamingHttpResponse
from django.shortcuts import redirect, render
from django.urls import URLPattern, reverse
from django.utils import timezone
from django.utils.http import content_disposition_header
from django.utils.safestring import mark_safe

from shoestring.report import curves
from shoestring.report.charts import charts
from shoestring.report.markup import embedded
from shoestring.report.reading import ArrayColumn, RunFolder
from shoestring_hub.protocol import LOG
from shoestring_hub.server import chunks, logs
from shoestring_hub.server import runs as stored
from shoestring_hub.server.access import AccessRule, access_of, route, run_of, text_of
from shoestring_hub.server.logs import SEGMENT
from shoestring_hub.server.models import GRACE, File, HubRun, Points, Project, RunValue, Tag, ValueKey
from shoestring_hub.server.numbers import columns_of
from shoestring_hub.server.pages.clips import clips_of_run
from shoestring_hub.server.pages.comments import comments_of
from shoestring_hub.server.policy import REPORT

MOST_RUNS = 20
"""Maximum number of runs in a comparison."""
BUDGET = 64 << 20
"""Maximum bytes of points read for one page; metrics that do not fit are left out, the least important first."""
FIRST = ("loss", "held_out_loss", "bits_per_byte", "held_out_bits_per_byte", "tokens_per_second", "lr", "grad_norm")
AXES = ("time", "tokens")
"""Metrics that are always read in addition, because the x axis may use them."""


def run(request: HttpRequest) -> HttpResponse:
    """The page of one run."""
    access, shown = access_of(request), run_of(request)
    files = list(File.objects.filter(run=shown).order_by("path"))
    settings = RunValue.objects.filter(run=shown, key__kind=ValueKey.SETTING).order_by("key__name")
    latest = RunValue.objects.filter(run=shown, key__kind=ValueKey.METRIC).order_by("key__name")
    context = {
        "run": shown,
        "tags": Tag.objects.filter(run=shown).order_by("name"),
        "files": files,
        "total": sum(file.size for file in files) + shown.size,
        "report": any(file.path == "report.html" for file in files),
        "settings": settings.values_list("key__name", "text"),
        "latest": latest.values_list("key__name", "text"),
        "grace": GRACE.days,
    }
    context |= comments_of(request) | clips_of_run(access, shown)
    return render(request, "hub/run.html", context | _charts(access.project, [shown], ()))


def compare(request: HttpRequest) -> HttpResponse:
    """The curves of up to 20 runs in the same charts, the settings that differ between the runs, and their results."""
    project = access_of(request).project
    chosen = _chosen(project, request)
    if not chosen:
        return redirect("runs", project=project.slug)
    metrics = tuple(request.GET.getlist("metric"))
    context = {
        "runs": chosen,
        "settings": _table(chosen, ValueKey.SETTING, differing=True),
        "results": _table(chosen, ValueKey.METRIC, differing=False),
    }
    return render(request, "hub/compare.html", context | _charts(project, chosen, metrics))


def _chosen(project: Project, request: HttpRequest) -> list[HubRun]:
    numbers = [
        int(text) for text in request.GET.getlist("run") if text.isascii() and text.isdecimal() and len(text) < 9
    ]
    wanted = list(dict.fromkeys(numbers))[:MOST_RUNS]
    by_number = {run.number: run for run in HubRun.objects.filter(project=project, number__in=wanted, deleted=None)}
    return [by_number[number] for number in wanted if number in by_number]


def _table(chosen: Sequence[HubRun], kind: str, *, differing: bool) -> list[tuple[str, list[str]]]:
    """The settings or last metric values of runs, one row per key; `differing` drops rows of equal values."""
    table: dict[str, dict[int, str]] = {}
    values = RunValue.objects.filter(run__in=chosen, key__kind=kind).order_by("key__name")
    for key, run_id, text in values.values_list("key__name", "run", "text"):
        table.setdefault(key, {})[run_id] = text
    rows = [(key, [texts.get(run.pk, "–") for run in chosen]) for key, texts in table.items() if key != "time"]
    return [row for row in rows if not differing or len(set(row[1])) > 1]


# -- curves -----------------------------------------------------------------------------------------------------------


def _charts(project: Project, chosen: Sequence[HubRun], metrics: Sequence[str]) -> dict[str, Any]:
    """Template variables for the charts of some runs; `metrics` selects the metrics, by default as many as fit."""
    drawn, left_out = _within_budget(chosen, metrics)
    folders = [stored.read(run, [*drawn, *AXES]) for run in chosen]
    data = curves.payload(folders)
    names = [run.name for run in chosen]
    for entry, run in zip(data["runs"], chosen, strict=True):  # names that several runs share get the run's number
        entry["name"] = run.name if names.count(run.name) == 1 else f"{run.name} #{run.number}"
    query = "&".join(f"run={run.number}" for run in chosen)
    return {
        "charts": mark_safe(charts(data)),
        "data": mark_safe(embedded(data)),
        "left_out": left_out,
        "source": f"{reverse('new_points', kwargs={'project': project.slug})}?{query}",
        "state": _state(chosen, folders, {}),
    }


def _within_budget(chosen: Sequence[HubRun], metrics: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split metrics into those to draw and those that would exceed `BUDGET`, as estimated from the size of the logs."""
    keys = ValueKey.objects.filter(points__run__in=chosen, kind=ValueKey.METRIC).exclude(name__in=AXES)
    known = sorted(keys.values_list("name", flat=True).distinct(), key=lambda name: (name not in FIRST, name))
    if metrics:
        return [name for name in known if name in metrics], [name for name in known if name not in metrics]
    size = sum(run.size for run in chosen) // max(1, len(known) + len(AXES))  # bytes of text per metric
    most = max(4, BUDGET // max(size, 1))
    return known[:most], known[most:]


@dataclass(frozen=True)
class _Known:
    """What a page knows of a run: the number of rewrites and the size of its log, and the last step."""

    rewrites: int
    size: int
    last: int


def _state(chosen: Sequence[HubRun], folders: Sequence[RunFolder], before: Mapping[int, _Known]) -> str:
    """Encode what a page knows of each run; a run without new points keeps its last step from `before`."""
    parts = []
    for run, folder in zip(chosen, folders, strict=True):
        steps = [next(reversed(column)) for column in folder.columns.values() if column]
        last = max([*steps, before[run.number].last if run.number in before else -1])
        parts.append(f"{run.number}:{run.rewrites}:{run.size}:{last}")
    return ",".join(parts)


def _known(state: str) -> dict[int, _Known]:
    """Decode the state that a page has sent, by run number; empty if the state is malformed."""
    try:
        parts = ([int(word) for word in part.split(":")] for part in state.split(",")[:MOST_RUNS])
        return {number: _Known(*rest) for number, *rest in parts}
    except (TypeError, ValueError):
        return {}


def new_points(request: HttpRequest) -> HttpResponse:
    """Points logged since the page was loaded; answers 204 if there are none, 205 if the page must be reloaded."""
    project = access_of(request).project
    chosen, before = _chosen(project, request), _known(request.GET.get("have", ""))
    rewrites = {run.number: run.rewrites for run in chosen}  # deleted runs are not in `chosen`
    if rewrites != {number: known.rewrites for number, known in before.items()}:
        return HttpResponse(status=205)
    if all(before[run.number].size == run.size for run in chosen):
        return HttpResponse(status=204)
    folders = _grown(chosen, before)
    return JsonResponse({"state": _state(chosen, folders, before), "data": curves.payload(folders)})


def _grown(chosen: Sequence[HubRun], before: Mapping[int, _Known]) -> list[RunFolder]:
    """Read the points that a page lacks, plus the first `time` of each run, which elapsed seconds are counted from.

    Segments are read whole, so some points may already be on the page, which ignores them.
    """
    changed = [run for run in chosen if run.size > before[run.number].size]
    tails = (Q(run=run, offset__gte=before[run.number].size - SEGMENT) for run in changed)
    first = Q(run__in=changed, offset=0, key__name="time")
    points = Points.objects.filter(reduce(operator.or_, tails, first)).order_by("offset")
    packed: dict[int, list[tuple[str, bytes]]] = {run.pk: [] for run in chosen}
    for run_id, name, data in points.values_list("run", "key__name", "data"):
        packed[run_id].append((name, data))
    folders = []
    for run in chosen:
        columns: dict[str, ArrayColumn] = {}
        for name, column in columns_of(packed[run.pk]).items():
            shown = column.steps >= before[run.number].last
            if name == "time":
                shown[:1] = True
            columns[name] = ArrayColumn(column.steps[shown], column.array[shown])
        folders.append(RunFolder(path=stored.label_of(run), columns=columns))
    return folders


# -- changes ----------------------------------------------------------------------------------------------------------


def edit_run(request: HttpRequest) -> HttpResponse:
    """Change the notes and the tags of a run."""
    changed = run_of(request)
    changed.notes = text_of(request.POST, "notes", 50_000)
    changed.save(update_fields=["notes"])
    names = {name[:50] for name in text_of(request.POST, "tags", 1000).replace(",", " ").split()[:20]}
    Tag.objects.filter(run=changed).exclude(name__in=names).delete()
    Tag.objects.bulk_create([Tag(run=changed, name=name) for name in sorted(names)], ignore_conflicts=True)
    return _back(changed)


def archive_run(request: HttpRequest) -> HttpResponse:
    """Archive a run, or bring it back to the table."""
    changed = run_of(request)
    HubRun.objects.filter(pk=changed.pk).update(archived=request.POST.get("archived") == "yes")
    return _back(changed)


def delete_run(request: HttpRequest) -> HttpResponse:
    """Delete a run, or restore it within the grace period."""
    changed = run_of(request)
    deleted = timezone.now() if request.POST.get("deleted") == "yes" else None
    HubRun.objects.filter(pk=changed.pk).update(deleted=deleted)
    return redirect("runs", project=changed.project.slug) if deleted else _back(changed)


def _back(changed: HubRun) -> HttpResponse:
    return redirect("run", project=changed.project.slug, run=changed.number)


# -- files ------------------------------------------------------------------------------------------------------------


def report(request: HttpRequest) -> HttpResponseBase:
    """The report of a run, sandboxed and under its own policy because its HTML comes from whoever pushed the run."""
    stored_file = _file(run_of(request), "report.html")
    response = StreamingHttpResponse(
        chunks.stream(stored_file.run.project_id, stored_file.chunks), content_type="text/html"
    )
    response["Content-Security-Policy"] = REPORT
    response["X-Frame-Options"] = "SAMEORIGIN"
    return response


def file(request: HttpRequest, path: str) -> HttpResponseBase:
    """A file of a run, always sent as an attachment."""
    shown = run_of(request)
    if path == LOG:
        return _attachment(logs.read(shown), path, shown.size)
    stored_file = _file(shown, path)
    return _attachment(chunks.stream(shown.project_id, stored_file.chunks), path.rpartition("/")[2], stored_file.size)


def _file(shown: HubRun, path: str) -> File:
    stored_file = File.objects.select_related("run").filter(run=shown, path=path).first()
    if stored_file is None:
        raise Http404
    return stored_file


def _attachment(data: Iterator[bytes], name: str, size: int | None = None) -> HttpResponseBase:
    response = StreamingHttpResponse(data, content_type="application/octet-stream")
    response["Content-Disposition"] = content_disposition_header(True, name)
    if size is not None:
        response["Content-Length"] = str(size)
    return response


def export(request: HttpRequest) -> HttpResponseBase:
    """All files of a run as one ZIP file, which is created while it is being sent."""
    shown = run_of(request)
    return _attachment(_zipped(shown), f"{shown.project.slug}-{shown.number}.zip")


def _zipped(shown: HubRun) -> Iterator[bytes]:
    files = File.objects.filter(run=shown).order_by("path")
    contents = [(file.path, chunks.stream(shown.project_id, file.chunks)) for file in files]
    buffer = _Buffer()
    with zipfile.ZipFile(cast(IO[bytes], buffer), "w", zipfile.ZIP_STORED) as archive:  # own file: it is written
        for path, data in [*contents, (LOG, logs.read(shown))]:
            with archive.open(zipfile.ZipInfo(path), "w", force_zip64=True) as entry:
                for part in data:
                    entry.write(part)
                    yield buffer.take()
    yield buffer.take()


class _Buffer(io.RawIOBase):
    """A write-only file without seeking, whose bytes are collected with `take`."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._parts.append(bytes(data))
        return len(data)

    def take(self) -> bytes:
        data, self._parts = b"".join(self._parts), []
        return data


ROUTES: list[URLPattern] = [
    route("<slug:project>/compare", compare, AccessRule.READER),
    route("<slug:project>/compare/new", new_points, AccessRule.READER),
    route("<slug:project>/runs/<int:run>", run, AccessRule.READER),
    route("<slug:project>/runs/<int:run>/report", report, AccessRule.READER),
    route("<slug:project>/runs/<int:run>/export.zip", export, AccessRule.READER),
    route("<slug:project>/runs/<int:run>/files/<path:path>", file, AccessRule.READER),
    route("<slug:project>/runs/<int:run>/edit", edit_run, AccessRule.WRITER, "POST"),
    route("<slug:project>/runs/<int:run>/archive", archive_run, AccessRule.WRITER, "POST"),
    route("<slug:project>/runs/<int:run>/delete", delete_run, AccessRule.WRITER, "POST"),
]
