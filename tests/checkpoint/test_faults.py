"""Acts on files that fail, one by one, and file systems that are really full."""

import errno
import os
import re
import shutil
from pathlib import Path

import pytest
import torch.distributed as dist

from shoestring.checkpoint.recovery.resume import resume
from shoestring.checkpoint.tiers.file_acts import Files
from shoestring.testing.pool import Pool
from tests.rigs.checkpointing.disk_faults import injected, named
from tests.rigs.checkpointing.known import BETWEEN, STEPS, RunSetup, Trainee, build_checkpointer, trained
from tests.rigs.checkpointing.surroundings import copied, listening, tmpfs

POINTS = 16  # benchmarks/checkpoint tries 120


@pytest.mark.slow
def test_training_continues_and_what_was_safe_stays_so(tmp_path):
    assert [line for _, wrong in injected(tmp_path, POINTS) for line in wrong] == []


@pytest.fixture
def small(tmp_path):
    """Mounts small file systems."""
    mounts = []

    def mount(name, size):
        mounts.append(tmpfs(tmp_path / name, size))
        try:
            return mounts[-1].__enter__()
        except PermissionError as error:
            mounts.pop()
            pytest.skip(f"cannot mount a tmpfs: {error}")

    yield mount
    for each in mounts:
        each.__exit__(None, None, None)


def test_a_full_disk(small, tmp_path):
    root = small("disk", 128 << 10)
    checkpointer, state, progress = build_checkpointer(root, 0, 1, Files())
    saves = root / "run" / "saves"
    trained(checkpointer, state, progress, range(1, BETWEEN + 1))
    assert checkpointer.safe["disk"] == BETWEEN
    free = os.statvfs(root).f_bavail * os.statvfs(root).f_frsize
    (root / "ballast").write_bytes(bytes(free - 8192))
    with listening() as said:
        trained(checkpointer, state, progress, range(BETWEEN + 1, 2 * BETWEEN + 1))
    assert checkpointer.safe["disk"] == BETWEEN and named([said], saves)
    assert os.strerror(errno.ENOSPC) in said[0]
    assert [path.name for path in saves.iterdir() if path.name.startswith(".")] == []
    (root / "ballast").unlink()
    trained(checkpointer, state, progress, range(2 * BETWEEN + 1, 3 * BETWEEN + 1))
    assert checkpointer.safe["disk"] == 3 * BETWEEN
    checkpointer.close()


def test_full_shared_memory(small, tmp_path):
    """There is room for two of three slots, and then there are checkpoints on disk still."""
    small("disk-memory-0", 2 << 20)
    checkpointer, state, progress = build_checkpointer(tmp_path / "disk", 0, 1, Files())
    with listening() as said:
        trained(checkpointer, state, progress, range(1, 4 * BETWEEN + 1))
    assert any("no checkpoints to memory: no room" in line and str(tmp_path / "disk-memory-0") in line for line in said)
    assert checkpointer.safe["disk"] == 4 * BETWEEN
    checkpointer.close()
    again, state, progress = build_checkpointer(tmp_path / "disk", 0, 1, Files())
    assert resume(again, "auto") == 4 * BETWEEN
    assert state.content["bytes"].equal(state.make(4 * BETWEEN)["bytes"])
    again.close()


def test_a_disk_that_became_read_only(small):
    root = small("disk", 128 << 10)
    checkpointer, state, progress = build_checkpointer(root, 0, 1, Files())
    trained(checkpointer, state, progress, range(1, BETWEEN + 1))
    with listening() as said:
        assert os.system(f"mount -o remount,ro {root}") == 0
        trained(checkpointer, state, progress, range(BETWEEN + 1, 2 * BETWEEN + 1))
        assert os.system(f"mount -o remount,rw {root}") == 0
    assert checkpointer.safe["disk"] == BETWEEN and named([said], root / "run" / "saves")
    trained(checkpointer, state, progress, range(2 * BETWEEN + 1, 3 * BETWEEN + 1))
    assert checkpointer.safe["disk"] == 3 * BETWEEN
    checkpointer.close()


KINDS = {
    "a part": r"step-.*\.tmp/private-0\.safetensors$",
    "a manifest": r"manifest\.json",
    "the checkpoint's folder": r"step-[^/]*\.tmp$",
    "the folder of checkpoints": r"run/saves$",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_sync_that_fails_is_believed(tmp_path, monkeypatch, kind):
    """The call itself fails, as of a device that lost what it had taken: nobody may continue as if it had not."""
    sync, broken = os.fsync, []

    def failing(descriptor):
        sync(descriptor)
        if broken and re.search(KINDS[kind], str(Path(f"/proc/self/fd/{descriptor}").readlink())):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", failing)
    checkpointer, state, progress = build_checkpointer(tmp_path / "disk", 0, 1, Files())
    trained(checkpointer, state, progress, range(1, BETWEEN + 1))
    broken.append(True)
    with listening() as said:
        trained(checkpointer, state, progress, range(BETWEEN + 1, 2 * BETWEEN + 1))
    assert checkpointer.safe["disk"] == BETWEEN and named([said], tmp_path / "disk" / "run" / "saves"), said
    broken.clear()
    trained(checkpointer, state, progress, range(2 * BETWEEN + 1, 3 * BETWEEN + 1))
    assert checkpointer.safe["disk"] == 3 * BETWEEN
    checkpointer.close()


class NoRoom(Files):
    """Lets nothing be rebuilt."""

    def before(self, act, path, data=b"", at=0):
        if path.name.startswith("rebuilt"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def without_a_host(folder):
    """A scenario: what is restored once a host is lost, with room to rebuild its part and without."""
    setting = RunSetup(folder=folder, ranks=3, peers="parity")
    trainee = Trainee.of(setting)
    trainee.train(STEPS)
    trainee.checkpointer.close()
    found = []
    for files in (NoRoom(), Files()):
        again = Trainee.of(setting, files)
        copied(setting.place, "now" if not found else "left", "left" if not found else "now")
        if dist.get_rank() == 0:
            shutil.rmtree(setting.memory(1))
        dist.barrier()
        found.append(again.restored())
        again.checkpointer.close()
    return found


@pytest.mark.slow
def test_a_part_that_cannot_be_rebuilt_is_not_tried_for_ever(tmp_path):
    with Pool(3, timeout=30) as pool:
        assert pool.call(without_a_host, folder=str(tmp_path)) == [[[8, ""], [10, ""]]] * 3
