"""Runs started by another program, in its own process: further sinks, an end that it asks for, and what comes back."""

import json
import signal
import threading

import pytest
import torch
import toy

from shoestring import report
from shoestring.core.errors import ConfigError
from shoestring.core.world import World
from shoestring.run import parse
from shoestring.training.loop import train


class Memory:
    """A sink that remembers; it fails from `fails` on."""

    def __init__(self, fails=10**9):
        self.rows, self.closed, self.fails = [], 0, fails

    def write(self, step, values):
        if step >= self.fails:
            raise RuntimeError("full")
        self.rows.append((step, dict(values)))

    def close(self):
        self.closed += 1


def run(folder, **settings):
    own = {"model": "toy:model", "data": "toy:pair", "steps": 6, "batch": 8, "folder": str(folder)} | settings
    document = {"run": own, "optim": {"sgd": {"lr": 0.1}}, "checkpoint": {"plain": {}}, "shows": {"flips": {}}}
    own["packages"] = ["shows"]
    return parse(document, name="toy")


@pytest.fixture(autouse=True)
def pair(monkeypatch):
    monkeypatch.setattr(toy, "pair", lambda: (toy.samples(), toy.samples()), raising=False)


def losses(sink):
    return [values["loss"] for _, values in sink.rows if "loss" in values]


def test_sinks_get_what_the_file_gets_and_the_result_holds_the_last_of_it(tmp_path):
    first, second = Memory(), Memory()
    result = train(run(tmp_path / "run"), World(), sinks=[first, second])
    assert (result.status, result.folder) == ("finished", tmp_path / "run")
    assert [step for step, values in first.rows if "loss" in values] == [1, 2, 3, 4, 5, 6]
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows if "loss" in row] == losses(first) == losses(second)
    assert result.metrics["loss"] == losses(first)[-1] and result.metrics["flips"] == 1 / 7
    assert result.metrics["held_out_loss"] == rows[-1]["held_out_loss"] > 0
    assert (first.closed, second.closed) == (1, 1)


def test_a_sink_that_fails_gets_no_more_and_ends_nothing(tmp_path, caplog):
    failing, other = Memory(fails=3), Memory()
    assert train(run(tmp_path / "run"), World(), sinks=[failing, other]).status == "finished"
    assert len(losses(failing)) == 2 and len(losses(other)) == 6 and failing.closed == 1
    assert "sink `Memory (0)` failed at step 3" in caplog.text
    with pytest.raises(ConfigError, match="without a method `write`"):
        train(run(tmp_path / "other"), World(), sinks=[object()])


def test_a_stop_ends_after_the_step_with_a_checkpoint_and_the_run_can_be_resumed(tmp_path):
    whole, sink = Memory(), Memory()
    train(run(tmp_path / "whole"), World(), sinks=[whole])
    asked = iter([False, False, True])
    stopped = train(run(tmp_path / "run"), World(), sinks=[sink], stop=lambda: next(asked))
    assert stopped.status == "stopped" and len(losses(sink)) == 3
    assert "held_out_loss" not in stopped.metrics and stopped.metrics["loss"] == losses(whole)[2]
    rest = Memory()
    resumed = train(run(tmp_path / "run", resume=True), World(), sinks=[rest], stop=lambda: False)
    assert resumed.status == "finished" and losses(sink) + losses(rest) == losses(whole)


def test_runs_of_one_process_are_independent_on_any_thread_and_leave_it_as_it_was(tmp_path):
    handler, results = signal.getsignal(signal.SIGTERM), {}
    sinks = [Memory(), Memory()]
    train(run(tmp_path / "main", deterministic=True), World(), sinks=[sinks[0]])

    def elsewhere():
        results["there"] = train(run(tmp_path / "there", deterministic=True), World(), sinks=[sinks[1]])

    worker = threading.Thread(target=elsewhere)
    worker.start()
    worker.join(60)
    assert results["there"].status == "finished" and losses(sinks[0]) == losses(sinks[1])
    assert not torch.are_deterministic_algorithms_enabled() and signal.getsignal(signal.SIGTERM) is handler


def test_what_a_feature_shows_is_in_the_summary_and_on_the_page(tmp_path):
    folder = train(run(tmp_path / "run"), World()).folder
    table, curve = json.loads((folder / "summary.json").read_text())["report_items"]
    assert table["rows"] == [["all", 6], ["<b>", 0.5]] and curve["metrics"] == {"flips": "all layers"}
    text = report.write(folder).read_text()
    assert "By shows.flips" in text and "&lt;b&gt;" in text and "Flip rate" in text
