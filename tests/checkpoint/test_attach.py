"""The checkpoint cache in somebody else's program."""

import os
import subprocess
import sys
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import torch
from foreign import Counter
from torch import nn
from torch.optim import SGD

from shoestring import checkpoint
from shoestring.checkpoint.attached import addresses
from shoestring.checkpoint.tiers.disk import manifests
from shoestring.core.compose import compose
from shoestring.core.errors import CheckpointError, ConfigError
from shoestring.core.job import Job, attachments_of
from shoestring.core.world import World
from shoestring.testing import jobs
from tests.waiting import until

SCRIPT = Path(__file__).parent / "foreign.py"


def ends(folder, die_at):
    """What each rank says at the end: where it began, its loader, learning rate, weights, next random number."""
    folder.mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2"]
    local = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    agent = ["--monitor-interval", "0.1", "--log-dir", str(folder / "agent")]
    command = [*torchrun, *local, *agent, str(SCRIPT), str(folder), "12", str(die_at)]
    path = os.pathsep.join(filter(None, sys.path))
    # Otherwise torchrun gives ranks that it starts again the store of the dead, and torch's first group may hang in it.
    env = os.environ | {"PYTHONPATH": path, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return [(folder / f"end-{rank}").read_text().split() for rank in range(2)]


@pytest.mark.slow
def test_a_foreign_script_that_dies_resumes_bitwise(tmp_path):
    through, struck = ends(tmp_path / "through", -1), ends(tmp_path / "struck", 9)
    assert [end[0] for end in through] == ["0", "0"] and struck[0][0] == struck[1][0] != "0"
    assert int(struck[0][0]) >= 6  # saved every other step, to memory
    assert [end[1:] for end in struck] == [end[1:] for end in through]


def test_one_process_and_no_optimizer_hook(tmp_path):
    """State without an optimizer that could be watched: the copy is waited for at once."""
    model = nn.Linear(3, 3)
    nn.init.zeros_(model.weight)
    settings = checkpoint.Tiered(folder=str(tmp_path / "saves"), memory_folder=str(tmp_path / "memory"), memory_every=1)
    with checkpoint.attach({"model": model}, settings=settings) as saves:
        assert saves.restore() == 0
        for _ in range(4):
            with torch.no_grad():
                model.weight += 1
            saves.step()
        saves.checkpointer.drain()
    other = nn.Linear(3, 3)
    with checkpoint.attach({"model": other}, settings=settings) as saves:
        step = saves.restore()  # not always 4: a step that comes while the one before is being sealed is left out
        assert step >= 1 and torch.equal(other.weight, torch.full((3, 3), float(step)))
        saves.step(last=True)
    assert not list((tmp_path / "memory").rglob("*.seal"))


def test_a_checkpoint_counts_the_tokens_of_a_step_whose_numbers_are_not_read_yet(tmp_path):
    """As on a GPU, where they are read after the next step: they are copied beside it, like weights."""
    settings = checkpoint.Tiered(folder=str(tmp_path / "saves"), memory_folder=str(tmp_path / "memory"), memory_every=3)

    def start(steps):
        job = compose(Job(jobs.tiny(), optimizer=partial(SGD, lr=0.1), world=World()), [settings])
        with closing(job):  # which saves nothing more
            attachments_of(job).defers = True
            began = job.restore("auto")
            for number in range(steps):
                job.step(jobs.batch(number))
            unread = job.progress.unread
            assert unread is None or unread.data_ptr() in addresses([job.progress])
            return began, job.progress.tokens

    each = jobs.BATCH * jobs.SEQUENCE
    assert start(3) == (None, 2 * each)
    assert start(0) == (3, 3 * each)


def test_what_a_rank_has_for_itself_resumes_where_it_was(tmp_path):
    """The position of a loader, and the random numbers that come next."""
    settings = checkpoint.Tiered(folder=str(tmp_path / "saves"), memory_folder=str(tmp_path / "memory"), memory_every=2)

    def start(steps):
        loader = Counter()
        with checkpoint.attach({"model": nn.Linear(3, 3)}, own={"loader": loader}, settings=settings) as saves:
            began = saves.restore()
            first = (began, loader.at, torch.rand(1).item())
            for _ in range(steps):
                loader.at += 7
                drawn = torch.rand(1).item()
                saves.step()
            saves.checkpointer.drain()
            return first, drawn if steps else None

    torch.manual_seed(1)
    through, _ = start(2)  # draws three numbers; the checkpoint is after the third
    expected = torch.rand(1).item()
    assert through[:2] == (0, 0)
    torch.manual_seed(2)
    assert start(0)[0] == (2, 14, expected)


def test_what_failures_took_is_added_up_over_all_starts(tmp_path, monkeypatch):
    """From when the step was saved that it resumed from; an end that was asked for is no failure."""
    clock = [1000.0]
    monkeypatch.setattr("time.time", lambda: clock[0])
    settings = checkpoint.Tiered(folder=str(tmp_path / "saves"), memory_folder=str(tmp_path / "memory"), memory_every=1)

    def start(steps, last=False):
        with checkpoint.attach({"model": nn.Linear(3, 3)}, settings=settings) as saves:
            saves.restore()
            for step in range(steps):
                saves.step(last=last and step == steps - 1)
                saves.checkpointer.drain()
            return saves.checkpointer.facts()["checkpoint_failures"], saves.checkpointer.facts()["checkpoint_lost"]

    assert start(3) == (0, 0)
    clock[0] += 100
    assert start(0) == (1, 100)
    clock[0] += 20  # again, before anything else was saved
    assert start(2) == (1, 120)
    clock[0] += 30
    assert start(1, last=True) == (2, 150)
    clock[0] += 500
    assert start(0) == (2, 150)


def test_a_loop_that_ends_right_after_a_checkpoint_saves_it_once(tmp_path):
    """Nobody knew that this step would be the last one; the checkpoint on disk says so afterwards."""
    folder = tmp_path / "checkpoints"
    every = {"memory_every": 1, "disk_every": 3, "folder": str(folder), "memory_folder": str(tmp_path / "memory")}

    def job():
        return compose(Job(jobs.tiny(), optimizer=jobs.sgd(), world=World()), [checkpoint.Tiered(**every)])

    with job() as first:
        for number in range(3):
            first.step(jobs.batch(number, 0, 1))
        until(lambda: [*folder.glob("step-00000003-*/manifest.json")])
    ((_, record),) = manifests(folder)
    assert record.checkpoint.step == 3 and record.notes["last"]
    assert not [path for path in (tmp_path / "memory").rglob("*") if path.is_file()]
    with closing(job()) as again:
        assert again.restore("auto") == 3


def attached(tmp_path, state, **settings):
    given = {
        "folder": str(tmp_path / "saves"),
        "memory_folder": str(tmp_path / "memory"),
        "memory_every": 0,
        "disk_every": 0,
    }
    return checkpoint.attach(state, settings=checkpoint.Tiered(**given | settings))


def test_a_state_that_was_renamed_is_told_of(tmp_path, caplog):
    with attached(tmp_path, {"model": nn.Linear(3, 3), "other": nn.Linear(1, 1)}) as saves:
        saves.step(last=True)
    with attached(tmp_path, {"net": nn.Linear(3, 3), "other": nn.Linear(1, 1)}) as saves:
        assert saves.restore() == 1
    place = f"step 1 of `{tmp_path / 'saves'}`"
    assert caplog.messages == [
        f"{place} holds no `net`, which starts afresh",
        f"{place} holds `model`, which this run does not load",
    ]


@pytest.mark.parametrize(("state", "said"), [
    ({"model": nn.Linear(3, 3).state_dict()}, r"`model` in `state` is a OrderedDict, without `state_dict`"),
    (nn.Linear(3, 3), r"`state` must be a mapping, got a Linear \(hint: pass {\"model\": model}\)"),
])  # fmt: skip
def test_what_is_no_state_is_refused_at_once(tmp_path, state, said):
    with pytest.raises(ConfigError, match=said):
        attached(tmp_path, state)


@pytest.mark.parametrize(("settings", "said"), [
    (checkpoint.Tiered(redundancy="none"), r"`checkpoint.tiered.redundancy` cannot be 'none'"),
    (checkpoint.Tiered(keep=2.5), r"`checkpoint.tiered.keep` must be a whole number, at least 1, got 2.5"),
    (checkpoint.Tiered(differences_on="disk"), r"no differences are kept"),
    (checkpoint.Plain(), r"`settings` must be a checkpoint.Tiered, got a Plain"),
])  # fmt: skip
def test_settings_that_are_none_are_refused_at_once(settings, said):
    with pytest.raises(ConfigError, match=said):
        checkpoint.attach({"model": nn.Linear(3, 3)}, settings=settings)


def test_a_step_after_the_end_is_refused(tmp_path):
    with attached(tmp_path, {"model": nn.Linear(3, 3)}) as saves:
        saves.step()
    with pytest.raises(CheckpointError, match="the checkpoints are closed"):
        saves.step(last=True)
