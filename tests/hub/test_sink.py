"""The sink `hub`: metrics of a run while it trains, whatever happens to the hub."""

import logging
import shutil
import threading
import time
from itertools import count

import pytest

from shoestring.cli import main
from shoestring.core.errors import ConfigError
from shoestring.report.sinks import JsonLines
from shoestring.report.trackers import TRACKERS, Tracker
from shoestring_hub.client import sink as sinks
from shoestring_hub.client.connection import Connection
from shoestring_hub.client.logins import login_for
from shoestring_hub.client.pull import pull
from shoestring_hub.client.push import push
from tests.small_runs import write_run_file, write_texts
from tests.waiting import until


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(sinks, "PERIOD", 0.05)
    monkeypatch.setattr(sinks, "OUTAGE", 0.1)


class Training:
    """What of a run concerns its sinks: rows go to the file first, then to the tracker."""

    def __init__(self, folder, step=0):
        folder.mkdir(exist_ok=True)
        (folder / "run.toml").write_text('[run]\nname = "live"\nsteps = 100\n')
        self.rows = JsonLines(folder / "metrics.jsonl")
        self.rows.truncate_after(step)
        self.tracker = Tracker("hub", TRACKERS["hub"], folder, folder.name, {}, step)
        self.log = self.tracker._sink._log

    def step(self, step, loss):
        self.rows.write(step, {"loss": loss})
        self.tracker.write(step, {"loss": loss})

    def end(self):
        self.rows.close()
        self.tracker.close()


def hub_log(number=1):
    """The bytes that the hub has of a run."""
    return Connection(login_for()).fetch(f"runs/{number}/log", 1 << 30)


@pytest.mark.slow
def test_rows_arrive_while_a_run_trains(project, ada, tmp_path):
    training = Training(tmp_path / "run")
    training.step(1, 3.0)
    until(lambda: training.log.size > 0)
    for step in range(2, 50):
        training.step(step, 3.0 / step)
    training.end()
    assert hub_log() == (tmp_path / "run" / "metrics.jsonl").read_bytes()
    text = ada.get(f"/{project}/").text
    assert ">live</a>" in text and "0.06122" in text


def test_a_resumed_run_repeats_no_step_on_the_hub(project, tmp_path):
    folder = tmp_path / "run"
    training = Training(folder)
    for step in range(1, 5000):
        training.step(step, 1.0)
    training.end()
    training = Training(folder, step=2000)
    for step in range(2001, 2500):
        training.step(step, 2.0)
    training.end()
    assert hub_log() == (folder / "metrics.jsonl").read_bytes()


def test_a_former_start_that_was_thought_dead_writes_no_more(project, tmp_path, caplog):
    former = Training(tmp_path / "former")
    former.step(1, 1.0)
    until(lambda: former.log.size > 0)
    shutil.copytree(tmp_path / "former", tmp_path / "later")  # the same run, on another machine
    later = Training(tmp_path / "later", step=1)
    until(lambda: later.log.attempt == 2)
    former.step(2, 9.0)
    until(lambda: former.tracker._sink._over)
    assert "a later start of this run writes to the hub" in caplog.text
    later.step(2, 1.0)
    later.end()
    assert hub_log() == (tmp_path / "later" / "metrics.jsonl").read_bytes()


@pytest.mark.slow
def test_a_hub_that_is_away_costs_training_nothing_and_push_sends_the_rest(server, project, tmp_path, caplog):
    caplog.set_level(logging.INFO, "shoestring")
    folder = tmp_path / "run"
    server.kill()
    try:
        start = time.perf_counter()
        training = Training(folder)
        for step in range(1, 200):
            training.step(step, 1.0)
        assert time.perf_counter() - start < 1.0
        begun = time.perf_counter()
        training.end()
        assert time.perf_counter() - begun < sinks.AT_END + 1.0
        assert "send them with: shoestring hub push" in caplog.text
    finally:
        server.start()
    push(folder)
    assert hub_log() == (folder / "metrics.jsonl").read_bytes()


@pytest.mark.slow
def test_a_hub_that_comes_back_gets_every_row_once(server, project, tmp_path):
    training = Training(tmp_path / "run")
    for step in range(1, 300):
        training.step(step, 1.0)
        if step == 100:
            until(lambda: training.log.size > 0)
            server.kill()
        if step == 200:
            until(lambda: training.tracker._sink._away)
            server.start()
    until(lambda: not training.tracker._sink._away)
    training.end()
    assert hub_log() == (tmp_path / "run" / "metrics.jsonl").read_bytes()


def test_a_revoked_token_ends_the_sink_and_not_the_run(project, ada, tmp_path, caplog):
    training = Training(tmp_path / "run")
    training.step(1, 1.0)
    until(lambda: training.log.size > 0)
    number = ada.get(f"/{project}/tokens").text.partition(f"/{project}/tokens/")[2].partition("/")[0]
    ada.post(f"/{project}/tokens/{number}/revoke")
    training.step(2, 1.0)
    until(lambda: training.tracker._sink._over)
    training.step(3, 1.0)
    training.end()
    assert "no more metrics go to the hub: the hub refuses: the token is not valid" in caplog.text


@pytest.mark.slow
def test_a_push_during_training_and_the_sink_write_one_log(project, tmp_path):
    folder = tmp_path / "run"
    training, stop = Training(folder), threading.Event()

    def train():
        for step in count(1):
            training.step(step, 1.0)
            if stop.wait(0.001):  # the pace of a run with short steps
                return

    thread = threading.Thread(target=train)
    thread.start()
    for _ in range(5):
        push(folder)
    stop.set()
    thread.join()
    training.end()
    assert hub_log() == (folder / "metrics.jsonl").read_bytes()


def test_without_a_login_a_run_says_so_before_its_first_step(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with pytest.raises(ConfigError, match="no login to a hub"):
        Training(tmp_path / "run")


@pytest.mark.slow
def test_a_run_trains_with_the_sink_of_its_run_file(project, tmp_path):
    run = {"data": write_texts(tmp_path / "texts"), "steps": 3, "folder": str(tmp_path / "run"), "sinks": ["hub"]}
    assert main(["train", str(write_run_file(tmp_path / "run.toml", {"run": run}))]) == 0
    assert hub_log() == (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert main(["hub", "push", str(tmp_path / "run")]) == 0
    pull(1, tmp_path / "copy")
    assert (tmp_path / "copy" / "report.html").read_bytes() == (tmp_path / "run" / "report.html").read_bytes()
