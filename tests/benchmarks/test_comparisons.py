"""The page that says who is ahead, by the rows."""

from dataclasses import replace

import pytest

from benchmarks import comparisons
from benchmarks.comparisons import SECTIONS, Question, page, side
from benchmarks.rows import RESULTS, read
from shoestring.core.errors import DataError

ROWS = {row.id: row for path in RESULTS.glob("*.json") for row in read(path).values()}
ROW = next(row for row in ROWS.values() if row.kind == "timed")


@pytest.mark.parametrize(
    ("op", "kind", "measured", "interval", "equal", "expected"),
    [
        ("<=", "timed", 0.8, (0.7, 0.9), 1.0, "ahead"),
        ("<=", "timed", 1.2, (1.1, 1.3), 1.0, "behind"),
        (">=", "timed", 1.2, (1.1, 1.3), 1.0, "ahead"),
        (">", "drawn", -0.2, (-0.3, -0.1), 0.0, "behind"),
        ("<=", "timed", 0.9, (0.7, 1.1), 1.0, "unclear"),
        ("<=", "timed", 0.9, (0.7, 1.0), 1.0, "unclear"),
        ("<=", "timed", 0.1, None, 1.0, "unclear"),
        ("<=", "exact", 0.1, None, 1.0, "ahead"),
        ("<=", "exact", 1.0, None, 1.0, "alike"),
        ("<=", "exact", 0.0, (0.0, 0.0), 0.0, "alike"),
        ("<=", "timed", None, None, 1.0, "not measured"),
    ],
)
def test_a_figure_is_ahead_only_if_its_interval_is(op, kind, measured, interval, equal, expected):
    row = replace(ROW, op=op, kind=kind, measured=measured, interval=interval)
    assert side(row, equal) == expected


def test_small_differences_are_alike_where_a_question_says_so():
    row = replace(ROW, op="<=", kind="exact", measured=4e-6, interval=None)
    assert side(row, 0.0, within=1e-5) == "alike"
    assert side(row, 0.0, within=1e-6) == "behind"


def test_every_figure_behind_stands_at_the_top(monkeypatch):
    name = "decode.peer-token-ct2"
    lost = replace(ROWS[name], measured=1.9, interval=(1.8, 2.0))
    for rows, count in ((ROWS, 1), (ROWS | {name: lost}, 2)):
        text = page(rows)
        assert text.count(f"#{name})") == count
        top = text.split("## Where others are ahead")[1].split("\n## ")[0]
        assert (name in top) == (count == 2)


@pytest.mark.parametrize(
    ("rows", "message"), [(("decode.nothing-*",), "no row matches"), (("comm.*",), "two questions")]
)
def test_a_question_without_an_answer_is_an_error(monkeypatch, rows, message):
    monkeypatch.setattr(comparisons, "SECTIONS", {"One": [Question("what", "who", rows)]})
    with pytest.raises(DataError, match=message):
        page(ROWS)


def test_no_figure_answers_two_questions():
    page(ROWS)
    patterns = [pattern for section in SECTIONS.values() for question in section for pattern in question.rows]
    assert len(patterns) == len(set(patterns))
