"""What belongs to a run: nothing else is deleted, and a second start is kept out."""

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from shoestring.checkpoint.format.history import HISTORY, History
from shoestring.checkpoint.recovery.resume import resume
from shoestring.checkpoint.tiers import disk
from shoestring.checkpoint.tiers.claim import LOCK
from shoestring.checkpoint.tiers.disk import manifests
from shoestring.checkpoint.tiers.file_acts import Files
from shoestring.checkpoint.tiers.slots import slots_folder
from shoestring.checkpoint.tiers.tiered import REPLACED, Checkpointer
from shoestring.core.errors import CheckpointError
from shoestring.core.world import World
from shoestring.testing.fork_server import ForkedProcess
from tests.rigs.checkpointing.known import BETWEEN, build_checkpointer, trained
from tests.rigs.checkpointing.surroundings import listening
from tests.waiting import until


def steps(saves):
    return sorted(record.checkpoint.step for _, record in manifests(saves))


# -- only what is its own ---------------------------------------------------------------------------------------------


def test_nothing_of_others_in_the_folder_is_deleted(start, saves, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_bytes(b"1")
    others = {
        "step-00000100/.metadata": b"another program's",
        "step-2/notes.txt": b"a user's",
        "step-00000001-0000-abcdef12/model.safetensors": b"an export",
        ".step-00000001-0000-abcdef12.tmp/part": b"of a run that is not this one",
        f".step-00000001-0000-abcdef12.{'0' * 16}.tmp/part": b"nor that",
        ".shared-notes": b"a user's",
        ".loading-dock": b"a user's",
        ".latest.backup.tmp": b"a user's",
        "latest": b"global_step100",
    }
    for name, content in others.items():
        (saves / name).parent.mkdir(parents=True, exist_ok=True)
        (saves / name).write_bytes(content)
    (saves / "step-00000003-0000-abcdef12").symlink_to(elsewhere)
    (saves / ".loading-7").symlink_to(elsewhere / "precious")
    checkpointer, state, progress = start()
    trained(checkpointer, state, progress, [1])
    mine = checkpointer.keeper.disk.run
    (saves / f".step-00000001-0000-abcdef12.{mine}.tmp").symlink_to(elsewhere)
    (saves / f".step-00000009-0000-abcdef12.{mine}.tmp").mkdir()  # and this is what it is for
    trained(checkpointer, state, progress, range(2, 3 * BETWEEN + 1))
    assert steps(saves) == [3 * BETWEEN]
    assert {name: (saves / name).read_bytes() for name in others} == others
    assert (elsewhere / "precious").read_bytes() == b"1"
    assert (saves / ".loading-7").is_symlink() and (saves / f".step-00000001-0000-abcdef12.{mine}.tmp").is_symlink()
    assert not (saves / f".step-00000009-0000-abcdef12.{mine}.tmp").exists()


def test_a_link_to_another_run_s_checkpoint_is_resumed_from_and_never_emptied(start, saves, tmp_path):
    checkpointer, state, progress = start()
    trained(checkpointer, state, progress, range(1, BETWEEN + 1))
    checkpointer.close()
    ((path, _),) = manifests(saves)
    other, state, progress = build_checkpointer(tmp_path / "other", 0, 1, Files())
    folder = tmp_path / "other/run/saves"
    folder.mkdir(parents=True)
    (folder / path.name).symlink_to(path)
    assert resume(other, "auto") == BETWEEN
    trained(other, state, progress, range(BETWEEN + 1, 4 * BETWEEN + 1))
    other.close()
    assert (folder / path.name).is_symlink() and steps(folder) == [BETWEEN, 4 * BETWEEN]
    again, state, _ = start()
    assert resume(again, "auto") == BETWEEN and state.content["bytes"].equal(state.make(BETWEEN)["bytes"])


# -- one start at a time ----------------------------------------------------------------------------------------------


def hold(folder):
    """A start of the run that saves steps 1 and 2, says so, and trains no more."""
    checkpointer, state, progress = build_checkpointer(Path(folder), 0, 1, Files())
    trained(checkpointer, state, progress, range(1, 3))
    (Path(folder) / "there").touch()
    signal.pause()


@pytest.fixture
def holder(tmp_path):
    """A process with a start of the run that has saved steps 1 and 2, and trains no more."""
    process = ForkedProcess(hold, [str(tmp_path / "disk")])
    try:
        until(lambda: (tmp_path / "disk" / "there").exists() or process.exitcode is not None)
        assert process.exitcode is None
        yield process
    finally:
        process.kill()
        process.join()


@pytest.mark.slow
def test_a_second_start_is_refused_while_the_first_lives_stopped_or_not(start, holder, saves):
    before = steps(saves)
    for stopped in (False, True):
        if stopped:
            os.kill(holder.pid, signal.SIGSTOP)
        checkpointer, state, progress = start()
        with pytest.raises(CheckpointError, match=rf"`{saves}` is in use by process {holder.pid} on "):
            resume(checkpointer, "auto")
        with pytest.raises(CheckpointError, match="is in use"):
            trained(checkpointer, state, progress, [1])
    assert steps(saves) == before
    holder.kill()  # the lock goes with it
    holder.join()
    checkpointer, *_ = start()
    assert resume(checkpointer, "auto") == BETWEEN


@pytest.mark.slow
def test_a_process_that_lives_on_with_slots_of_the_run_keeps_others_out(start, holder, saves, tmp_path):
    """Say a worker, whose first rank has died, or on a disk where locks do not work between hosts."""
    os.kill(holder.pid, signal.SIGSTOP)
    (saves / LOCK).unlink()
    checkpointer, *_ = start()
    with pytest.raises(CheckpointError, match=rf"`{tmp_path}.*memory.*` is in use by process {holder.pid} on "):
        resume(checkpointer, "auto")


class Meanwhile(Files):
    """Lets something happen before one of its acts, once."""

    def __init__(self, act, name, work):
        self.act, self.name, self.work = act, name, work

    def before(self, act, path, data=b"", at=0):
        if self.work and (act, path.name[: len(self.name)]) == (self.act, self.name):
            work, self.work = self.work, None
            work()


def other_host(tmp_path, saves, done):
    """Another start takes the folder over, as from a host that no lock of this one keeps out; it saves two more."""
    (saves / LOCK).unlink()
    checkpointer, state, progress = build_checkpointer(tmp_path / "disk", 0, 1, Files())
    memory = tmp_path / "other-memory"
    checkpointer.settings = replace(checkpointer.settings, memory_folder=str(memory))
    checkpointer = Checkpointer(
        checkpointer.kept,
        progress,
        World(),
        checkpointer.settings,
        slots_folder(checkpointer.settings, World()),
        set,
        Files(),
    )
    step = resume(checkpointer, "auto")
    done.append(step)
    trained(checkpointer, state, progress, range(step + 1, step + 1 + BETWEEN))
    checkpointer.close()


def test_a_start_that_was_replaced_commits_nothing_deletes_nothing_and_ends(start, saves, tmp_path):
    checkpointer, state, progress = start()
    trained(checkpointer, state, progress, range(1, BETWEEN + 1))
    done = []
    other_host(tmp_path, saves, done)
    assert done == [BETWEEN] and steps(saves) == [2 * BETWEEN]
    history = History.read(saves)
    with listening() as said:
        trained(checkpointer, state, progress, range(BETWEEN + 1, 2 * BETWEEN + 1))
    assert any("another start of this run has taken over" in line for line in said)
    assert checkpointer.safe["disk"] == BETWEEN
    with pytest.raises(CheckpointError, match=REPLACED):
        trained(checkpointer, state, progress, range(2 * BETWEEN + 1, 4 * BETWEEN + 1))
    with pytest.raises(CheckpointError, match="another start"):
        checkpointer.capture(True)
    assert steps(saves) == [2 * BETWEEN] and History.read(saves) == history
    assert [path.name for path in saves.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(("act", "name"), [("rename", ".step-"), ("sync folder", "saves"), ("rename", "step-")])
def test_what_a_replaced_start_commits_between_look_and_rename_is_not_resumed(start, saves, tmp_path, act, name):
    """Stopped at the worst moment, replaced, and woken up."""
    acts, done = Meanwhile(act, name, None), []
    checkpointer, state, progress = start(acts)
    trained(checkpointer, state, progress, range(1, BETWEEN + 1))
    acts.work = lambda: other_host(tmp_path, saves, done)
    trained(checkpointer, state, progress, range(BETWEEN + 1, 2 * BETWEEN + 1))
    assert len(done) == 1
    checkpointer.close()
    ((newest, _), *_) = [(path, record) for path, record in manifests(saves) if record.checkpoint.start > 0]
    shutil.rmtree(tmp_path / "disk-memory-0")
    again, state, progress = start()
    assert resume(again, "auto") == done[0] + BETWEEN
    assert newest.name.startswith(f"step-{done[0] + BETWEEN:08d}-")
    assert state.content["bytes"].equal(state.make(done[0] + BETWEEN)["bytes"])


def test_a_child_does_not_hold_the_lock_on(tmp_path):
    lock = Files().lock(tmp_path / LOCK, "me")
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.write(writes, b"1")
        signal.pause()
        os._exit(0)
    try:
        os.read(reads, 1)
        lock.release()
        Files().lock(tmp_path / LOCK, "another", wait=0.0).release()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reads)
        os.close(writes)


def test_a_folder_made_anew_does_not_resume_what_a_dead_run_left_in_memory(start, saves, tmp_path):
    checkpointer, state, progress = start()
    trained(checkpointer, state, progress, range(1, 3 * BETWEEN + 1))
    checkpointer.close()
    shutil.rmtree(tmp_path / "disk")
    checkpointer, state, progress = start()
    with listening() as said:
        assert resume(checkpointer, "auto") is None
    assert any("does not say of which run it is" in line for line in said)
    trained(checkpointer, state, progress, range(1, BETWEEN + 1))
    checkpointer.close()
    checkpointer, *_ = start()
    assert resume(checkpointer, "auto") == BETWEEN  # its own


def test_a_part_of_another_checkpoint_is_not_read(start, saves, tmp_path):
    """However well its file and checksums fit the manifest."""
    checkpointer, state, progress = start()
    trained(checkpointer, state, progress, range(1, BETWEEN + 1))
    checkpointer.close()
    shutil.rmtree(tmp_path / "disk-memory-0")
    ((path, record),) = manifests(saves)
    for key, value in (("run", "0" * 16), ("uid", "00"), ("start", 7), ("step", 8)):
        other = replace(record, checkpoint=replace(record.checkpoint, **{key: value}))
        (path / disk.MANIFEST).write_bytes(other.dumps())
        (saves / HISTORY).unlink(missing_ok=True)
        again, *_ = start()
        with (
            pytest.raises(CheckpointError, match=r"damaged or incomplete.*shoestring checkpoint verify"),
            listening() as said,
        ):
            resume(again, "auto")
        assert any(f"belongs to another checkpoint: its {key} is" in line for line in said)
        again.close()
