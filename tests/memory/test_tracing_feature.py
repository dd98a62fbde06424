"""Tracing as a feature of training, its verbs, its page and its exports."""

import json
import pickle
from pathlib import Path

import pytest
import torch

import shoestring as ss
from shoestring import figures
from shoestring.cli import main
from shoestring.core.errors import ConfigError
from shoestring.core.job import attachments_of
from shoestring.memory import Tracing, load, traced
from shoestring.memory.tracing import page
from shoestring.memory.tracing.comparison import compare
from shoestring.memory.tracing.memory_viz import snapshot
from shoestring.testing import FeatureSuite
from shoestring.testing.fork_server import ForkedProcess, run_command
from shoestring.testing.held_resources import fresh_garbage
from tests.browser import Browser, needs_chromium
from tests.memory.observed import needs_compiler
from tests.small_runs import write_run_file, write_texts

pytestmark = needs_compiler
MIB = 2**20


@pytest.fixture(autouse=True)
def alone():
    """Models that earlier tests left are not looked at: they would be parameters of this process, too."""
    with fresh_garbage():
        yield


@pytest.mark.slow
class TestTracing(FeatureSuite):
    """It records within the runs that are compared."""

    tolerance = 0.0

    @pytest.fixture
    def feature(self, tmp_path):
        return Tracing(after=1, steps=3, folder=str(tmp_path / "memory"))


def run(tmp_path, folder="run", **run_settings):
    tables = {
        "run": {"steps": 3, "data": write_texts(tmp_path / "texts"), "folder": str(tmp_path / folder), **run_settings},
        "memory": {"tracing": {}},
        "optim": {"adamw": {"lr": 1e-3}},
    }
    arguments = ["train", str(write_run_file(tmp_path / "run.toml", tables))]
    assert ForkedProcess(run_command, arguments).join(120) == 0  # of its own: no other model is in it


@pytest.mark.slow
def test_a_run_leaves_its_peak_in_its_report_and_compare_says_what_changed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run(tmp_path)
    profile = load("run/memory.npz")
    window = profile.main
    kinds = window.by_kind()
    assert {"parameter", "optimizer state", "activation"} <= set(kinds)
    assert kinds["optimizer state"] > 2 * kinds["parameter"]
    assert kinds.get("unnamed", 0) < 0.02 * window.peak
    assert [each.steps for each in profile.facts.steps["cpu"]][:3] == [1, 1, 1]
    summary = json.loads(Path("run/summary.json").read_text())
    tables = [row for row in summary["report_items"] if row["feature"] == "memory.tracing"]
    assert [table["title"] for table in tables] == ["Memory at the peak", "Largest tensors at the peak"]
    assert sum(row[2] for row in tables[0]["rows"]) == window.peak
    assert '<a href="memory.html">memory.html</a>' in Path("run/report.html").read_text()
    run(tmp_path, "wide", batch=12)
    capsys.readouterr()
    assert main(["compare", "run", "wide"]) == 0
    said = capsys.readouterr().out
    assert "Memory of wide against run" in said and "activation · " in said
    assert main(["memory", "view", "wide"]) == 0
    assert "at the peak" in capsys.readouterr().out
    assert main(["memory", "export", "wide"]) == 0
    assert Path("wide/memory.pickle").is_file()


def test_settings_that_are_none_are_refused():
    job = ss.Job(torch.nn.Linear(4, 1))
    with pytest.raises(ConfigError, match=r"memory\.tracing\.steps"):
        Tracing(steps=-1).check(attachments_of(job))


def test_training_goes_on_where_another_recording_runs(tmp_path, caplog):
    net = torch.nn.Linear(4, 1)
    with traced():
        job = ss.Job(net, loss=lambda output, batch: (output.sum(), torch.tensor(4.0)), forward=lambda m, b: m(b))
        with ss.compose(job, [Tracing(folder=str(tmp_path))]):
            job.step(torch.ones(4, 4))
    assert "nothing is recorded" in caplog.text
    assert not list(tmp_path.iterdir())


def trained(extra=0):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    held = []

    def forward(x):
        held.append(torch.zeros(extra)) if extra else None
        return torch.relu(x)

    model[1].forward = forward
    optimizer = torch.optim.AdamW(model.parameters())
    with traced() as memory:
        for _ in range(2):
            model(torch.ones(128, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return memory.profile


def test_a_planted_tensor_is_the_first_of_the_changes():
    before, after = trained(), trained(extra=MIB // 4)
    comparison = compare(before, after)
    assert comparison.after - comparison.at == sum(each.nbytes for each in comparison.changes)
    first = comparison.changes[0]
    assert (first.name.kind, first.name.name) == ("activation", "1")
    assert first.nbytes == MIB * first.tensors and first.tensors in (1, 2)
    assert figures.memory(first.nbytes, sign=True) in "\n".join(comparison.lines())
    assert not compare(before, trained()).changes


def test_the_export_is_what_torchs_own_tools_read():
    profile = trained()
    viz = pytest.importorskip("torch.cuda._memory_viz")
    content = pickle.loads(snapshot(profile))  # noqa: S301  (written here)
    assert viz.segsum(content)
    assert "MEM[" in viz.trace(content)
    alive = {}
    highest = 0
    for event in content["device_traces"][0]:
        if event["action"] == "alloc":
            alive[event["addr"]] = event["size"]
        else:
            del alive[event["addr"]]
        highest = max(highest, sum(alive.values()))
    assert highest == profile.main.peak


def test_the_page_has_every_tensor(tmp_path):
    profile = trained()
    path = page.write(profile, tmp_path / "memory.html")
    text = path.read_text()
    for held in profile.main.held():
        assert held.name.name in text


@pytest.mark.slow
@needs_chromium
def test_the_page_is_read_with_keys(tmp_path):
    path = page.write(trained(), tmp_path / "memory.html")
    with Browser() as browser:
        browser.open(path.as_uri())
        assert browser.value("document.querySelectorAll('.stack polygon').length") >= 4
        browser.value(
            "document.querySelector('.stack').dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight'}))"
        )
        assert "parameter" in browser.value("document.querySelector('.moment').textContent")
        assert not browser.problems
