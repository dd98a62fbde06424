"""Reading what runs, resumes and crashes leave, and thinning curves."""

import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoestring.core.errors import ConfigError
from shoestring.report import curves, digest
from shoestring.report.reading import flat, read


def test_a_repeated_step_counts_once_and_the_later_wins(new):
    folder = new(steps=1).metrics(tail='{"step": 3, "loss": 9}\n{"step": 2, "loss": 5}\n{"step": 3, "loss": 4.5}\n')
    assert read(folder.path).columns["loss"] == {1: folder.rows[0]["loss"], 2: 5.0, 3: 4.5}
    assert list(read(folder.path).columns["loss"]) == [1, 2, 3]


def test_lines_that_are_no_rows_are_left_out_and_said(new):
    tail = '[1]\nnull\n{"loss": 1}\n{"step": "x"}\n{"step": 1e999}\n\xff\n{"step": 2, "loss": true}\n{"step": 9, "lo'
    run = read(new(steps=1).metrics(tail=tail).path)
    assert list(run.columns["loss"]) == [1]
    assert run.problems == ["metrics.jsonl: 7 unreadable lines left out"]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": ' * 100_000, "\xff\x00"])
def test_a_damaged_document_is_a_problem_not_an_error(new, text):
    folder = new().metrics()
    (folder.path / "summary.json").write_text(text)
    run = read(folder.path)
    assert run.summary == {} and run.problems[0].startswith("summary.json")


def test_what_is_no_run_folder_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="no run folder at"):
        read(tmp_path / "absent")
    with pytest.raises(ConfigError, match="not a run folder"):
        read(tmp_path)


def test_traces_come_in_the_order_of_ranks(new):
    assert [trace["rank"] for trace in read(new().traces(ranks=11).path).traces] == list(range(11))


@given(
    st.lists(st.floats(width=32), max_size=400).filter(len),
    st.integers(min_value=5, max_value=60),
)
def test_thinning_keeps_the_ends_the_extremes_and_the_limit(values, limit):
    kept = curves.thin(values, limit)
    assert len(kept) <= limit or len(values) <= limit
    assert kept == sorted(set(kept)) and kept[0] == 0 and kept[-1] == len(values) - 1
    shown, finite = [values[k] for k in kept], [value for value in values if math.isfinite(value)]
    assert not finite or (min(finite) in shown and max(finite) in shown)
    assert len(finite) == len(values) or any(not math.isfinite(value) for value in shown)


def test_a_long_curve_shows_logged_values_and_keeps_true_means_for_smoothing(new):
    run = read(new(steps=5000).metrics().path)
    drawn = curves.payload([run])
    training, held_out = drawn["large"][0]["lines"]
    steps = drawn["runs"][0]["step"]
    assert training["logged"] == 5000 and len(training["at"]) <= curves.LARGE
    logged = run.columns["bits_per_byte"]
    for at, value in zip(training["at"], training["value"], strict=True):
        assert value == pytest.approx(logged[steps[at]], rel=1e-5)
    first = sum(logged[step] for step in range(1, 11)) / 10
    assert training["means"]["value"][0] == pytest.approx(first, rel=1e-5)
    assert len(training["means"]["at"]) == curves.MEANS and steps[training["means"]["at"][0]] == 6
    assert held_out["kind"] == "held out" and "means" not in held_out


def test_values_that_are_not_finite_are_named(new):
    run = read(new(steps=3).metrics(loss=lambda step: [1.0, math.nan, math.inf][step - 1]).path)
    line = curves.payload([run])["large"][0]["lines"][0]
    assert line["value"] == [0.5, "NaN", "∞"]


def test_a_run_that_diverged_does_not_look_as_if_it_had_not(new):
    run = read(new(steps=10).metrics(loss=lambda step: math.nan if step > 5 else 2.0).path)
    assert math.isnan(digest.results(run)["held-out bits per byte"])


def test_tokens_are_taken_as_logged_else_in_proportion(new):
    run = read(new(steps=4).metrics().summary(tokens=400).path)
    assert digest.tokens_at(run, [1]) == [100]
    run.columns["tokens"] = {1: 7.0}
    assert digest.tokens_at(run, [1]) == [7]


def test_the_verdict_names_what_was_beaten_and_what_was_not(whole):
    assert digest.verdict(read(whole.path)) == "Better than gzip -9 and 5-gram (Witten-Bell); not better than xz -9."


def test_nested_settings_become_dotted_keys():
    assert flat({"run": {"steps": 4, "x": {}}, "a": [1]}) == {"run.steps": "4", "run.x": "{}", "a": "[1]"}


def test_importing_the_report_imports_no_torch():
    code = "import sys; from shoestring.report import console, sinks, write; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
