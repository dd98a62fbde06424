"""Every recipe at toy size: a killed run resumes bit by bit, and two ranks train it, beside features of four areas."""

import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import tomli_w
import torch
from safetensors.torch import load_file

from shoestring import recipes
from tests.recipes.toys import MODULES
from tests.waiting import until

STEPS, BATCH, LONG = 6, 4, 40
"""Steps of a run, samples of a step, and steps of a run that is killed on its way."""
TOY = {
    "annotation": {"data": {"arguments": {"images": 300, "held_out": 16}}},
    "faces": {"data": {"arguments": {"views": 2, "held_views": 8}}},
    "federated": {"data": {"arguments": {"most": 8}}, "comm": {"fedavg": {"every": 3, "private": ["style.*"]}}},
    "generation": {"data": {"arguments": {"held_out": 16}}},
    "lanes": {"data": {"arguments": {"pictures": 8, "held_out": 8}}},
    "quality": {"data": {"arguments": {"crops_each": 1}}},
    "reply": {
        "data": {"arguments": {"every": 40, "modules": MODULES}},
        "model": {"frozen": "", "dimensions": 16, "width": 8},  # no package with a pretrained encoder is needed
    },
    "retrieval": {
        "data": {"arguments": {"headwords": 300, "documents": 40, "queries": 20, "validation": 20, "negatives": 1}},
        "model": {"dimensions": 16},
    },
}
"""What makes each recipe small enough to be trained for a few steps in seconds, besides steps and batch."""
AREAS = {
    "comm": {"powersgd": {"rank": 2}},
    "checkpoint": {"plain": {"every": 2}},
    "precision": {"autocast": {"dtype": "bf16"}},
    "profile": {"callpaths": {"start": 2, "steps": 2}},
}


def written(name: str, folder: Path, **areas) -> Path:
    """The run file of a recipe at toy size, in `folder`, with some areas' features in the place of its own; an area on
    which the recipe rests stays as it is."""
    document = tomllib.loads(recipes.find()[name].file.read_text())
    areas = {area: features for area, features in areas.items() if area not in TOY[name]}
    small = {"steps": STEPS, "batch": BATCH, "evaluate_every": 0, "evaluate_samples": 8, "folder": str(folder / "run")}
    document["run"] |= small | {"deterministic": True}
    for table, values in {**TOY[name], **areas}.items():
        document[table] = document.get(table, {}) | values if table in TOY[name] else values
    if "schedule" in document.get("optim", {}):
        document["optim"]["schedule"]["warmup"] = 1
    folder.mkdir()
    path = folder / "run.toml"
    path.write_text(tomli_w.dumps(document))
    return path


def started(file: Path, *flags: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "shoestring", "train", str(file), *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finished(file: Path, *flags: str) -> dict[str, torch.Tensor]:
    """Train to the end; the weights of the model."""
    program = started(file, *flags)
    said, _ = program.communicate(timeout=300)
    assert program.returncode == 0, said
    (weights,) = (file.parent / "run" / "model").glob("*.safetensors")
    return load_file(weights)


def losses(folder: Path) -> list[float]:
    rows = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.slow
@pytest.mark.share(4)
@pytest.mark.parametrize("name", TOY)
def test_a_killed_run_resumes_bit_by_bit(name, tmp_path):
    checkpoint, flags = {"checkpoint": {"plain": {"every": 2}}}, ("--steps", str(LONG))
    whole = finished(written(name, tmp_path / "whole", **checkpoint), *flags)
    file = written(name, tmp_path / "killed", **checkpoint)
    program, saved = started(file, *flags), file.parent / "run" / "checkpoints"
    try:
        until(lambda: program.poll() is not None or any(saved.glob("step-*.safetensors")), 200)
    finally:
        alive = program.poll() is None
        os.kill(program.pid, signal.SIGKILL)
        said, _ = program.communicate()
    assert alive, said
    resumed = finished(file, *flags, "--resume", "true")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


@pytest.mark.slow
@pytest.mark.share(6)
@pytest.mark.parametrize("name", TOY)
def test_two_ranks_train_beside_four_areas(name, tmp_path):
    finished(written(name, tmp_path / "two", **AREAS), "--workers", "2")
    assert len(losses(tmp_path / "two")) > 0 and torch.tensor(losses(tmp_path / "two")).isfinite().all()
    assert (tmp_path / "two" / "run" / "report.html").is_file()
