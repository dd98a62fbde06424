"""Plain saves: whole or not at all, bounded in number, the newest good one is found again."""

import os
import subprocess

import pytest
import torch
from torch import nn

from shoestring import checkpoint, optim
from shoestring.cli import main
from shoestring.core.compose import compose
from shoestring.core.errors import CheckpointError, ConfigError
from shoestring.core.job import Job, attachments_of
from shoestring.core.world import World
from shoestring.storage.whole import write_atomic


def made(folder, width=4, **settings):
    torch.manual_seed(0)
    job = Job(nn.Sequential(nn.Linear(width, width)), world=World())
    return compose(job, [optim.AdamW(), checkpoint.Plain(folder=str(folder), **settings)])


def train(job, steps=1):
    width = attachments_of(job).module[0].in_features
    for _ in range(steps):
        job.step((torch.eye(width), torch.arange(width)))
    return job


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def name(step):
    return f"step-{step:08d}.safetensors"


def test_saves_every_so_often_and_keeps_the_newest(tmp_path):
    train(made(tmp_path, every=2, keep=3), 11)
    assert names(tmp_path) == [name(6), name(8), name(10)]


def test_saves_at_the_end_and_when_asked_to_stop(tmp_path):
    job = made(tmp_path)
    job.progress.total = 3
    train(job, 3)
    assert names(tmp_path) == [name(3)]
    job.progress.total = 9
    train(job)
    job.stop()
    train(job)
    assert attachments_of(job).stopping and names(tmp_path) == [name(3), name(5)]


def test_restores_the_newest(tmp_path):
    first = train(made(tmp_path, every=1), 5)
    again = made(tmp_path)
    assert again.restore("auto") == 5
    assert torch.equal(attachments_of(again).module[0].weight, attachments_of(first).module[0].weight)
    assert again.progress == first.progress
    assert torch.equal(attachments_of(train(again)).module[0].weight, attachments_of(train(first)).module[0].weight)


def test_an_empty_folder_is_a_new_start_for_auto_and_an_error_by_name(tmp_path):
    job = made(tmp_path / "nothing")
    assert job.restore("auto") is None
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        job.restore(str(tmp_path))
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        job.restore(str(tmp_path / "missing"))


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "other"])
def test_a_damaged_newest_falls_back_and_does_not_push_out_good_ones(tmp_path, damage, caplog):
    train(made(tmp_path, every=1, keep=1), 3)
    newest = tmp_path / name(3)
    content = newest.read_bytes()
    (tmp_path / name(2)).write_bytes(content)  # a good one of an earlier step
    train(made(tmp_path / "other", every=1, keep=1), 2)
    (tmp_path / name(2)).write_bytes((tmp_path / "other" / name(2)).read_bytes())
    flipped = content[:-5] + bytes([content[-5] ^ 16]) + content[-4:]
    newest.write_bytes({"cut": content[:-7], "flip": flipped, "empty": b"", "other": b"no checkpoint" * 99}[damage])
    job = made(tmp_path, every=1, keep=1)
    assert job.restore("auto") == 2
    assert f"skipping `{newest}`" in caplog.text
    train(job)
    assert [each for each in names(tmp_path) if each != "other"] == [name(3)]
    assert made(tmp_path).restore("auto") == 3


def test_going_back_by_name_abandons_the_later_checkpoints(tmp_path):
    train(made(tmp_path, every=1, keep=9), 4)
    job = made(tmp_path, every=1, keep=9)
    assert job.restore(str(tmp_path / name(2))) == 2
    train(job)
    assert names(tmp_path) == [name(1), name(2), name(3)]


def test_all_damaged_is_an_error(tmp_path):
    for step in (1, 2):
        (tmp_path / name(step)).write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="all 2 are damaged") as refused:
        made(tmp_path).restore("auto")
    assert f"`shoestring checkpoint verify {tmp_path}`" in refused.value.hint
    assert main(["checkpoint", "verify", str(tmp_path)]) == 1


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path):
    train(made(tmp_path, every=1), 1)
    with pytest.raises(
        CheckpointError, match=f"{name(1)}` does not fit this run's model: size mismatch for 0.bias"
    ) as refused:
        made(tmp_path, width=5).restore("auto")
    assert "differs from the checkpoint's" in refused.value.hint and "--run.folder NEW" in refused.value.hint


def test_a_checkpoint_of_another_format_is_refused(tmp_path):
    from shoestring.checkpoint.format.state import pack

    (tmp_path / name(1)).write_bytes(pack({"format": 99}))
    with pytest.raises(CheckpointError, match="has format 99, this version reads 1"):
        made(tmp_path).restore("auto")


def test_leftovers_of_a_killed_write_are_removed_and_never_read(tmp_path):
    (tmp_path / f".{name(9)}.123.tmp").write_bytes(b"half")
    job = made(tmp_path, every=1)
    assert job.restore("auto") is None
    train(job)
    assert names(tmp_path) == [name(1)]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 96 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs root to mount a small tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_an_error_that_leaves_the_last_checkpoint_and_nothing_else(small_disk):
    job = made(small_disk, every=1, keep=2, width=16)
    train(job)
    free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_bsize
    (small_disk / "filler").write_bytes(b"0" * (free - 8192))
    before = names(small_disk)
    with pytest.raises(CheckpointError, match=f"cannot save `.*{name(2)}` .*: No space left on device") as caught:
        train(job)
    assert "earlier checkpoints are intact" in caught.value.hint
    assert names(small_disk) == before == ["filler", name(1)]
    (small_disk / "filler").unlink()
    again = made(small_disk, width=16)
    assert again.restore("auto") == 1


def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    write_atomic(tmp_path / "file", b"old")
    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_atomic(tmp_path / "file", b"new")
    assert names(tmp_path) == ["file"] and (tmp_path / "file").read_bytes() == b"old"


def test_a_write_in_the_middle_of_another_leaves_both_whole(tmp_path):
    """Hosts that share a folder may have processes of the same number."""

    def pieces():
        yield b"first, "
        write_atomic(tmp_path / "file", b"second")
        yield b"whole"

    write_atomic(tmp_path / "file", pieces())
    assert names(tmp_path) == ["file"] and (tmp_path / "file").read_bytes() == b"first, whole"


@pytest.mark.parametrize("settings", [{"every": -1}, {"keep": 0}])
def test_settings_out_of_range_are_refused(tmp_path, settings):
    with pytest.raises(ConfigError):
        made(tmp_path, **settings)


def test_a_rollback_lasts_though_the_run_is_killed_before_it_saves(tmp_path):
    train(made(tmp_path, every=1, keep=9), 4)
    assert made(tmp_path, every=1, keep=9).restore(str(tmp_path / name(2))) == 2
    again = made(tmp_path, every=2, keep=9)  # the one before was killed
    assert again.restore("auto") == 2
    train(again, 1)
    assert [each for each in names(tmp_path) if each.startswith("step")] == [name(1), name(2), name(3), name(4)]
    train(again, 1)  # saves step 4, and so ends what was abandoned
    assert names(tmp_path) == [name(1), name(2), name(4)]
    last = made(tmp_path)
    assert last.restore("auto") == 4 and torch.equal(
        attachments_of(last).module[0].weight, attachments_of(again).module[0].weight
    )


def test_a_start_that_restores_nothing_deletes_no_later_checkpoints(tmp_path):
    train(made(tmp_path, every=2, keep=2), 8)
    job = train(made(tmp_path, every=1, keep=2), 3)
    assert [each for each in names(tmp_path) if each.startswith("step")] == [name(step) for step in (2, 3, 6, 8)]
    again = made(tmp_path)
    assert again.restore("auto") == 3 and torch.equal(
        attachments_of(again).module[0].weight, attachments_of(job).module[0].weight
    )


def test_leftovers_of_others_stay(tmp_path):
    for other in (".step-notes.tmp", ".step-00000001.safetensors.mine.tmp", ".step-1.safetensors.ab.tmp"):
        (tmp_path / other).write_bytes(b"")
    before = names(tmp_path)
    train(made(tmp_path, every=1))
    assert names(tmp_path) == [*before, name(1)]
