"""Sinks that `run.sinks` names: real trackers where they are installed, one's own, and names that are wrong."""

import logging
import math
import sys

import numpy as np
import pytest

from shoestring import run
from shoestring.cli import main
from shoestring.core.errors import ConfigError, ShoestringError
from shoestring.core.feature import Table
from shoestring.report.findings import Picture
from shoestring.report.trackers import TRACKERS, Tracker
from tests.report import own_sinks

SETTINGS = {"run": {"steps": 3, "model": "m:f"}, "optim": {"adamw": {"lr": 1e-3}}}
LOSSES = {1: 3.0, 2: 2.0, 3: math.nan}


def logged(name, folder, losses=None, step=0, opener=None):
    """Open the sink for the run in `folder`, as resumed from `step`, give it the losses, and close it."""
    sink = Tracker(name, opener or TRACKERS[name], folder, folder.name, SETTINGS, step)
    for number, loss in (losses or LOSSES).items():
        sink.write(number, {"loss": loss})
    sink.close()


def test_tensorboard_holds_each_value_and_hides_repeated_steps(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logged("tensorboard", tmp_path, {1: 3.0, 2: 2.0, 3: 9.0})
    logged("tensorboard", tmp_path, {3: 1.0}, step=2)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 3.0), (2, 2.0), (3, 1.0)]


def test_wandb_offline_keeps_a_run_on_this_machine_and_a_resume_continues_it(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    logged("wandb", tmp_path)
    logged("wandb", tmp_path, {3: 1.0}, step=2)
    files = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len({path.name for path in files}) == 1 and files  # one identity in both starts
    assert any(b"loss" in path.read_bytes() for path in files)


def test_trackio_keeps_every_step_and_a_resume_continues_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    trackio = pytest.importorskip("trackio")
    logged("trackio", tmp_path)
    logged("trackio", tmp_path, {4: 1.0}, step=3)
    from trackio.sqlite_storage import SQLiteStorage

    (found,) = trackio.Api().runs("shoestring")
    values = SQLiteStorage.get_metric_values("shoestring", found.name, "loss")
    assert [row["step"] for row in values] == [1, 2, 3, 4]


FINDINGS = {
    "grid": Picture(pixels=np.arange(12, dtype=np.uint8).reshape(3, 4), caption="twelve"),
    "ranks": Table(title="Ranks", head=("name|", "rank"), rows=(("a\nb", 1.5), ("c", 2))),
}


def shown(name, folder):
    sink = Tracker(name, TRACKERS[name], folder, folder.name, SETTINGS, 0)
    sink.show(2, FINDINGS)
    sink.write(3, {"loss": 1.0})  # a sink that had failed would drop it
    assert sink._sink is not None
    sink.close()


def test_tensorboard_holds_pictures_and_tables(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown("tensorboard", tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (image,) = events.Images("grid")
    assert (image.step, image.width, image.height) == (2, 4, 3) and image.encoded_image_string.startswith(b"\x89PNG")
    (text,) = events.Tensors("ranks/text_summary")
    assert text.tensor_proto.string_val[0].decode().splitlines()[2] == "| a b | 1.5 |"


@pytest.mark.parametrize(("name", "kind"), [("wandb", "*.table.json"), ("trackio", "*.png")])
def test_other_trackers_hold_pictures_and_tables(tmp_path, monkeypatch, name, kind):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    pytest.importorskip(name)
    shown(name, tmp_path)
    assert list(tmp_path.rglob(kind)) and list(tmp_path.rglob("*.png"))


def test_sinks_that_take_no_pictures_go_on(tmp_path):
    sink = Tracker("own", own_sinks.Rows, tmp_path, "", SETTINGS, 0)
    sink.show(1, FINDINGS)
    assert sink._sink is not None


def test_mlflow_keeps_metrics_and_settings_in_a_file_of_the_run(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    pytest.importorskip("alembic")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    from mlflow import MlflowClient

    logged("mlflow", tmp_path)
    logged("mlflow", tmp_path, {4: 1.0}, step=3)
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    (found,) = client.search_runs([client.get_experiment_by_name("shoestring").experiment_id])
    history = client.get_metric_history(found.info.run_id, "loss")
    assert [(metric.step, metric.value) for metric in history if metric.step != 3] == [(1, 3.0), (2, 2.0), (4, 1.0)]
    assert found.data.params["optim.adamw.lr"] == "0.001" and found.info.status == "FINISHED"


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_package_is_named_with_the_extra_to_install(name, tmp_path, monkeypatch):
    for module in ("torch.utils.tensorboard", "wandb", "trackio", "mlflow", "shoestring_hub.client.sink"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ShoestringError) as error:
        logged(name, tmp_path)
    assert f'pip install "shoestring[{name}]"' in error.value.hint


@pytest.mark.parametrize(
    ("name", "said", "hint"),
    [
        ("tensorbord", "there is no sink `tensorbord`", "did you mean `tensorboard`?"),
        ("neptune", "there is no sink `neptune`", "`package.module:callable`"),
    ],
)
def test_an_unknown_sink_is_refused_before_anything_starts(name, said, hint):
    with pytest.raises(ConfigError, match=said) as error:
        run.load("quickstart", ["--sinks", f'["{name}"]'])
    assert hint in error.value.hint


def test_a_sink_named_twice_is_refused():
    with pytest.raises(ConfigError, match="`wandb` twice"):
        run.load("quickstart", ["--sinks", '["wandb", "wandb"]'])


@pytest.mark.slow
def test_a_run_writes_to_a_sink_of_ones_own(tmp_path):
    (tmp_path / "text.txt").write_text("words of a small corpus\n" * 3000)
    (tmp_path / "run.toml").write_text(
        f'[run]\ndata = "{tmp_path}/text.txt"\nsteps = 3\nbatch = 2\nsinks = ["tests.report.own_sinks:Rows"]\n'
        "[model]\ndim = 16\nlayers = 1\nheads = 1\nkv_heads = 1\nhidden = 32\n[data]\nvocabulary = 260\nsequence = 16\n"
    )
    assert main(["train", str(tmp_path / "run.toml"), "--folder", str(tmp_path / "out")]) == 0
    lines = (tmp_path / "out" / "own.txt").read_text().splitlines()
    assert lines[0] == "out 3" and lines[-1] == "closed"
    assert [line.split(",")[0] for line in lines[1:4]] == [f'{{"step": {step}' for step in (1, 2, 3)]


def test_a_sink_that_fails_does_not_end_the_run(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "shoestring")
    logged("own:Breaks", tmp_path, {1: 3.0, 2: 2.0, 3: 1.0, 4: 0.5}, opener=own_sinks.Breaks)
    (said,) = caplog.messages
    assert said == "sink `own:Breaks` failed at step 3 and gets no more metrics: ConnectionError: the server is gone"
    lines = (tmp_path / "own.txt").read_text().splitlines()
    assert len(lines) == 4 and lines[-1] == "closed"


@pytest.mark.parametrize(
    ("opener", "said"),
    [
        (own_sinks.refuses, "cannot open `own`: PermissionError: no key"),
        (own_sinks.nothing, "without a method `write`"),
    ],
)
def test_a_sink_that_cannot_be_opened_is_an_error(opener, said, tmp_path):
    with pytest.raises(ShoestringError, match=said):
        logged("own", tmp_path, opener=opener)
