"""Real runs that fail leave a page that says what happened and where, with the curves so far."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shoestring import report
from shoestring.cli import main
from shoestring.core.errors import NonFiniteError, PeerError
from shoestring.report import digest, history_file
from shoestring.report.reading import read
from shoestring.report.recorder import Recorder
from tests.report import failing
from tests.small_runs import write_run_file

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run_file(tmp_path):
    """A function that writes the run file of a small run with one of the losses of `failing`."""
    failing.calls[0] = 0
    (tmp_path / "text.txt").write_text("words of a small corpus\n" * 3000)

    def write(loss):
        run = {"data": f"{tmp_path}/text.txt", "folder": f"{tmp_path}/out", "loss": f"tests.report.failing:{loss}"}
        run |= {"steps": 8, "evaluate_every": 2, "resume": "auto"}
        return write_run_file(tmp_path / "run.toml", {"run": run, "checkpoint": {"plain": {"every": 2}}})

    return write


def trained(run_file, *flags):
    """The same run by a process of its own."""
    command = [sys.executable, "-m", "shoestring", "train", str(run_file), *flags]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=150)


def page_of(path):
    return (path.parent / "out" / "report.html").read_text("utf-8")


def why(text):
    return re.search(r'<section class="failure">.*?</section>', text, re.DOTALL)[0]


def curve(text):
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])
    (run,) = data["runs"]
    line = data["large"][0]["lines"][0]
    return dict(zip((run["step"][at] for at in line["at"]), line["value"], strict=True))


def test_an_exception_is_named_with_its_step_and_place_and_the_curves_so_far(run_file):
    path = run_file("raises")
    with pytest.raises(ValueError, match="out of range"):
        main(["train", str(path)])
    text = page_of(path)
    assert "✕ failed" in text and "<dt>Steps</dt><dd>3 of 8</dd>" in text
    assert "ValueError: labels &lt;b&gt;out of range&lt;/b&gt;" in why(text) and "failing.py" in why(text)
    assert "<dt>After step</dt><dd>3</dd>" in why(text) and "--resume auto" in why(text)
    assert list(curve(text)) == [1, 2, 3]


def test_a_loss_that_is_nan_is_said(run_file):
    path = run_file("nan")
    assert main(["train", str(path)]) == 2
    text = page_of(path)
    assert "✕ failed" in text and re.search(r"(?i)nan|not finite", why(text)) and "Traceback" not in why(text)
    assert list(curve(text))[:3] == [1, 2, 3]


def test_running_out_of_memory_names_the_settings_that_help(run_file):
    path = run_file("out_of_memory")
    assert main(["train", str(path)]) == 2
    assert "out of memory on" in why(page_of(path)) and "run.accumulate" in why(page_of(path))


@pytest.mark.slow
def test_a_process_that_was_killed_is_found_by_the_next_start(run_file):
    path = run_file("killed")
    assert trained(path).returncode == -signal.SIGKILL
    folder = path.parent / "out"
    assert not (folder / "report.html").exists() and digest.status(read(folder)) == "unfinished"
    assert trained(path).returncode == -signal.SIGKILL  # four steps after the checkpoint that it resumed from
    text = page_of(path)
    assert "✕ failed" in text and "out-of-memory killer" in why(text)
    assert "<dt>After step</dt><dd>3</dd>" in why(text) and list(curve(text)) == [1, 2, 3]


@pytest.mark.slow
def test_an_end_is_an_end_again_after_a_failure_and_the_page_lists_the_starts(run_file):
    with pytest.raises(ValueError, match="out of range"):
        main(["train", str(run_file("raises"))])
    path = run_file("raises")  # which fails at its fourth call only, so the next start succeeds
    assert main(["train", str(path)]) == 0
    text = page_of(path)
    assert "✓ finished" in text and 'class="failure"' not in text and "<h2>Starts and ends</h2>" in text
    events = [event["event"] for event in history_file.read(path.parent / "out")]
    assert events == ["started", "failed", "started", "resumed", "finished"]
    assert [event["step"] for event in history_file.read(path.parent / "out") if event["event"] == "resumed"] == [2]


def test_the_time_of_a_run_is_that_of_all_its_starts(new):
    """To each end, and of one that was killed to its last metric; not what lies between them."""
    folder = new().metrics()
    events = [("started", 100.0), ("stopped", 160.0), ("started", 1000.0), ("resumed", 1001.0), ("lost", 5000.0)]
    events += [("started", 5000.0), ("resumed", 5001.0), ("finished", 5100.0)]
    lines = [{"event": event, "time": at, "rank": 0, "step": 3, "ranks": 4, "ended": 1030.0} for event, at in events]
    (folder.path / history_file.FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    folder.put("summary.json", {"status": "finished", "seconds": 90.0})
    found = digest.results(read(folder.path))
    assert found["time"] == 60 + 30 + 90 and found["ranks"] == 4


def test_the_last_step_is_evaluated_once(run_file):
    failing.calls[0] = 100
    path = run_file("raises")
    assert main(["train", str(path)]) == 0
    rows = [json.loads(line) for line in (path.parent / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "held_out_loss" in row] == [2, 4, 6, 8]


@pytest.mark.slow
def test_the_rank_that_failed_is_named_not_the_one_that_lost_it(run_file):
    path = run_file("raises")
    done = trained(path, "--workers", "2")
    assert done.returncode != 0
    text = why(page_of(path))
    assert "ValueError: labels" in text and re.search(r"<dt>Rank</dt><dd>1 on ", text), done.stderr


@pytest.mark.parametrize("there", [False, True])
def test_what_fails_before_the_first_step_leaves_a_folder_that_can_be_used_again(run_file, there):
    failing.calls[0] = failing.FAILS_AT - 1
    path = run_file("out_of_memory")
    if there:  # by the user, who may have put something into it
        (path.parent / "out").mkdir()
    assert main(["train", str(path)]) == 2
    assert (path.parent / "out").exists() == there
    left = {entry.name for entry in (path.parent / "out").iterdir()} if there else set()
    assert not left & {"run.toml", "history.jsonl", "report.html"}


def test_what_took_long_to_prepare_is_left_to_the_next_start(run_file, monkeypatch):
    monkeypatch.setattr("shoestring.training.run_folder.QUICK", 0.0)
    failing.calls[0] = failing.FAILS_AT - 1
    path = run_file("out_of_memory")
    assert main(["train", str(path)]) == 2
    left = {entry.name for entry in (path.parent / "out").iterdir()}
    assert "train.tokens" in left and "run.toml" not in left


# -- the history itself ------------------------------------------------------------------------------------------------


def failed(folder, rank, error):
    with pytest.raises(type(error)), Recorder() as record:
        record.begin(folder.path, rank, lambda: 7)
        raise error


def test_the_cause_is_the_first_failure_that_is_not_the_loss_of_another_rank(new):
    folder = new().metrics()
    failed(folder, 0, PeerError("rank 0 has lost rank 1"))
    failed(folder, 2, RuntimeError("boom"))
    failed(folder, 3, NonFiniteError("late"))
    event = history_file.cause(history_file.read(folder.path))
    assert (event["rank"], event["message"]) == (2, "RuntimeError: boom")
    text = report.write(folder.path).read_text("utf-8")
    assert "<dt>Ranks that failed too</dt><dd>0, 3</dd>" in text


def test_results_of_an_earlier_end_are_not_those_of_a_run_that_failed_since(new):
    folder = new().metrics().summary(status="stopped", bits_per_byte={"held out": 0.123})
    history_file.add(folder.path, "stopped", rank=0, step=20)
    assert digest.results(read(folder.path))["held-out bits per byte"] == 0.123
    failed(folder, 0, RuntimeError("boom"))
    run = read(folder.path)
    assert digest.status(run) == "failed" and digest.results(run)["parameters"] == 1_130_000
    assert digest.results(run)["held-out bits per byte"] != 0.123


def test_a_line_cut_short_hides_no_other_event(new):
    folder = new().metrics()
    (folder.path / history_file.FILE).write_text('{"event": "started", "step": 0}\n{"event": "fini')
    history_file.add(folder.path, "failed", rank=0, step=3, message="x")
    assert [event["event"] for event in history_file.read(folder.path)] == ["started", "failed"]


@pytest.mark.parametrize("line", ["5", "[]", '{"event": 3}', '{"event": "failed"}', '{"event": "lost", "time": "x"}'])
def test_a_damaged_history_is_no_error(new, line, hostile):
    folder = new().metrics()
    (folder.path / history_file.FILE).write_text(
        line + "\n" + json.dumps({"event": "failed", "time": 1e300, "step": [], "rank": hostile, "message": hostile})
    )
    text = report.write(folder.path).read_text("utf-8")
    assert "</html>" in text and hostile not in text
