"""What the report says that memory features saved, against real runs without them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shoestring import memory, optim
from shoestring.core.trace import Trace
from shoestring.core.world import World
from shoestring.run import Run, load
from shoestring.testing.fork_server import ForkedProcess, run_command
from shoestring.training import saved_memory
from tests.memory.observed import needs_compiler
from tests.small_runs import write_run_file, write_texts

pytestmark = needs_compiler
LIMIT = 400  # seconds for what takes twenty
MODEL = {"dim": 64, "layers": 3, "heads": 4, "kv_heads": 2, "hidden": 192}


def train(tmp_path, name, **features):
    """The peak that was traced in a run, and the table of its report."""
    tables = {
        "run": {"steps": 2, "batch": 8, "data": write_texts(tmp_path / "texts"), "folder": str(tmp_path / name)},
        "model": MODEL,
        "data": {"sequence": 64},
        "memory": {"tracing": {}, **features},
    }
    arguments = ["train", str(write_run_file(tmp_path / f"{name}.toml", tables))]
    assert ForkedProcess(run_command, arguments).join(LIMIT) == 0  # of its own: no other model is in it
    items = json.loads((tmp_path / name / "summary.json").read_text())["report_items"]
    window = memory.load(tmp_path / name / "memory.npz").main
    found = [item for item in items if item["feature"] == "memory"]
    return window.peak - window.by_kind().get("unnamed", 0), found


@pytest.mark.slow
def test_what_the_report_says_is_the_difference_to_a_real_run_without_the_feature(tmp_path):
    with_both, (table,) = train(tmp_path, "both", recompute={}, lora={"rank": 4})
    assert table["title"] == "Memory that each feature saved"
    assert table["title"] in Path(tmp_path, "both", "report.html").read_text()
    assert "Tracing measured" in table["note"]
    (_, peak, *_), (name, without, saved, _), other = table["rows"]
    assert peak == pytest.approx(with_both, rel=0.02)
    assert (name, other[0]) == ("without memory.recompute", "without memory.lora")
    measured, _ = train(tmp_path, "lora", lora={"rank": 4})
    assert without == pytest.approx(measured, rel=0.02)
    assert saved == pytest.approx(measured - with_both, rel=0.05)


def prediction(tmp_path, ranks, features, **settings):
    tables = {
        "run": {"steps": 2, "batch": 8, "data": write_texts(tmp_path / "texts"), **settings},
        "model": MODEL,
        "memory": features,
    }
    return saved_memory.predict_savings(load(str(write_run_file(tmp_path / "run.toml", tables))), ranks)


@pytest.mark.slow
def test_a_run_without_a_feature_has_what_takes_its_place(tmp_path):
    saved = prediction(tmp_path, 2, {"zero": {}})
    ddp = prediction(tmp_path, 2, {})
    assert saved.without == {"memory.zero": ddp.peak} and ddp.without == {}
    assert saved.peak < ddp.peak
    table = saved.table(traced=123)
    assert table.rows[1][:3] == ("without memory.zero", ddp.peak, ddp.peak - saved.peak)
    assert "123 bytes" in table.note


def test_a_report_without_predictions_is_written_all_the_same(tmp_path, caplog, monkeypatch):
    caplog.set_level("INFO", "shoestring")
    features = (memory.Recompute(), memory.Tracing(), optim.AdamW())
    assert saved_memory.saving(features) == ["memory.recompute"]
    for executable in ("/bin/false", "/nonexistent"):
        caplog.clear()
        monkeypatch.setattr(saved_memory.sys, "executable", executable)  # a process that fails
        with saved_memory.predicted_savings(Run(name="a", features=features), World()) as savings:
            assert savings(Trace()) == []
        assert "could not be predicted" in caplog.text
    with saved_memory.predicted_savings(Run(name="a", features=features[1:]), World()) as savings:
        assert savings(Trace()) == []


def test_a_run_that_fails_ends_its_prediction(tmp_path):
    features, before = (memory.Recompute(), optim.AdamW()), children()
    with pytest.raises(KeyError), saved_memory.predicted_savings(Run(name="a", features=features), World()):
        (child,) = children() - before
        assert os.getpriority(os.PRIO_PROCESS, child) == 19
        raise KeyError
    assert children() == before


def test_what_the_prediction_forks_ends_with_it(tmp_path, monkeypatch):
    script, forked = tmp_path / "python", tmp_path / "forked"
    script.write_text(f"#!/bin/sh\nsleep 1000 &\necho $! > {forked}.part\nmv {forked}.part {forked}\nwait\n")
    script.chmod(0o700)
    monkeypatch.setattr(saved_memory.sys, "executable", str(script))
    features = (memory.Recompute(), optim.AdamW())
    with pytest.raises(KeyError), saved_memory.predicted_savings(Run(name="a", features=features), World()):
        while not forked.exists():
            os.sched_yield()
        raise KeyError
    state = Path(f"/proc/{int(forked.read_text())}/stat")
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
        os.sched_yield()  # until the kernel has ended it; the limit of a test ends this if it does not


@pytest.mark.slow
def test_a_prediction_ends_with_a_run_that_is_killed():
    command = [sys.executable, "-m", saved_memory.__name__, "--parent", "1"]  # as if its parent had ended
    with subprocess.Popen(command, stdin=subprocess.PIPE, process_group=0) as process:  # it waits for a run file
        assert process.wait() == -signal.SIGKILL


def children():
    """Process numbers of this process's children."""
    return {int(number) for number in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}
