"""The table of runs: views by address, conditions, order, and columns of any setting or metric."""

import csv
import io
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.usefixtures("configured")


@pytest.fixture(scope="module")
def project(configured):
    """A project of seven runs, whose losses are 3, 2, 1, equal, NaN, missing, and of text settings."""
    from shoestring_hub.server import logs, runs
    from shoestring_hub.server.access import Access
    from shoestring_hub.server.models import Member, Person, Project, Role, ValueKey

    project = Project.objects.create(slug="table")
    person = Person.objects.create_user("tabulator")
    Member.objects.create(project=project, person=person, role=Role.OWNER)
    access = Access(person, project, Role.OWNER)
    for number, loss in enumerate((3.0, 2.0, 1.0, 1.0, math.nan, None, 0.5)):
        run = runs.open_run(access, f"{number:032x}", f"run {number}" if number else "=SUM(A1)")
        if loss is not None:
            logs.store_values(run, ValueKey.METRIC, {"loss": loss})
        lr = ("0.1", "0.01", "none", "1e-3", "1e-3", "0.5", "big")[number]
        logs.store_values(run, ValueKey.SETTING, {"optim.adamw.lr": lr, "a=b,c": str(number)})
    return project


def numbers(project, **view):
    from shoestring_hub.server.pages import table

    return [run.number for run in table.select(project, table.View(**view))]


@pytest.mark.slow
def test_runs_without_a_number_come_last_whichever_way_it_is_sorted(project):
    assert numbers(project, sort="metric.loss", descending=False) == [7, 4, 3, 2, 1, 6, 5]
    assert numbers(project, sort="metric.loss", descending=True)[:5] == [1, 2, 4, 3, 7]
    assert numbers(project, sort="setting.optim.adamw.lr", descending=False) == [5, 4, 2, 1, 6, 7, 3]
    assert len(numbers(project, sort="metric.unknown")) == 7 == len(numbers(project, sort="'; DROP TABLE"))


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("metric.loss < 2", {3, 4, 7}),
        ("metric.loss <= 2", {2, 3, 4, 7}),
        ("metric.loss = 1", {3, 4}),
        ("metric.loss != 1", {1, 2, 5, 6, 7}),
        ("metric.loss > 0.9, metric.loss < 2.5", {2, 3, 4}),
        ("metric.loss = NaN", {5}),
        ("setting.optim.adamw.lr = 0.001", {4, 5}),
        ("setting.optim.adamw.lr ~ NON", {3}),
        ("name ~ run", {2, 3, 4, 5, 6, 7}),
        ("name = run 3", {4}),
        ("number > 5", {6, 7}),
        ("number = x", set()),
        ("person = tabulator", set(range(1, 8))),
        ("person != tabulator", set()),
        ("metric.unknown < 1", set()),
        ("metric.loss < inf", {1, 2, 3, 4, 7}),
        ("metric.loss < nan", set()),
        ("metric.loss > 1e999", set()),
        ("", set(range(1, 8))),
        ("nonsense, metric.loss = 3", {1}),
        ("metric.loss = ' OR 1=1 --", set()),
    ],
)
def test_conditions(project, where, expected):
    assert set(numbers(project, where=where)) == expected


@given(st.text(max_size=60))
def test_no_filter_and_no_address_fails(project, text):
    from django.http import QueryDict

    from shoestring_hub.server.pages import table

    numbers(project, where=text)
    query = QueryDict(mutable=True)
    for name in ("where", "sort", "column", "page", "rows", "tag", "which"):
        query[name] = text
    view = table.view_of(query)
    numbers(project, sort=view.sort, where=view.where, tag=view.tag)
    assert table.view_of(QueryDict(table.address_of(view)[1:])) == view


def test_the_table_as_a_file_holds_no_formulas(project, client):
    rows = list(csv.reader(io.StringIO(client.get("/table/runs.csv?column=metric.loss&sort=number").content.decode())))
    assert rows[0] == ["number", "name", "status", "person", "updated", "tags", "metric.loss"]
    assert [row[1] for row in rows[1:]] == ["'=SUM(A1)", *(f"run {number}" for number in range(1, 7))]
    assert [row[6] for row in rows[1:]] == ["3", "2", "1", "1", "NaN", "", "0.5"]


@pytest.fixture
def client(project):
    from django.test import Client

    client = Client()
    client.force_login(project.people.get())
    return client


def test_pages_have_the_rows_that_are_asked_for(client):
    assert client.get("/table/?rows=3").content.count(b'name="run"') == 3
    assert client.get("/table/?rows=3&page=3").content.count(b'name="run"') == 1
    assert client.get("/table/?rows=3&page=99").content.count(b'name="run"') == 1
    assert b"Not understood: nonsense" in client.get("/table/?where=nonsense").content


def test_archived_and_deleted_runs_leave_the_table_and_come_back(client):
    for button, view in (("archive", "archived"), ("delete", "deleted")):
        field = {"archive": "archived", "delete": "deleted"}[button]
        client.post(f"/table/runs/3/{button}", {field: "yes"})
        assert b'value="3"' not in client.get("/table/").content
        assert b'value="3"' in client.get(f"/table/?which={view}").content
        client.post(f"/table/runs/3/{button}", {field: "no"})
        assert b'value="3"' in client.get("/table/").content


def test_a_project_keeps_an_owner(client, project):
    person = project.people.get()
    assert b"keeps at least one owner" in client.post(f"/table/people/{person.pk}", {"role": "1"}).content
    assert b"keeps at least one owner" in client.post(f"/table/people/{person.pk}", {"role": ""}).content
