"""Every step that a run resumes after has its row in metrics.jsonl, once, wherever the run was killed."""

import json
import os
import signal
import sys

import pytest
import torch

from shoestring.checkpoint.attached import addresses
from shoestring.checkpoint.tiers import tiered
from shoestring.cli import main
from shoestring.core.job import Job, attachments_of
from shoestring.core.world import World
from shoestring.report.sinks import JsonLines
from shoestring.testing.fork_server import ForkedProcess
from shoestring.training.newest_rows import MetricsRow, NewestRows
from shoestring.training.throughput import Meter
from tests.small_runs import write_run_file

STEPS, KILLED = 6, 4
CHECKPOINTS = {
    "plain": lambda folder: {"plain": {"every": 1}},
    "memory": lambda folder: {"tiered": {"memory_every": 1, "disk_every": 0, "memory_folder": f"{folder}/memory"}},
}


def train(folder):
    sys.exit(main(["train", f"{folder}/run.toml"]))


def train_and_die(folder, late):
    """Train, and be killed once step 4 is saved and before its row is written."""
    checkpointers, step, begin, built = [], Meter.step, tiered.Checkpointer.begin, Job.__init__

    def begun(checkpointer, *given):
        checkpointers.append(checkpointer)
        begin(checkpointer, *given)

    def deferring(job, *arguments, **settings):
        built(job, *arguments, **settings)
        attachments_of(job).defers = late  # as on an accelerator

    def killed(meter, loss):
        if meter.job.progress.step == KILLED:
            for checkpointer in checkpointers:
                checkpointer.drain()
            os.kill(os.getpid(), signal.SIGKILL)
        step(meter, loss)

    tiered.Checkpointer.begin, Meter.step, Job.__init__ = begun, killed, deferring
    train(folder)


def ended(work, *arguments):
    """The exit code of a process that does some work."""
    return ForkedProcess(work, arguments).join(120)


def rows(folder):
    return [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def prepared(tmp_path):
    def prepare(name, level):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "text.txt").write_text("words of a small corpus\n" * 3000)
        run = {"data": f"{folder}/text.txt", "steps": STEPS, "folder": f"{folder}/out", "resume": "auto"}
        write_run_file(folder / "run.toml", {"run": run, "checkpoint": CHECKPOINTS[level](folder)})
        return folder

    return prepare


@pytest.mark.parametrize(
    ("saves", "late"),
    [("memory", False), ("plain", True), ("plain", False), ("memory", True)],
)
@pytest.mark.slow
@pytest.mark.share(2)
def test_a_kill_between_a_checkpoint_and_the_rows_of_its_step_loses_no_row(prepared, saves, late):
    folder, through = prepared("killed", saves), prepared("through", saves)
    assert ended(train_and_die, str(folder), late) == -signal.SIGKILL
    assert [row["step"] for row in rows(folder)] == list(range(1, KILLED - late))
    with (folder / "out/metrics.jsonl").open("a") as file:  # of a step after the checkpoint, and one that is cut short
        file.write('{"step": 5, "loss": 1.0}\n{"step": 6, "lo')
    assert ended(train, str(folder)) == ended(train, str(through)) == 0
    found, expected = ([row for row in rows(each) if "loss" in row] for each in (folder, through))
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))
    assert [(row["loss"], row["lr"]) for row in found] == [(row["loss"], row["lr"]) for row in expected]
    assert all(row.keys() == expected[0].keys() and row["time"] > 1e9 for row in found)


def newest(rows):
    """What a run resumes with, of which a checkpoint held these rows."""
    found = NewestRows(Job(torch.nn.Linear(1, 1), world=World()))
    found.load_state_dict({"rows": [{"step": step, "values": values, "unread": []} for step, values in rows]})
    return found


def test_a_row_that_the_file_has_is_not_written_again(tmp_path):
    file = JsonLines(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3):
        file.write(step, {"loss": float(step)})
    file.write(3, {"held_out_loss": 3.0})
    newest([(3, {"loss": 3.0, "time": 5.0}), (4, {"loss": 4.0, "time": 6.0})]).write_missing(file)
    file.close()
    written = [json.loads(line) for line in file.path.read_text().splitlines()]
    assert [row["step"] for row in written] == [1, 2, 3, 3, 4]
    assert written[-1] == {"step": 4, "time": 6.0, "loss": 4.0}


@pytest.mark.parametrize("state", [{}, {"rows": 3}, {"rows": [{"step": 1}]}, {"rows": [{"step": "x", "values": {}}]}])
def test_rows_of_another_form_keep_no_run_from_resuming(state):
    found = newest([])
    found.load_state_dict(state)
    assert found.restored == []


def test_on_an_accelerator_numbers_are_saved_without_being_read():
    found = newest([])
    attachments_of(found.job).defers = True
    found.unwritten = lambda: [
        MetricsRow(4, {"loss": torch.tensor(0.5), "lr": 0.1}),
        MetricsRow(5, {"loss": torch.tensor(0.25)}),
    ]
    state = found.state_dict()
    assert state["unread"] is found.unread and state["unread"].tolist() == [0.5, 0.25]
    assert addresses([found]) == {state["unread"].untyped_storage().data_ptr()}  # copied beside the next step
    again = newest([])
    again.load_state_dict(state)
    assert [(row.step, row.values["loss"]) for row in again.restored] == [(4, 0.5), (5, 0.25)]
