"""The page of a study and its progress: what they show, that nothing in them is markup of a study's, and that a browser
draws the page without an error."""

import io
import math
from dataclasses import replace

import numpy as np
import pytest

from shoestring import figures
from shoestring.tune.progress import StudyProgress, drawing, ending, headline
from shoestring.tune.settings import Halving, Population, Study
from shoestring.tune.space import Dimension
from shoestring.tune.store import TrialLease
from shoestring.tune.view.importance import importances
from shoestring.tune.view.page import write
from shoestring.tune.view.record import StudyRecord
from tests.browser import CHROMIUM, Browser

SPACE = (
    Dimension("optim.adamw.lr", "log", 1e-4, 1e-1),
    Dimension("run.batch", "choice", choices=(16, 32, "<b>bold</b>")),
    Dimension("optim.clip.max_norm", "float", 0.1, 2.0),
)


def record_of(trials=40, schedule=None, name="quick <i>study</i>", better=0.0, **study):
    """A study whose objective depends on the first setting, a little on the second, and not on the third."""
    chance = np.random.default_rng(0)
    rows, reports = [], {}
    for number in range(trials):
        lr = 10 ** chance.uniform(-4, -1)
        values = {"optim.adamw.lr": lr, "run.batch": SPACE[1].choices[number % 3]}
        values["optim.clip.max_norm"] = chance.uniform(0.1, 2.0)
        value = 2.0 + (math.log10(lr) + 2.3) ** 2 + 0.1 * (number % 3) - better
        state = "done" if number % 4 else ("pruned", "failed", "held")[number // 4 % 3]
        curve = {step: value + 3 * math.exp(-step / 40) for step in range(10, 201 if state == "done" else 91, 10)}
        trial = TrialLease(number + 1, number, 1, "w", state, values, step=max(curve), seconds=90.0, tokens=1e6)
        if state == "failed":
            trial = replace(trial, note="it said <script>alert(1)</script>")
        rows.append(replace(trial, value=curve[200]) if state == "done" else trial)
        reports[number + 1] = curve
    if isinstance(schedule, Population):
        for number in range(0, trials, 5):
            rows[number] = replace(rows[number], parent=(number + 7) % trials, forked=1)
            reports[number + 1] = {step: value for step, value in reports[number + 1].items() if step > 50}
    settings = Study(run="quickstart", name=name, objective="held_out_loss", **study)
    return StudyRecord(settings, SPACE, schedule, rows, reports)


def test_importance_finds_what_matters_and_says_how_surely():
    record = record_of()
    rows = importances(record.space, [trial.parameters for trial in record.done], [t.value for t in record.done])
    assert rows[0].key == "optim.adamw.lr" and rows[0].low > 0.5
    others = {row.key: row for row in rows[1:]}
    assert others["optim.clip.max_norm"].mean < 0.15
    assert all(row.low <= row.mean <= row.high for row in rows)
    assert importances(record.space, [{}] * 3, [1.0, 2.0, 3.0]) == []


def test_a_study_of_nothing_yet_has_a_page(tmp_path):
    text = write([StudyRecord(Study(run="a"), SPACE, None, [], {})], tmp_path / "a.html").read_text()
    assert "No trial has a result yet" in text


def test_what_a_study_says_is_no_markup(tmp_path):
    text = write([record_of(schedule=Halving(first=50))], tmp_path / "a.html").read_text()
    for planted in ("<b>bold", "<i>study", "<script>alert"):
        assert planted not in text
    assert "&lt;b&gt;bold" in text and "http" not in text.replace("http-equiv", "").replace("https://", "")


def test_studies_are_compared_by_hours_to_what_all_reached(tmp_path):
    random = record_of(name="random", sampler="random")
    quick = record_of(name="gp", better=0.5)
    text = write([quick, random], tmp_path / "a.html").read_text()
    assert "which all of them reached" in text and ">random<" in text
    worst = figures.plain(quick.ranked[-1].value)
    assert f">{worst}</text>" in text, "the end of the objective's axis"


def test_progress_is_a_line_for_each_trial_that_ends():
    record, out = record_of(trials=8), io.StringIO()
    shown = []

    def read():
        if shown:
            raise OSError("the store does not answer")
        shown.append(1)
        return record

    with StudyProgress(read, 200, every=60.0, stream=out) as progress:
        progress.look()
        progress.look()
    lines = out.getvalue().splitlines()
    assert len(lines) == sum(trial.state in ("done", "failed", "pruned") for trial in record.trials)
    assert lines[0].startswith("trial 0 pruned") and "best so far" in out.getvalue()
    assert headline(record).startswith("quick <i>study</i>: ")
    assert drawing(record, 200).row_count == len(record.done)
    assert "held_out_loss" in ending(record, record.done[0])


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("schedule", [Halving(first=50), Population(size=8, every=50)], ids=["halving", "population"])
def test_a_browser_draws_the_page_in_light_and_dark(tmp_path, schedule):
    other = record_of(name="random", sampler="random", better=-0.3)
    path = write([record_of(schedule=schedule), other], tmp_path / "study.html")
    with Browser(width=1000, height=2600) as browser:
        papers = []
        for dark in (False, True):
            browser.dark(dark)
            browser.open(path.as_uri())
            assert browser.value("document.querySelectorAll('.picture svg').length") >= 4
            assert browser.value("document.documentElement.scrollWidth <= innerWidth")
            papers.append(browser.value("getComputedStyle(document.body).backgroundColor"))
            browser.picture(tmp_path / f"study-{'dark' if dark else 'light'}.png")
        assert papers[0] != papers[1] and browser.problems == []
