"""Tables and pictures of evaluations in a folder that somebody else may have written, and on the page."""

import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoestring import report
from shoestring.core.feature import Table
from shoestring.report import findings
from shoestring.report.findings import Findings, Picture

GRID = Picture(pixels=np.zeros((2, 3)))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run.toml").write_text("[run]\n")
    return tmp_path


def rows(folder, *rows):
    (folder / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def read(folder):
    problems = []
    return list(findings.read(folder, problems)), problems


def test_of_each_name_the_newest_is_shown(folder):
    sink = Findings(folder)
    for step in (1, 2):
        sink.show(step, {"grid": GRID, "table": Table(title=f"of {step}", head=("a", "b"), rows=(("x", step),))})
    sink.close()
    shown, problems = read(folder)
    assert [(row["name"], row["step"]) for row in shown] == [("grid", 2), ("table", 2)] and not problems
    page = report.write(folder).read_text()
    assert page.count("<img ") == 1 and "of 2" in page and "of 1" not in page


HOSTILE = {
    "a file elsewhere": {"picture": "../secret.png"},
    "an absolute path": {"picture": "/etc/passwd"},
    "a link": {"picture": "00000001-link.png"},
    "no picture": {"picture": "00000001-text.png"},
    "a missing file": {"picture": "00000001-none.png"},
    "a number": {"picture": 3},
    "markup": {
        "title": "<script>alert(1)</script>",
        "head": ["<b>"],
        "rows": [["</table>", "<img src=x>"]],
        "note": "<i>",
    },
    "no lists": {"title": 1, "head": 2, "rows": {"a": 3}, "note": []},
    "rows of other lengths": {"title": "", "head": ["a"], "rows": [[], [1, 2, 3], "text", None]},
    "not a number": {"title": "", "head": ["a"], "rows": [["x", float("nan")], ["y", float("inf")], ["z", 10**400]]},
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_somebody_else_wrote_is_shown_as_text_or_left_out(folder, case):
    (folder / "pictures").mkdir()
    (folder.parent / "secret.png").write_bytes(findings.png(np.zeros((1, 1), np.uint8)))
    (folder / "pictures/00000001-link.png").symlink_to(folder.parent / "secret.png")
    (folder / "pictures/00000001-text.png").write_text("<svg onload=alert(1)>")
    rows(folder, {"step": 1, "name": "<u>name</u>"} | HOSTILE[case])
    page = report.write(folder).read_text()
    assert "data:image" not in page.partition("<body>")[2]
    body = page.partition("<main>")[2].partition("<script")[0]
    assert not re.search(r"<script>alert|<img|<svg|<u>|<i>|</table>\s*<img", body)


@given(st.lists(st.one_of(st.text(max_size=20), st.integers(), st.none(), st.dictionaries(
    st.sampled_from(["step", "name", "picture", "title", "rows", "head"]),
    st.one_of(st.none(), st.integers(), st.text(max_size=5), st.lists(st.lists(st.integers(), max_size=2), max_size=2)),
)), max_size=6))  # fmt: skip
def test_any_lines_are_read(tmp_path_factory, lines):
    folder = tmp_path_factory.mktemp("lines")
    (folder / "run.toml").write_text("")
    rows(folder, *lines)
    report.write(folder)


def test_pictures_beyond_the_room_of_a_page_are_named(folder, monkeypatch):
    monkeypatch.setattr(findings, "MOST_BYTES", 200)
    sink = Findings(folder)
    sink.show(1, {name: Picture(pixels=np.zeros((4, 4), np.uint8)) for name in "abc"})
    sink.close()
    shown, problems = read(folder)
    assert [bool(row["source"]) for row in shown] == [True, False, False] and "b.png is not shown" in problems[0]


def test_the_oldest_pictures_are_deleted(folder, monkeypatch):
    monkeypatch.setattr(findings, "MOST_FILES", 3)
    sink = Findings(folder)
    for step in range(1, 6):
        sink.show(step, {"grid": GRID})
    sink.close()
    assert [path.name[:8] for path in sorted((folder / "pictures").iterdir())] == ["00000003", "00000004", "00000005"]
