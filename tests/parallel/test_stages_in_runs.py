"""Pipelines as a user runs them: by a run file, on local ranks and on hosts of which one is lost."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from shoestring.models.loading import load_model
from shoestring.testing.netlab import netlab, netlab_available
from tests.rigs.lab_run import LabRun, difference, killed, replaced
from tests.small_runs import write_run_file, write_texts

pytestmark = pytest.mark.slow


def command(*words, code=0):
    done = subprocess.run([sys.executable, "-m", "shoestring", *map(str, words)], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipeline")
    tables = {
        "run": {"data": write_texts(folder / "texts"), "steps": 6, "accumulate": 2, "evaluate_every": 3},
        "model": {"layers": 3},
        "optim": {"adamw": {"lr": 1e-2}, "clip": {"max_norm": 0.1}},
        "checkpoint": {"tiered": {"disk_every": 2}},
    }
    write_run_file(folder / "one.toml", tables)
    write_run_file(folder / "two.toml", tables | {"parallel": {"pipeline": {}}})
    command("train", folder / "one.toml", "--run.folder", folder / "one", "--workers", 1)
    command("train", folder / "two.toml", "--run.folder", folder / "two", "--workers", 2)
    return folder


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def exported(folder):
    (weights,) = (folder / "model").glob("*.safetensors")
    return load_file(weights)


def same_weights(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.allclose(tensor, other[name], atol=1e-4), name


def test_losses_and_the_exported_model_are_those_of_one_process(place):
    for key in ("loss", "held_out_loss"):
        one, two = ([row[key] for row in rows(place / name) if key in row] for name in ("one", "two"))
        assert one and one == pytest.approx(two, rel=1e-4)
    same_weights(exported(place / "one"), exported(place / "two"))
    assert load_model(place / "two") is not None


def test_the_report_tells_what_was_sent(place):
    page = (place / "two" / "report.html").read_text()
    assert "bytes a step that the first rank sends" in page and "the first stage waited" in page


def test_check_shows_the_stages_and_refuses_what_training_would(place):
    told = command("check", place / "two.toml", "--workers", 2)
    assert "2 stages of 2, 1 blocks" in told and "because parallel.pipeline splits the model" in told
    assert "divides neither" in command(
        "check", place / "two.toml", "--parallel.pipeline.stages", 3, "--workers", 2, code=2
    )
    told = command("check", place / "two.toml", "--memory.budget.gib", 1, "--workers", 2, code=2)
    assert "cannot choose for `parallel.pipeline`" in told


def test_one_process_goes_on_where_a_pipeline_has_stopped(place, tmp_path):
    folder = tmp_path / "run"
    command("train", place / "two.toml", "--run.folder", folder, "--run.steps", 4, "--workers", 2)
    flags = ("--run.folder", folder, "--run.resume", "auto", "--workers", 1)
    command("train", place / "one.toml", *flags)
    same_weights(exported(folder), exported(place / "one"))


@pytest.mark.skipif(bool(netlab_available()), reason=netlab_available() or "")
@pytest.mark.parametrize("scenario", [killed, pytest.param(replaced, marks=pytest.mark.all_cases)])
def test_a_stage_that_is_lost_is_replaced(tmp_path, scenario):
    lab_run = LabRun.prepare(tmp_path, pipeline=True)
    expected = lab_run.local("local")
    with netlab(hosts=2, rate="100mbit", shared=lab_run.shared) as lab:
        scenario(lab, lab_run, "struck")
    assert difference(expected, lab_run.losses("struck")) <= 1e-6
