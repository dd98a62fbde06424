"""Real runs of two workers that are told to end, or lose a worker, and continue."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import ranks
import scenarios

from tests.waiting import until

RUN = """
[run]
model = "toy:mortal"
data = "toy:samples"
loss = "toy:recorded"
steps = {steps}
batch = 8
folder = "out"
resume = "auto"
[model]
marker = "marker"
[optim.adamw]
lr = 0.01
[checkpoint.plain]
every = {every}
"""


def rows(folder):
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def train(here, *flags):
    command = [sys.executable, "-m", "shoestring", "train", "run.toml", "--workers", "2", *flags]
    return subprocess.Popen(
        command, env=ranks.environment(), cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ended(process, timeout=120):
    try:
        return process.communicate(timeout=timeout)[1]
    finally:
        process.terminate()  # on which the agent ends its workers
        process.wait()


@pytest.mark.parametrize("number", [
    pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
    pytest.param(signal.SIGINT, marks=[pytest.mark.slow, pytest.mark.all_cases]),
    pytest.param(signal.SIGUSR1, marks=pytest.mark.slow),
], ids=lambda number: number.name)  # fmt: skip
def test_a_signal_ends_after_the_step_and_resume_continues(tmp_path, number):
    (tmp_path / "marker").touch()
    (tmp_path / "run.toml").write_text(RUN.format(steps=10**6, every=0))
    process = train(tmp_path)
    until(lambda: process.poll() is not None or len(rows(tmp_path / "out")) >= 5)
    process.send_signal(number)
    said = ended(process)
    assert process.returncode == 130, said
    done = rows(tmp_path / "out")[-1]["step"]
    (save,) = (tmp_path / "out" / "checkpoints").iterdir()
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert save.name == f"step-{done:08d}.safetensors"
    assert (summary["status"], summary["steps"]) == ("stopped", done)
    assert (tmp_path / "out" / "report.html").exists() and "Traceback" not in said
    if number == signal.SIGTERM:
        process = train(tmp_path, "--run.steps", str(done + 3))
        said = ended(process)
        assert process.returncode == 0, said
        assert f"resumed from step {done}" in said
        assert [row["step"] for row in rows(tmp_path / "out")] == list(range(1, done + 4))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_ends_all_with_the_same_exit_code(tmp_path, rank):
    (tmp_path / "marker").touch()
    (tmp_path / "run.toml").write_text(RUN.format(steps=10**6, every=0))
    process = train(tmp_path)
    until(lambda: process.poll() is not None or len(rows(tmp_path / "out")) >= 5)
    os.kill(worker_of(process, rank), signal.SIGTERM)
    said = ended(process)
    assert process.returncode == 130, said
    (save,) = (tmp_path / "out" / "checkpoints").iterdir()
    assert save.name == f"step-{rows(tmp_path / 'out')[-1]['step']:08d}.safetensors" and "Traceback" not in said


def worker_of(process, rank):
    """The id of the process that is one rank of a launcher."""
    workers = subprocess.run(
        ["pgrep", "--parent", str(process.pid), "--full", "shoestring train"],
        capture_output=True,
        text=True,
        check=True,
    )
    for worker in workers.stdout.split():
        environment = Path(f"/proc/{worker}/environ").read_bytes().split(b"\0")
        if f"RANK={rank}".encode() in environment:
            return int(worker)
    raise AssertionError(f"no rank {rank} among {workers.stdout.split()}")


CODEC = """
[comm.powersgd]  # its residuals have to come back as well
rank = 2
"""


@pytest.mark.slow
def test_a_killed_worker_is_started_again_and_the_loss_is_that_of_an_undisturbed_run(tmp_path):
    losses = {}
    for name, disturbed in (("quiet", False), ("killed", True)):
        here = tmp_path / name
        here.mkdir()
        (here / "run.toml").write_text(RUN.format(steps=9, every=2) + CODEC)
        if not disturbed:
            (here / "marker").touch()
        process = train(here, "--restarts", "1")
        said = ended(process)
        assert process.returncode == 0, said
        assert (here / "marker").exists()
        assert ("resumed from step 4" in said) == disturbed
        losses[name] = {row["step"]: row["loss"] for row in rows(here / "out")}
        losses[f"{name} save"] = scenarios.digest(here / "out", 9)
    assert losses["killed"] == losses["quiet"] and list(losses["quiet"]) == list(range(1, 10))
    assert losses["killed save"] == losses["quiet save"]
