"""What a start continues: rollbacks last, the earlier format is read, and the last step is on disk."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from shoestring.checkpoint import Tiered
from shoestring.checkpoint.attached import close
from shoestring.checkpoint.format.history import HISTORY
from shoestring.checkpoint.recovery.resume import resume
from shoestring.checkpoint.tiers import file_acts
from shoestring.checkpoint.tiers.disk import manifests
from shoestring.checkpoint.tiers.file_acts import Files
from shoestring.checkpoint.tiers.slots import seals, slots_folder
from shoestring.checkpoint.tiers.tiered import Checkpointer
from shoestring.core.errors import CheckpointError
from shoestring.core.job import Kept
from shoestring.core.kept import Progress
from shoestring.core.world import World
from tests.rigs.checkpointing.known import BETWEEN, KnownState, trained
from tests.rigs.checkpointing.surroundings import listening

GOLDEN = Path(__file__).parents[1] / "golden/checkpoint-format-2"


def steps(saves):
    return sorted(record.checkpoint.step for _, record in manifests(saves))


# -- going back -------------------------------------------------------------------------------------------------------


def test_a_rollback_lasts_though_the_run_is_killed_before_it_saves(start, saves):
    checkpointer, state, progress = start(keep=9)
    trained(checkpointer, state, progress, range(1, 4 * BETWEEN + 1))
    checkpointer.close()
    old = next(path for path, record in manifests(saves) if record.checkpoint.step == 2 * BETWEEN)
    checkpointer, *_ = start(keep=9)
    assert resume(checkpointer, str(old)) == 2 * BETWEEN
    checkpointer.close()  # without having saved anything
    checkpointer, state, progress = start(keep=9)
    assert resume(checkpointer, "auto") == 2 * BETWEEN
    assert steps(saves) == [BETWEEN * n for n in (1, 2, 3, 4)]  # and could be undone by name
    trained(checkpointer, state, progress, range(2 * BETWEEN + 1, 3 * BETWEEN + 1))
    found = [record.checkpoint for _, record in manifests(saves)]
    # What was done again replaces what was abandoned; what was not is there still.
    assert [(each.step // BETWEEN, each.start) for each in found] == [(4, 0), (3, 2), (2, 0), (1, 0)]
    checkpointer.close()
    checkpointer, *_ = start(keep=9)
    assert resume(checkpointer, "auto") == 3 * BETWEEN


def test_a_start_that_restores_nothing_deletes_none_of_the_checkpoints_there(start, saves):
    checkpointer, state, progress = start()
    trained(checkpointer, state, progress, range(1, 4 * BETWEEN + 1))
    checkpointer.close()
    checkpointer, state, progress = start()
    trained(checkpointer, state, progress, range(1, 6 * BETWEEN + 1))
    assert steps(saves) == [4 * BETWEEN, 6 * BETWEEN]
    checkpointer.close()
    checkpointer, *_ = start()
    assert resume(checkpointer, "auto") == 6 * BETWEEN


def test_where_only_others_are_left_nothing_is_begun_beside_them(start, saves, tmp_path):
    checkpointer, state, progress = start()
    trained(checkpointer, state, progress, range(1, BETWEEN + 1))
    checkpointer.close()
    checkpointer, state, progress = start()
    trained(checkpointer, state, progress, [1])  # restores nothing, saves nothing to disk
    checkpointer.close()
    shutil.rmtree(tmp_path / "disk-memory-0")
    checkpointer, *_ = start()
    with pytest.raises(CheckpointError, match=rf"no checkpoint of the newest start, only others up to step {BETWEEN}"):
        resume(checkpointer, "auto")
    assert resume(checkpointer, str(manifests(saves)[0][0])) == BETWEEN


def test_a_history_that_is_lost_or_damaged_loses_no_checkpoint(start, saves, tmp_path):
    checkpointer, state, progress = start(keep=2)
    trained(checkpointer, state, progress, range(1, 3 * BETWEEN + 1))
    run = checkpointer.keeper.disk.run
    checkpointer.close()
    for damage in (b"", b"{}", None):
        if damage is None:
            (saves / HISTORY).unlink()
        else:
            (saves / HISTORY).write_bytes(damage)
        checkpointer, *_ = start(keep=2)
        assert resume(checkpointer, "auto") == 3 * BETWEEN and checkpointer.keeper.disk.run == run
        checkpointer.close()
    trained(*(again := start(keep=2)), [])
    assert resume(again[0], "auto") == 3 * BETWEEN
    trained(*again, range(3 * BETWEEN + 1, 4 * BETWEEN + 1))
    assert steps(saves) == [3 * BETWEEN, 4 * BETWEEN]  # what was before is of the same line


# -- the earlier format -----------------------------------------------------------------------------------------------


def earlier(tmp_path):
    """A start in a folder with checkpoints of format 2: (checkpointer, state, progress)."""
    state, progress = KnownState(lambda step: {"weight": torch.arange(6.0).view(2, 3) * step, "step": step}), Progress()
    settings = Tiered(
        folder=str(tmp_path / "saves"), memory_folder=str(tmp_path / "memory"), memory_every=2, disk_every=2
    )
    kept = {"mine": Kept(state, "own", None), "progress": Kept(progress, "same", None)}
    return Checkpointer(kept, progress, World(), settings, slots_folder(settings, World()), set), state, progress


def test_checkpoints_of_the_earlier_format_are_read_continued_and_retired(tmp_path):
    shutil.copytree(GOLDEN, tmp_path / "saves")
    assert [json.loads(json.loads(path.read_text())["body"])["format"] for path in GOLDEN.glob("*/manifest.json")] == [
        2,
        2,
    ]
    for _ in range(2):  # the second time the history says that they are this run's
        checkpointer, state, progress = earlier(tmp_path)
        assert resume(checkpointer, "auto") == 4 and progress.step == 4
        assert state.content["weight"].equal(state.make(4)["weight"]) and state.content["step"] == 4
        checkpointer.close()
    checkpointer, state, progress = earlier(tmp_path)
    assert resume(checkpointer, "auto") == 4
    trained(checkpointer, state, progress, range(5, 7))
    assert steps(tmp_path / "saves") == [4, 6]  # the newest two are kept
    assert {len(record.checkpoint.run) for _, record in manifests(tmp_path / "saves")} == {0, 16}
    checkpointer.close()


# -- the end ----------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for the end of the process."""


class Dying(Files):
    """Ends the thread that commits a folder at a step, and so the process."""

    def before(self, act, path, data=b"", at=0):
        if act == "rename" and path.name.startswith(f".step-{3:08d}"):
            raise Killed


def test_a_last_step_that_was_sealed_but_not_committed_is_put_on_disk_by_the_next_start(start, saves):
    checkpointer, state, progress = start(Dying())
    trained(checkpointer, state, progress, range(1, 3))
    state.content, progress.step = state.make(3), 3
    checkpointer.wait()
    with pytest.raises(Killed):
        checkpointer.capture(True)
    assert steps(saves) == [2]
    checkpointer.close()
    checkpointer, state, progress = start()
    assert resume(checkpointer, "auto") == 3 and checkpointer.finished
    assert steps(saves) == [3]
    close(checkpointer)
    checkpointer, state, progress = start()
    assert resume(checkpointer, "auto") == 3 and state.content["bytes"].equal(state.make(3)["bytes"])


def test_a_run_that_ended_leaves_nothing_in_memory_though_killed_before_it_was_cleared(start, saves, tmp_path):
    checkpointer, state, progress = start()
    trained(checkpointer, state, progress, range(1, 3))
    state.content, progress.step = state.make(3), 3
    checkpointer.wait()
    checkpointer.capture(True)
    checkpointer.finished = False  # as if it were killed here
    checkpointer.close()
    assert list((tmp_path / "disk-memory-0").rglob("*.seal"))
    checkpointer, *_ = start()
    assert resume(checkpointer, "auto") == 3
    close(checkpointer)
    assert not list((tmp_path / "disk-memory-0").rglob("*.*")) and steps(saves) == [3]


# -- slots ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["all", "seals", "files"])
def test_slots_removed_under_a_running_process_are_not_said_to_be_safe(start, tmp_path, what):
    checkpointer, state, progress = start()
    checkpointer.schedule.steps = {"memory": 1, "peers": 0, "disk": 0}
    trained(checkpointer, state, progress, range(1, 4))
    assert checkpointer.safe["memory"] == 2  # as was agreed before step 3
    if what == "all":
        shutil.rmtree(tmp_path / "disk-memory-0")
    for path in checkpointer.folder.glob({"all": "*", "seals": "*.seal", "files": "*.private"}[what]):
        path.unlink()
    progress.step, state.content = 4, state.make(4)
    checkpointer.wait()
    with listening() as said:
        checkpointer.capture(False)
        assert checkpointer.safe["memory"] == 0  # step 3 was, until now
        checkpointer.drain()
        trained(checkpointer, state, progress, [5])
    assert checkpointer.safe["memory"] in (0, 4)
    held = [record.checkpoint.step for _, record in seals(checkpointer.folder)]
    assert checkpointer.safe["memory"] in (0, *held)
    assert (what == "seals") or any("another program has removed files" in line for line in said)
    trained(checkpointer, state, progress, range(6, 12))
    assert checkpointer.safe["memory"] == 10  # there are new files
    checkpointer.close()
    checkpointer, state, _ = start()
    assert resume(checkpointer, "auto") == 11 and state.content["bytes"].equal(state.make(11)["bytes"])


# -- a record that is damaged or gone ---------------------------------------------------------------------------------


DAMAGES = {
    "empty": lambda path: path.write_bytes(b""),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:40]),
    "one bit": lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]),
    "gone": lambda path: path.unlink(),
}


@pytest.fixture
def often(tmp_path, monkeypatch):
    """Makes starts of one run that save to memory at each step, and to disk at each fourth."""
    monkeypatch.setattr(file_acts, "WAIT", 0.2)
    checkpointers = []

    def begin():
        state, progress = KnownState(lambda step: {"weight": torch.arange(6.0) * step, "step": step}), Progress()
        settings = Tiered(
            folder=str(tmp_path / "saves"), memory_folder=str(tmp_path / "memory"), memory_every=1, disk_every=4, keep=9
        )
        kept = {"mine": Kept(state, "own", None), "progress": Kept(progress, "same", None)}
        checkpointers.append(Checkpointer(kept, progress, World(), settings, slots_folder(settings, World()), set))
        return checkpointers[-1], state, progress

    yield begin
    for checkpointer in checkpointers:
        checkpointer.close()


def on_line(begin, steps, where=None):
    """A start that resumes, does these steps, and is killed."""
    checkpointer, state, progress = begin()
    if where is not None:
        resume(checkpointer, str(where))
    trained(checkpointer, state, progress, steps)
    checkpointer.close()


@pytest.mark.parametrize("damage", DAMAGES)
def test_newer_steps_in_memory_are_resumed_whatever_became_of_the_record(damage, often, tmp_path):
    """On disk are steps 4 and 8, of which the run has gone back from 8; in memory is step 6 of the newest start."""
    on_line(often, range(1, 10))
    on_line(often, [5, 6], next(path for path, record in manifests(tmp_path / "saves") if record.checkpoint.step == 4))
    DAMAGES[damage](tmp_path / "saves" / HISTORY)
    for _ in range(2):
        checkpointer, state, progress = often()
        assert resume(checkpointer, "auto") == 6 == progress.step
        assert state.content["weight"].equal(state.make(6)["weight"])
        checkpointer.close()


@pytest.mark.parametrize("damage", sorted(DAMAGES.keys() - {"gone"}))
def test_a_damaged_record_hides_nothing_where_the_disk_holds_no_checkpoint_yet(damage, often, tmp_path):
    on_line(often, range(1, 4))
    assert not manifests(tmp_path / "saves")
    DAMAGES[damage](tmp_path / "saves" / HISTORY)
    assert resume(often()[0], "auto") == 3


def test_what_another_run_left_in_memory_is_not_resumed(often, tmp_path):
    """Its folder was removed; a run of the same name has no record."""
    on_line(often, range(1, 4))
    shutil.rmtree(tmp_path / "saves")
    assert resume(often()[0], "auto") is None
