"""On a phone nothing of a page is cut: what is wider than the screen lies in a container that scrolls, or is folded."""

import numpy as np
import pytest

from shoestring import report
from shoestring.core.feature import Table
from shoestring.memory.tracing import page as memory_page
from shoestring.profile.comparison import compare as compare_profiles
from shoestring.profile.view import page as profile_page
from shoestring.report.findings import Findings, Picture
from shoestring.tune.settings import Halving, Population
from shoestring.tune.view.page import write as write_study
from shoestring.verbs.predict import save_page
from tests.browser import Browser, needs_chromium
from tests.memory.observed import needs_compiler
from tests.memory.test_tracing_feature import trained
from tests.profile.small_profiles import small
from tests.tune.test_study_page import record_of

pytestmark = needs_chromium
LONG = "/a/path/without/a/place/to/break/" + "x" * 90


@pytest.fixture(scope="module")
def phone():
    with Browser(width=390, height=844, mobile=True) as browser:
        yield browser


def folder_of(new, name):
    features = [{"name": "a.b", "seams": ["STEP"], "settings": {"long": LONG}, "why": "because " * 20}]
    return new(name, name=name).metrics().summary(features=features, notes=[LONG]).traces(ranks=6)


def write_report(new, _):
    folder = folder_of(new, "run").path
    sink = Findings(folder)
    wide = {f"{LONG} {number}": Picture(pixels=np.zeros((20, 900)), caption=LONG) for number in range(3)}
    sink.show(3, wide | {"a table": Table(title=LONG, head=("name", LONG, "c"), rows=((LONG, 1.5, LONG),), note=LONG)})
    sink.close()
    return report.write(folder)


def write_predictions(_, tmp_path):
    wide = Picture(pixels=np.zeros((20, 900)))
    rows = [{"file": f"{LONG}/{number}.png", "kind": LONG, "share": 0.5, "map": wide} for number in range(3)]
    save_page([*rows, {"file": "broken", "error": LONG}], LONG, tmp_path, tmp_path / "predictions.html")
    return tmp_path / "predictions.html"


def write_runs_compared(new, tmp_path):
    folders = [folder_of(new, f"run-{number}-{'of-a-long-name' * number}").path for number in range(5)]
    return report.compare(folders, tmp_path / "compared.html")[1]


def write_halving(_, tmp_path):
    return write_study([record_of(schedule=Halving(first=50)), record_of(name="random")], tmp_path / "study.html")


def write_population(_, tmp_path):
    return write_study([record_of(schedule=Population(size=8, every=50))], tmp_path / "study.html")


def write_profile(_, tmp_path):
    profile = small(operator="aten::" + "long_name_" * 9)
    return profile_page.write(profile, tmp_path / "profile.html")


def write_profiles_compared(_, tmp_path):
    compared = compare_profiles(small(), small(operator="aten::mm", scale=2))
    return profile_page.write_comparison(compared, ("before.npz", LONG), tmp_path / "profile-diff.html")


def write_memory(_, tmp_path):
    return memory_page.write(trained(), tmp_path / "memory.html")


@pytest.mark.slow
@pytest.mark.parametrize(
    "write",
    [
        write_report,
        write_predictions,
        write_runs_compared,
        write_halving,
        write_population,
        write_profile,
        write_profiles_compared,
        pytest.param(write_memory, marks=needs_compiler),
    ],
)
def test_nothing_is_cut_on_a_phone(write, new, tmp_path, phone):
    phone.open(write(new, tmp_path).as_uri())
    phone.value("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert phone.cut() == []
    assert phone.value("document.documentElement.scrollWidth") == 390
    if phone.value("Boolean(document.querySelector('input[value=table]'))"):
        phone.value("document.querySelector('input[value=table]').click()")
        assert phone.cut() == []


@pytest.mark.parametrize(
    ("markup", "cut"),
    [
        ("<div style='width: 900px; height: 9px'></div>", ["DIV"]),
        ("<div style='overflow-x: auto'><p style='width: 900px'>wide</p></div>", []),
        ("<div style='overflow: hidden'><p style='width: 900px'>wide</p></div>", ["P"]),
        ("<div style='overflow: hidden'><span style='margin-left: -60px'>left of it</span></div>", ["SPAN", "#text"]),
        (f"<p>{'x' * 90}</p>", ["#text"]),
        ("<div style='width: 900px; overflow-x: auto'>the scroller itself</div>", ["DIV", "#text"]),
        (
            "<svg width='90' height='20' viewBox='0 0 90 20'><text x='60' y='15'>axis of time</text></svg>",
            ["text", "#text"],
        ),
    ],
    ids=["wide", "scrolls", "hidden", "left", "word", "scroller", "chart"],
)
def test_what_is_cut_is_found(markup, cut, tmp_path, phone):
    path = tmp_path / "page.html"
    path.write_text(f"<!doctype html><meta name='viewport' content='width=device-width'><body>{markup}</body>")
    phone.open(path.as_uri())
    assert [line.split()[0] for line in phone.cut()] == cut
