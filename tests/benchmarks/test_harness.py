"""The benchmarks harness: its rows, their files, its command lines."""

import html
import json
import math
import os
import select
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, replace

import numpy as np
import pytest

from benchmarks import harness
from benchmarks.evidence import CELL
from benchmarks.evidence import main as write_evidence
from benchmarks.harness import Bar, Deadline, Environment, Measured, NotRun, main, measure, selected
from benchmarks.machine import ROOT, git_tree
from benchmarks.rows import declare, hold, not_run, read, record, status, unique, write
from benchmarks.timing import run_command
from shoestring.core.errors import ConfigError, DataError

HERE = Environment(cpu="abacus", cores=2, memory_gib=4.0, gpu=None, tree="0123abc")
WITH_GPU = replace(HERE, gpu="1 × planted")


def bar(name="one", op=">=", number=2.0, found=3.0, kind="exact", **more):
    measured = found if callable(found) else lambda deadline: found
    return Bar(f"area.{name}", f"what {name} does", op, number, measure=measured, kind=kind, **more)


def taken(bar, value=3.0, **more):
    return hold(bar, Measured(value, **more), HERE)


def stored(folder, area="area"):
    return {row.id: row for row in read(folder / f"{area}.json").values()}


# -- rows and their files ---------------------------------------------------------------------------------------------


def test_an_exact_figure_is_held_at_the_bar_and_missed_beside_it():
    assert [status(">=", 2.0, value, "exact", None) for value in (2.0, 1.999, None)] == ["held", "missed", "not-run"]
    assert [status("<=", 2.0, value, "exact", None) for value in (2.0, 2.001, None)] == ["held", "missed", "not-run"]


@pytest.mark.parametrize("kind", ["drawn", "timed"])
@pytest.mark.parametrize(
    ("interval", "above", "below"),
    [
        ((2.0, 2.4), "held", "open"),
        ((1.9, 2.4), "open", "open"),
        ((1.9, 2.0), "open", "held"),
        ((2.1, 2.4), "held", "missed"),
        ((1.1, 1.9), "missed", "held"),
    ],
)
def test_a_figure_that_varies_is_judged_by_the_ends_of_its_interval(kind, interval, above, below):
    middle = sum(interval) / 2
    assert status(">=", 2.0, middle, kind, interval) == above
    assert status("<=", 2.0, middle, kind, interval) == below


def test_a_figure_that_varies_and_has_no_interval_is_never_held():
    assert [status(">=", 2.0, value, "timed", None) for value in (3.0, 1.0)] == ["open", "missed"]
    assert status("<=", 2.0, 1.0, "drawn", None) == "open"


def test_a_figure_outside_of_its_interval_is_not_written(tmp_path):
    with pytest.raises(ConfigError, match="outside of its interval"):
        taken(bar(kind="timed"), 2.55, interval=(3.46, 5.57))
    row = asdict(taken(bar(kind="timed"), 3.5, interval=(3.46, 5.57)))
    (tmp_path / "area.json").write_text(json.dumps([row | {"measured": 2.55}]))
    with pytest.raises(DataError, match="outside of its interval"):
        read(tmp_path / "area.json")


def test_a_row_has_exactly_the_designs_fields_and_survives_its_file(tmp_path):
    row = taken(bar(seeds=(1, 2), peers=("pytest", "no-such-package"), baseline="DDP"), np.float32(3), note="±1")
    write(tmp_path / "area.json", [row])
    keys = (
        "id what op bar kind measured interval status reason baseline command rests_on seconds hardware versions "
        "seeds date"
    )
    assert " ".join(asdict(row)) == keys
    assert read(tmp_path / "area.json") == {"area.one": row}
    assert (row.status, row.command) == ("held", "python -m benchmarks.area --only area.one")
    assert row.hardware == "abacus, 2 cores, 4.0 GiB, no GPU"
    assert row.versions["pytest"] == pytest.__version__
    assert "no-such-package" not in row.versions


@pytest.mark.parametrize("value", [math.nan, math.inf, True, "3", None])
def test_only_finite_numbers_are_measured(value):
    with pytest.raises(ConfigError, match="no finite number"):
        taken(bar(), value)


def test_files_are_sorted_stable_and_leave_nothing_beside_them(tmp_path):
    rows = [taken(bar(name)) for name in ("b", "a", "c")]
    write(tmp_path / "area.json", rows)
    first = (tmp_path / "area.json").read_bytes()
    write(tmp_path / "area.json", reversed(rows))
    assert (tmp_path / "area.json").read_bytes() == first
    assert [row["id"] for row in json.loads(first)] == ["area.a", "area.b", "area.c"]
    assert [path.name for path in tmp_path.iterdir()] == ["area.json"]


FAULTS = {
    "id": "Area One", "what": 1, "op": "==", "bar": "2", "kind": "rough", "measured": math.nan, "interval": "1 to 2",
    "status": "fine", "reason": None, "baseline": 3, "command": [], "rests_on": [{"tree": "main"}], "seconds": "1",
    "hardware": {}, "versions": {"torch": 2}, "seeds": [1.5], "date": "1/2/2026",
}  # fmt: skip


@pytest.mark.parametrize("key", FAULTS)
def test_each_malformed_field_is_refused(tmp_path, key):
    good = asdict(taken(bar()))
    (tmp_path / "area.json").write_text(json.dumps([good | {key: FAULTS[key]}]))
    with pytest.raises(DataError, match=f"row 0: `{key}` is"):
        read(tmp_path / "area.json")
    del good[key]
    (tmp_path / "area.json").write_text(json.dumps([good]))
    with pytest.raises(DataError, match="row 0: not a row"):
        read(tmp_path / "area.json")


def test_files_that_contradict_themselves_are_refused(tmp_path):
    path, good = tmp_path / "area.json", asdict(taken(bar()))
    planted = {
        "stands there twice": [good, good],
        "says missed, but is held: 3.0 >= 2.0": [good | {"status": "missed"}],
        "no reason is given": [good | {"status": "not-run", "measured": None}],
        "belongs to another area": [good | {"id": "other.one"}],
        "not a list": good,
        "not a row": [good | {"extra": 1}],
    }
    for message, records in planted.items():
        path.write_text(json.dumps(records))
        with pytest.raises(DataError, match=message):
            read(path)
    path.write_text("[{")
    with pytest.raises(DataError, match="not JSON"):
        read(path)


def test_a_not_run_row_never_takes_a_measured_ones_place(tmp_path):
    path = tmp_path / "area.json"
    for row in (not_run(bar(), "budget", HERE), not_run(bar(), "no GPU", HERE), taken(bar())):
        record(path, row)
        assert stored(tmp_path)["area.one"] == row
    record(path, not_run(bar(), "no GPU", HERE))
    assert stored(tmp_path)["area.one"].measured == 3.0
    record(path, taken(bar(), 1.0))
    assert stored(tmp_path)["area.one"].status == "missed"


def test_a_bar_that_moves_judges_the_stored_value_again(tmp_path):
    path = tmp_path / "area.json"
    record(path, taken(bar()))
    declare(path, [bar(number=5.0), bar("two")], HERE)
    rows = stored(tmp_path)
    assert (rows["area.one"].status, rows["area.one"].measured) == ("missed", 3.0)
    assert (rows["area.two"].status, rows["area.two"].reason) == ("not-run", "not measured yet")


def test_malformed_bars_are_refused():
    with pytest.raises(ConfigError, match="malformed"):
        bar("Top K")
    with pytest.raises(ConfigError, match="op is"):
        bar(op="==")
    with pytest.raises(ConfigError, match="finite"):
        bar(number=math.inf)
    with pytest.raises(ConfigError, match="declared twice"):
        unique([bar(), bar()], "area")
    with pytest.raises(ConfigError, match="is declared by `other`"):
        unique([bar()], "other")


def test_the_tree_says_when_the_code_differs_but_not_when_results_do(tmp_path):
    def git(*args):
        subprocess.run(["git", "-c", "user.name=n", "-c", "user.email=e", *args], cwd=tmp_path, check=True)

    assert git_tree(tmp_path) == "unknown"
    git("init", "-q")
    (tmp_path / "code.py").write_text("1")
    git("add", ".")
    git("commit", "-qm", "one")
    assert len(git_tree(tmp_path)) == 12
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "benchmarks" / "results" / "area.json").write_text("[]")
    assert len(git_tree(tmp_path)) == 12
    (tmp_path / "code.py").write_text("2")
    assert git_tree(tmp_path).endswith("-dirty")


# -- an area's command line -------------------------------------------------------------------------------------------


def test_a_planted_miss_fails_only_with_strict(tmp_path, capsys):
    bars = [bar("good"), bar("bad", found=Measured(1.0, "of 3")), bar("elsewhere", found=NotRun("no Slurm"))]
    assert main("area", lambda: bars, [], tmp_path) == 0
    assert main("area", lambda: bars, ["--strict"], tmp_path) == 1
    assert main("area", lambda: bars, ["--strict", "--only", "area.good"], tmp_path) == 0
    assert capsys.readouterr().out.splitlines()[:3] == [
        "MISSED  area.bad  1 >= 2  what bad does (of 3)",
        "not-run area.elsewhere  - >= 2  what elsewhere does (no Slurm)",
        "held    area.good  3 >= 2  what good does",
    ]
    assert {row.id: row.status for row in stored(tmp_path).values()} == {
        "area.bad": "missed", "area.elsewhere": "not-run", "area.good": "held",
    }  # fmt: skip


def test_only_what_was_asked_for_runs_and_every_bar_has_a_row(tmp_path, capsys):
    def never(deadline):
        raise AssertionError

    bars = [bar("one"), bar("two", found=never)]
    assert main("area", lambda: bars, ["--only", "area.o"], tmp_path) == 0
    assert stored(tmp_path)["area.two"].reason == "not measured yet"
    bars = [bar("one"), bar("one-more", found=never), bar("two", found=never)]
    assert main("area", lambda: bars, ["--only", "area.one"], tmp_path) == 0  # a whole id is of that bar alone
    assert main("area", lambda: bars, ["--only", "area.thre"], tmp_path) == 2
    assert "no bar's id starts with `area.thre`" in capsys.readouterr().err


def test_several_are_asked_for_in_their_order_and_some_left_out():
    bars = [bar(name) for name in ("a-1", "a-2", "b", "c")]
    assert [each.id for each in selected(bars)] == ["area.a-1", "area.a-2", "area.b", "area.c"]
    assert [each.id for each in selected(bars, ["area.b", "area.a", "area.a-1"])] == ["area.b", "area.a-1", "area.a-2"]
    assert [each.id for each in selected(bars, ["area.b", "area.a"], ["area.a-1", "area.c"])] == ["area.b", "area.a-2"]
    with pytest.raises(ConfigError, match=r"no bar's id starts with `area\.d`"):
        selected(bars, [], ["area.d"])


def test_list_measures_and_writes_nothing(tmp_path, capsys):
    assert main("area", lambda: [bar()], ["--list"], tmp_path) == 0
    assert capsys.readouterr().out == "area.one  >= 2  what one does\n"
    assert not list(tmp_path.iterdir())


def test_a_measurement_that_fails_is_reported_and_the_others_run(tmp_path, capsys):
    def fails(deadline):
        raise ValueError(f"planted at {ROOT}/src/one.py")

    assert main("area", lambda: [bar("bad", found=fails), bar("good")], [], tmp_path) == 1
    seen = capsys.readouterr()
    assert "Traceback" in seen.err
    assert stored(tmp_path)["area.bad"].reason == "failed: ValueError: planted at src/one.py"
    assert stored(tmp_path)["area.good"].status == "held"


def test_a_stored_row_that_nobody_declares_stops_the_run(tmp_path, capsys):
    main("area", lambda: [bar("one"), bar("two")], [], tmp_path)
    assert main("area", lambda: [bar("one")], [], tmp_path) == 2
    assert "holds `area.two`, which is not declared" in capsys.readouterr().err


def test_malformed_results_stop_the_run_before_anything_is_measured(tmp_path, capsys):
    (tmp_path / "area.json").write_text("[1]")
    assert main("area", lambda: [bar(found=lambda deadline: 1 / 0)], [], tmp_path) == 2
    assert "row 0: not a row" in capsys.readouterr().err
    assert (tmp_path / "area.json").read_text() == "[1]"


def test_a_deadline_interrupts_a_measurement_and_leaves_no_alarm():
    def forever(deadline):
        while deadline.left() > -5:
            pass

    row, fine = measure(bar(found=forever), HERE, Deadline(0.05))
    assert (row.reason, fine) == ("budget", True)
    assert measure(bar(found=forever), HERE, Deadline(0))[0].reason == "budget"
    assert measure(bar(found=lambda deadline: deadline.left()), HERE, Deadline(60))[0].status == "held"


def test_code_that_takes_every_exception_does_not_take_the_deadlines():
    def takes_all(deadline):
        while deadline.left() > -5:
            with suppress(Exception):
                while deadline.left() > -5:
                    pass

    assert measure(bar(found=takes_all), HERE, Deadline(60).within(0.05))[0].reason == "budget"


def test_a_command_that_outlasts_the_deadline_is_ended_with_its_children(tmp_path):
    child = "import time; time.sleep(60)"
    parent = f"""
import subprocess, sys, pathlib
child = subprocess.Popen([sys.executable, "-S", "-c", {child!r}], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
pathlib.Path("pid").write_text(str(child.pid))
child.wait()
"""

    def run(deadline):
        run_command([sys.executable, "-S", "-c", parent], cwd=tmp_path)

    row, _ = measure(bar(found=run), HERE, Deadline(1.0))
    assert (row.status, row.reason) == ("not-run", "budget")
    if (tmp_path / "pid").exists():  # else the machine was so slow that no child was started
        with suppress(ProcessLookupError):
            child = os.pidfd_open(int((tmp_path / "pid").read_text()))
            ended, _, _ = select.select([child], [], [], 10)
            os.close(child)
            assert ended


# -- evidence ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_evidence_is_generated_escaped_and_checked(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("benchmarks.machine._given", {ROOT: "0123456789ab"})
    results, page = tmp_path / "results", tmp_path / "docs" / "evidence.md"
    hostile = replace(bar("two", found=1.0), what="a | b <script> [x](y) *z*\n# w", seeds=(1, 2))
    long = replace(bar("four"), what="many words " * 40)
    main("area", lambda: [bar(), hostile, bar("three", found=NotRun("no disk")), long], [], results)
    assert write_evidence(["--check"], results, page) == 1
    assert "out of date" in capsys.readouterr().err
    assert write_evidence([], results, page) == 0
    assert write_evidence(["--check"], results, page) == 0
    text = page.read_text()
    assert "4 bars: 2 held, 1 missed, 0 open, 1 not run; 0 of them stale." in text
    assert '| <a id="area.one"></a>area.one | what one does | &gt;= 2 | 3 | held |' in text
    assert r"a &#124; b &lt;script&gt; \[x\](y) \*z\* \# w |" in text
    assert "- **area.three.** Not run: no disk." in text
    assert "Seeds: 1, 2." in text
    assert text.count("many words") > 40
    assert text.count("environment 1.") == 4
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in table} == {7}
    assert max(len(html.unescape(cell)) for line in table for cell in line.split(" | ")) <= CELL + len("| ")
    page.write_text(text.replace("| held |", "| held! |"))
    assert write_evidence(["--check"], results, page) == 1
    (results / "area.json").write_text("{}")
    assert write_evidence(["--check"], results, page) == 2


def test_a_tree_that_was_given_is_that_of_stored_runs_too(monkeypatch, tmp_path):
    monkeypatch.setattr("benchmarks.machine._given", {})
    assert Environment.capture(tree="0123456789ab").tree == git_tree() == "0123456789ab"
    assert harness.stored(tmp_path / "run.json", lambda: None, dict)["tree"] == "0123456789ab"
