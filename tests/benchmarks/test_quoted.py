"""Figures that pages quote are those of the rows."""

import pytest

from benchmarks.quoted import faults_of
from benchmarks.rows import RESULTS, Row, read

ROWS = read(RESULTS / "foundation.json")
NAME = "foundation.quickstart"


@pytest.fixture
def row() -> Row:
    return ROWS[NAME]


@pytest.mark.parametrize("form", ["{:.2f}", "{:.1f}", "{:.3f} bits less"])
def test_a_figure_of_the_row_may_be_quoted_rounded(row, form):
    assert not list(faults_of(f"[{form.format(row.measured)}](docs/evidence.md#{NAME})", ROWS))


def test_another_figure_is_named(row):
    wrong = f"{row.measured + 0.1:.2f}"
    (fault,) = faults_of(f"[{wrong} bits](docs/evidence.md#{NAME})", ROWS)
    assert wrong in fault and NAME in fault


def test_a_row_that_is_gone_is_named():
    assert list(faults_of("[1](docs/evidence.md#foundation.gone)", ROWS)) == ["no row is called `foundation.gone`"]
