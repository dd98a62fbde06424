"""Profiling as a feature of training: it keeps every promise of features, and leaves a page in the run's folder."""

import json
import logging
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

import shoestring as ss
from shoestring.cli import main
from shoestring.core.errors import ConfigError
from shoestring.profile import CallPaths, load, profiled
from shoestring.testing import FeatureSuite
from tests.small_runs import write_run_file, write_texts

HEADERS = Path(sysconfig.get_path("include"), "Python.h")
pytestmark = pytest.mark.skipif(
    not (shutil.which("c++") and HEADERS.is_file()), reason="needs a C++ compiler and Python's headers"
)


@pytest.mark.slow
class TestCallPaths(FeatureSuite):
    """The window opens and closes within the runs that are compared."""

    tolerance = 0.0

    @pytest.fixture
    def feature(self, tmp_path):
        return CallPaths(after=1, steps=3, folder=str(tmp_path / "profile"))


def test_a_run_shows_its_lines_in_its_report_with_a_link_to_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tables = {
        "run": {"steps": 6, "data": write_texts(tmp_path / "texts"), "folder": "run"},
        "profile": {"callpaths": {"after": 2, "steps": 3}},
    }
    assert main(["train", str(write_run_file(tmp_path / "run.toml", tables))]) == 0
    profile = load("run/profile.npz")
    assert profile.facts.steps == 3
    names = [profile.tree.label(node) for node in range(len(profile.tree))]
    steps = [int(profile.tree.count[node]) for node, name in enumerate(names) if "Optimizer.step" in name]
    assert steps == [3]
    assert any("shoestring/models" in file for file in profile.sources)
    summary = json.loads(Path("run/summary.json").read_text())
    cut = next(row for row in summary["reductions"] if row["feature"] == "profile.callpaths")
    assert 0 <= cut["used"] < cut["without"]  # in so few steps, hardly a sample of Python is taken
    assert "of the time of 3 steps" in cut["cost"]
    table = next(row for row in summary["report_items"] if row["feature"] == "profile.callpaths")
    assert len(table["rows"]) > 3
    report = Path("run/report.html").read_text()
    assert '<a href="profile.html">profile.html</a>' in report
    assert Path("run/profile.html").stat().st_size > 10_000


@pytest.mark.slow
def test_ranks_are_merged_and_keep_their_times(tmp_path):
    tables = {
        "run": {"steps": 6, "data": write_texts(tmp_path / "texts"), "folder": "run"},
        "profile": {"callpaths": {"after": 2, "steps": 0}},
    }
    command = [sys.executable, "-m", "shoestring", "train", write_run_file(tmp_path / "run.toml", tables)]
    subprocess.run([*command, "--workers", "2"], cwd=tmp_path, check=True, timeout=300, capture_output=True)
    profile = load(tmp_path / "run" / "profile.npz")
    assert profile.ranks.labels == ["rank 0", "rank 1"]
    assert (profile.ranks.own.sum(1) > 0).all()
    assert profile.facts.steps == 4
    assert not list((tmp_path / "run").glob("profile-*"))
    assert "rank 1" in (tmp_path / "run" / "profile.html").read_text()


def job(folder, **settings):
    net = torch.nn.Linear(4, 1)
    composed = ss.Job(net, loss=lambda output, batch: (output.sum(), torch.tensor(4.0)), forward=lambda m, b: m(b))
    return ss.compose(composed, [CallPaths(folder=str(folder), **settings)])


def test_what_ends_within_the_window_is_saved(tmp_path):
    with pytest.raises(ZeroDivisionError), job(tmp_path, after=0, steps=0) as training:
        for _ in range(3):
            training.step(torch.ones(4, 4))
        1 / 0  # noqa: B018
    assert load(tmp_path / "profile.npz").facts.steps == 3
    assert (tmp_path / "profile.html").is_file()


def test_a_run_within_another_profile_trains_without_its_own_and_says_so(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "shoestring"), profiled(), job(tmp_path, after=0, steps=1) as training:
        for _ in range(3):
            training.step(torch.ones(4, 4))
    assert "recorded in this process already; nothing is recorded" in caplog.text
    assert not (tmp_path / "profile.npz").exists()


def test_a_full_disk_does_not_end_training(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "shoestring"), job(tmp_path / "file", after=0, steps=1) as training:
        for _ in range(3):
            training.step(torch.ones(4, 4))
    assert "the recording could not be written" in caplog.text


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"steps": -1}, "steps. must not"),
        ({"sample_rate": 0.0}, "sample_rate. must be above 0"),
        ({"max_overhead": 2.0}, "from 0 to 1"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_are_refused(tmp_path, settings, said):
    with pytest.raises(ConfigError, match=rf"`profile.callpaths.*{said}"):
        job(tmp_path, **settings)


def test_a_sampled_window_says_so(tmp_path):
    with job(tmp_path, after=0, steps=0, max_overhead=0.5) as training:
        for _ in range(20):
            training.step(torch.ones(4, 4))
    facts = load(tmp_path / "profile.npz").facts
    assert 0 < facts.share <= 1
    assert facts.steps == 20
