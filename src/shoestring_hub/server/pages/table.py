"""The table of a project's runs; its columns (any setting or metric), filters and order are stored in the URL."""

from __future__ import annotations

import csv
import io
import math
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from django.db.models import CharField, F, FloatField, OuterRef, Q, QuerySet, Subquery
from django.db.models import Value as Constant
from django.db.models.functions import Coalesce
from django.http import HttpRequest, HttpResponse, QueryDict
from django.shortcuts import render
from django.urls import URLPattern
from django.utils import timezone

from shoestring_hub.server.access import AccessRule, access_of, route, text_of
from shoestring_hub.server.models import GRACE, NAME, HubRun, Project, RunValue, Tag, ValueKey

ROWS, MOST_ROWS = 100, 1000
"""Number of runs on a page: the default and the maximum."""
COLUMNS = 20
"""Maximum number of columns that may be chosen."""
CONDITIONS = 10
"""Maximum number of conditions in a filter."""
USUAL = ("held_out_loss", "loss", "held_out_bits_per_byte", "tokens_per_second")
"""Metrics that are shown if no columns are chosen, as far as the project has them."""
OWN = ("number", "name", "status", "person", "updated")
"""Columns that every run has."""
_CONDITION = re.compile(r"\s*(?P<name>\S+?)\s*(?P<sign><=|>=|!=|=|<|>|~)\s*(?P<value>.*?)\s*")
_LOOKUPS = {"<": "lt", "<=": "lte", ">": "gt", ">=": "gte", "=": "exact", "!=": "exact", "~": "icontains"}


@dataclass(frozen=True)
class Condition:
    """A condition of a filter: a column, a comparison operator, and the value to compare with."""

    name: str
    sign: str
    value: str


@dataclass(frozen=True)
class View:
    """Which runs of a project the table shows, and how, as encoded in the URL. Names of columns are `metric.NAME`,
    `setting.NAME`, or one of `OWN`."""

    columns: tuple[str, ...] = ()
    sort: str = "updated"
    descending: bool = True
    where: str = ""
    tag: str = ""
    which: str = "present"
    """Which runs are shown: `present`, `archived` or `deleted`."""
    page: int = 1
    rows: int = ROWS


def view_of(query: QueryDict) -> View:
    """Parse the query string of a URL; malformed values are replaced by their defaults."""
    sort = text_of(query, "sort", NAME)
    sort = sort if sort.removeprefix("-") in OWN or _split(sort.removeprefix("-")) else "-updated"
    which = query.get("which", "")
    return View(
        columns=tuple(dict.fromkeys(filter(_split, query.getlist("column"))))[:COLUMNS],
        sort=sort.removeprefix("-"),
        descending=sort.startswith("-"),
        where=text_of(query, "where", 1000),
        tag=text_of(query, "tag", 50),
        which=which if which in ("archived", "deleted") else "present",
        page=_whole(query.get("page"), 1, 10**6, 1),
        rows=_whole(query.get("rows"), 1, MOST_ROWS, ROWS),
    )


def address_of(view: View) -> str:
    """The query string from which `view_of` parses this view."""
    query = QueryDict(mutable=True)
    query.setlist("column", list(view.columns))
    usual = View()
    for name, value in (
        ("where", view.where),
        ("tag", view.tag),
        ("which", "" if view.which == usual.which else view.which),
        ("sort", "" if (view.sort, view.descending) == (usual.sort, True) else "-" * view.descending + view.sort),
        ("rows", "" if view.rows == usual.rows else str(view.rows)),
        ("page", "" if view.page == usual.page else str(view.page)),
    ):
        if value:
            query[name] = value
    return f"?{query.urlencode()}"


def _whole(text: str | None, least: int, most: int, default: int) -> int:
    number = int(text) if text and text.isascii() and text.isdecimal() and len(text) < 9 else default
    return min(max(number, least), most)


def _split(name: str) -> tuple[str, str] | None:
    """The kind and the name of a column for a setting or metric; None for any other column."""
    kind, dot, rest = name.partition(".")
    known = dot and kind in (ValueKey.SETTING, ValueKey.METRIC) and rest and "\0" not in rest
    return (kind, rest) if known else None


def conditions_of(where: str) -> tuple[list[Condition], list[str]]:
    """Parse the conditions of a filter, which are separated by commas; also returns the parts that are malformed."""
    conditions, wrong = [], []
    for part in filter(str.strip, where.split(",")[:CONDITIONS]):
        match = _CONDITION.fullmatch(part)
        if match and (match["name"] in OWN or _split(match["name"])):
            conditions.append(Condition(match["name"], match["sign"], match["value"]))
        else:
            wrong.append(part.strip())
    return conditions, wrong


# -- from the database ------------------------------------------------------------------------------------------------


def select(project: Project, view: View) -> QuerySet[HubRun]:
    """The runs of a view on all of its pages, in the view's order."""
    runs = HubRun.objects.filter(project=project)
    if view.which == "deleted":
        runs = runs.filter(deleted__gt=timezone.now() - GRACE)
    else:
        runs = runs.filter(deleted=None, archived=view.which == "archived")
    if view.tag:
        runs = runs.filter(tags__name=view.tag)
    conditions = [_matching(project, condition) for condition in conditions_of(view.where)[0]]
    runs = runs.filter(reduce(operator.and_, conditions, Q()))
    return _in_order(runs, project, view)


def _matching(project: Project, condition: Condition) -> Q:
    lookup, column = _LOOKUPS[condition.sign], _split(condition.name)
    number = _number(condition.value)
    if column is None:
        field = {"person": "person__username"}.get(condition.name, condition.name)
        if condition.name == "updated":
            return Q()
        if condition.name == "number" and number is None:
            return Q(pk__in=())
        value: Any = number if condition.name == "number" else condition.value
        matching = Q(**{f"{field}__{'icontains' if condition.sign == '~' else lookup}": value})
    else:
        values = RunValue.objects.filter(key__project=project, key__kind=column[0], key__name=column[1])
        if number is None and condition.sign in ("<", "<=", ">", ">="):
            return Q(pk__in=())
        if condition.sign == "~" or number is None:
            values = values.filter(**{f"text__{lookup}": condition.value})
        else:
            values = values.filter(**{f"number__{lookup}": number})
        matching = Q(pk__in=values.values("run"))
    return ~matching if condition.sign == "!=" else matching


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return None if math.isnan(number) else number


def _in_order(runs: QuerySet[HubRun], project: Project, view: View) -> QuerySet[HubRun]:
    """Sort by a column; rows with numbers come before rows with other text."""
    turn = F.desc if view.descending else F.asc
    if column := _split(view.sort):
        key = ValueKey.objects.filter(project=project, kind=column[0], name=column[1]).first()
        mine = RunValue.objects.filter(run=OuterRef("pk"), key=key)
        number = Subquery(mine.values("number")[:1], output_field=FloatField())
        text = Coalesce(Subquery(mine.values("text")[:1], output_field=CharField()), Constant(""))
        return runs.annotate(sort_number=number, sort_text=text).order_by(
            turn(F("sort_number"), nulls_last=True), turn(F("sort_text")), "-pk"
        )
    field = {"person": "person__username"}.get(view.sort, view.sort if view.sort in OWN else "updated")
    return runs.order_by(turn(F(field), nulls_last=True), "-pk")


@dataclass(frozen=True)
class TableRow:
    """A run in the table."""

    run: HubRun
    tags: Sequence[str]
    cells: Sequence[tuple[str, bool]]
    """For each column, the text of the cell and whether it is a number."""


def rows_of(project: Project, runs: Sequence[HubRun], columns: Sequence[str]) -> list[TableRow]:
    """Build the table rows of some runs; the number of queries does not grow with the runs or columns."""
    keys = {
        key.pk: f"{key.kind}.{key.name}"
        for key in ValueKey.objects.filter(project=project, name__in=[name.partition(".")[2] for name in columns])
    }
    texts: dict[tuple[int, str], tuple[str, bool]] = {}
    ids = [run.pk for run in runs]
    values = RunValue.objects.filter(run__in=ids, key__in=keys)
    for run, key, text, number in values.values_list("run", "key", "text", "number"):
        texts[run, keys[key]] = text, number is not None
    tags: dict[int, list[str]] = {}
    for run, name in Tag.objects.filter(run__in=ids).order_by("name").values_list("run", "name"):
        tags.setdefault(run, []).append(name)
    return [
        TableRow(run, tags.get(run.pk, []), [texts.get((run.pk, column), ("", False)) for column in columns])
        for run in runs
    ]


# -- pages ------------------------------------------------------------------------------------------------------------


def runs(request: HttpRequest) -> HttpResponse:
    """The table of a project's runs."""
    access, view = access_of(request), view_of(request.GET)
    project = access.project
    if view.which == "deleted" and not access.writes:
        view = replace(view, which="present")
    keys = [f"{kind}.{name}" for kind, name in project.keys.order_by("kind", "name").values_list("kind", "name")[:2000]]
    columns = view.columns or tuple(f"metric.{name}" for name in USUAL if f"metric.{name}" in keys)
    chosen = select(project, view)
    count = chosen.count()
    pages = max(1, -(-count // view.rows))
    view = replace(view, page=min(view.page, pages))
    shown = list(chosen.select_related("person")[(view.page - 1) * view.rows : view.page * view.rows])
    context = {
        "view": view,
        "count": count,
        "pages": pages,
        "rows": rows_of(project, shown, columns),
        "heads": [_head(view, name) for name in columns],
        "own": {name: _head(view, name) for name in OWN},
        "keys": [(name, name in columns) for name in keys],
        "wrong": conditions_of(view.where)[1],
        "tags": Tag.objects.filter(run__project=project)
        .order_by("name")
        .values_list("name", flat=True)
        .distinct()[:200],
        "here": address_of(view),
        "before": address_of(replace(view, page=view.page - 1)),
        "after": address_of(replace(view, page=view.page + 1)),
        "views": [(name, address_of(View(which=name))) for name in ("present", "archived", "deleted")],
    }
    return render(request, "hub/runs.html", context)


def _head(view: View, name: str) -> dict[str, Any]:
    """The header of a column, a link that sorts by the column: ascending at first, descending when followed again."""
    sorted_by = view.sort == name
    order = ("descending" if view.descending else "ascending") if sorted_by else "none"
    turned = replace(view, sort=name, descending=sorted_by and not view.descending, page=1)
    return {"name": name.partition(".")[2] or name, "order": order, "address": address_of(turned)}


def runs_as_csv(request: HttpRequest) -> HttpResponse:
    """The table as a CSV file, with the columns, filter and order in the URL."""
    access, view = access_of(request), view_of(request.GET)
    project, text = access.project, io.StringIO()
    chosen = list(select(project, replace(view, which="present")).select_related("person")[:100_000])
    writer = csv.writer(text)
    writer.writerow([*OWN, "tags", *map(_cell, view.columns)])
    for row in rows_of(project, chosen, view.columns):
        run = row.run
        own = [run.number, _cell(run.name), run.status, _cell(run.person.username), run.updated.isoformat()]
        writer.writerow([*own, _cell(" ".join(row.tags)), *(t if number else _cell(t) for t, number in row.cells)])
    response = HttpResponse(text.getvalue(), content_type="text/csv; charset=utf-8")
    response["Content-Disposition"] = f'attachment; filename="{project.slug}.csv"'
    return response


def _cell(text: str) -> str:
    """Put an apostrophe before text that a spreadsheet would take for a formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t") else text


ROUTES: list[URLPattern] = [
    route("<slug:project>/", runs, AccessRule.READER),
    route("<slug:project>/runs.csv", runs_as_csv, AccessRule.READER),
]
