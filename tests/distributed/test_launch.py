"""Several workers of one host: what the command line hands on to them, and when they are started again."""

from __future__ import annotations

import signal

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from shoestring.cli import main
from shoestring.distributed import launch

FAILING = """
from pathlib import Path

with Path("starts").open("a") as file:
    file.write("start\\n")
raise RuntimeError("on purpose")
"""


@pytest.fixture
def failing(tmp_path, monkeypatch):
    """A run whose model cannot be imported, which each worker finds out; the working folder counts their starts."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "failing.py").write_text(FAILING)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    (tmp_path / "run.toml").write_text(
        '[run]\nmodel = "failing:model"\ndata = "text.txt"\n[data]\ntokenizer = "bytes"\n'
    )
    return tmp_path


@pytest.mark.slow
def test_workers_are_not_started_again_after_what_the_user_has_to_mend(failing, capfd, monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    (failing / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(failing / "temporary"))
    assert main(["train", "run.toml", "--workers", "2", "--restarts", "2"]) == 2
    assert signal.getsignal(signal.SIGTERM) == before  # torch's agent sets one of its own
    assert (failing / "starts").read_text().count("start") == 2  # once each
    said = capfd.readouterr().err
    assert said.count("error: ") == 1 and "RuntimeError: on purpose" in said and "Traceback" not in said
    assert not list((failing / "temporary").iterdir())


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_worker_that_the_agent_ends_is_not_the_one_that_failed(order, capfd, tmp_path):
    failures = {
        0: ProcessFailure(0, 10, 2, str(tmp_path / "none")),
        1: ProcessFailure(1, 11, -signal.SIGTERM, str(tmp_path / "none")),
    }
    failures[0].message = "error: on purpose"
    failures[0].timestamp = failures[1].timestamp + 1
    error = ChildFailedError("worker", {rank: failures[rank] for rank in order})
    assert launch._explain(error) == 2
    assert capfd.readouterr().err == "error: on purpose\n"


@pytest.mark.slow
def test_debug_reaches_workers(failing, capfd):
    assert main(["train", "run.toml", "--workers", "2", "--debug"]) != 0
    assert "Traceback" in capfd.readouterr().err
