"""A checkpoint whose load ends the process: tried a few times over restarts, then passed over by all ranks."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from shoestring.checkpoint.recovery import attempts
from shoestring.checkpoint.recovery.attempts import MOST, Attempts
from shoestring.checkpoint.recovery.resume import resume
from shoestring.checkpoint.tiers.disk import CRASH, MARK, UNDER_WAY, manifests
from shoestring.checkpoint.tiers.file_acts import Files
from shoestring.checkpoint.tiers.rank_group import RankGroup
from shoestring.core.errors import CheckpointError
from shoestring.testing.fork_server import ForkedProcess
from shoestring.testing.pool import Pool
from tests.rigs.checkpointing.known import STEPS, RunSetup, Trainee, build_checkpointer, trained
from tests.rigs.checkpointing.surroundings import copied, listening

RESTART = """
import logging, os, signal, sys
from pathlib import Path
from tests.rigs.checkpointing.known import trained
from tests.rigs.checkpointing.known import build_checkpointer
from shoestring.checkpoint.tiers.file_acts import Files
from shoestring.checkpoint.recovery.resume import resume
logging.basicConfig(level=logging.INFO, format="%(message)s")
root, deadly, how = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
checkpointer, state, progress = build_checkpointer(root, 0, 1, Files())
load = state.load_state_dict
def loaded(content):
    if content["step"] == deadly:
        os.kill(os.getpid(), how)
    load(content)
state.load_state_dict = loaded
step = resume(checkpointer, "auto")
assert state.content["bytes"].equal(state.make(step)["bytes"])
print(step)
checkpointer.close()
"""


def saved(root, steps):
    """Checkpoints of every other step, the newest in memory and on disk, the others in memory."""
    checkpointer, state, progress = build_checkpointer(root, 0, 1, Files())
    trained(checkpointer, state, progress, range(1, steps + 1))
    checkpointer.close()


def restarted(root, deadly, how=signal.SIGSEGV):
    """(exit code, step that it resumed from, what it said) of one start that dies while it loads a step."""
    path = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-c", RESTART, str(root), str(deadly), str(int(how))]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    return done.returncode, done.stdout.strip(), done.stderr


def marks(root):
    return [json.loads(path.read_text()) for path in root.rglob(f"{MARK}*")]


def counted(root, attempts):
    """As if so many attempts had ended so."""
    (path,) = root.rglob(f"{MARK}*")
    path.write_text(json.dumps(dict.fromkeys(json.loads(path.read_text()), attempts)))


@pytest.mark.slow
@pytest.mark.all_cases
def test_what_ends_the_process_each_time_is_given_up_and_the_next_is_taken(tmp_path):
    root = tmp_path / "disk"
    saved(root, 6)
    for attempt in (1, 2, MOST):
        if attempt == MOST:
            counted(root, MOST - 1)
        code, _, _ = restarted(root, deadly=6)
        assert code == -signal.SIGSEGV
        assert [list(mark.values()) for mark in marks(root)] == [[attempt]]
    code, step, said = restarted(root, deadly=6)
    assert (code, step) == (0, "4")
    assert f"skipping the checkpoint of step 6: the last {MOST} attempts to load it ended the process" in said
    assert restarted(root, deadly=6)[:2] == (0, "4")  # not tried again before something newer is there
    saved_since, state, progress = build_checkpointer(root, 0, 1, Files())
    assert resume(saved_since, "auto") == 4
    for progress.step in (5, 6):
        state.content = state.make(progress.step)
        saved_since.wait()
        saved_since.capture(False)
        saved_since.drain()
    saved_since.close()
    assert marks(root) == [] and restarted(root, deadly=0)[:2] == (0, "6")


@pytest.mark.slow
def test_a_kill_now_and_then_gives_nothing_up(tmp_path):
    root = tmp_path / "disk"
    saved(root, 6)
    for _ in range(2):
        assert restarted(root, deadly=6, how=signal.SIGKILL)[0] == -signal.SIGKILL
        counted(root, MOST - 2)
        assert restarted(root, deadly=6, how=signal.SIGKILL)[0] == -signal.SIGKILL
        assert restarted(root, deadly=0)[:2] == (0, "6")
        assert marks(root) == []


def unfit(_):
    raise ValueError("of another model")


def test_an_error_that_is_told_is_no_attempt_that_ended_the_process(tmp_path):
    root = tmp_path / "disk"
    saved(root, 6)
    for _ in range(MOST + 1):
        checkpointer, state, _ = build_checkpointer(root, 0, 1, Files())
        state.load_state_dict = unfit
        with pytest.raises(CheckpointError, match=r"step 6 .* does not fit"):
            resume(checkpointer, "auto")
        checkpointer.close()
    checkpointer, *_ = build_checkpointer(root, 0, 1, Files())
    assert resume(checkpointer, "auto") == 6
    checkpointer.close()


def test_where_nothing_else_is_left_the_user_is_told_how_to_try_again(tmp_path):
    root = tmp_path / "disk"
    saved(root, 2)
    saves = root / "run" / "saves"
    ((path, _),) = manifests(saves)
    (saves / f"{MARK}0").write_text(json.dumps({path.name: MOST}))
    checkpointer, *_ = build_checkpointer(root, 0, 1, Files())
    with pytest.raises(CheckpointError, match=rf"step 2: the last {MOST} attempts .* remove `{saves / MARK}\*`"):
        resume(checkpointer, "auto")
    assert resume(checkpointer, str(path)) == 2  # who names it means it
    checkpointer.close()


@pytest.mark.parametrize("damage", [b"", b"[1]", b'{"a": "b"}', b"\xff", b'{"a": 1e999}', b"[" * 99999])
def test_a_damaged_mark_counts_nothing(tmp_path, damage):
    root = tmp_path / "disk"
    saved(root, 2)
    (root / "run" / "saves" / f"{MARK}0").write_bytes(damage)
    checkpointer, *_ = build_checkpointer(root, 0, 1, Files())
    assert resume(checkpointer, "auto") == 2
    checkpointer.close()


def looked(folder):
    """What a start makes of the files in its folder."""
    found = Attempts(RankGroup(0, 1, None), Files(), folder, 0)
    found.look()
    return found.counts


@pytest.mark.parametrize("hosts", [(3, 5), (5, 3)])
def test_of_what_several_hosts_counted_the_most_counts(tmp_path, hosts):
    for host, count in enumerate(hosts):
        (tmp_path / f"{MARK}{host}").write_text(json.dumps({"step": count}))
    assert looked(tmp_path) == {"step": 5}


def test_a_mark_that_is_too_long_is_not_read(tmp_path):
    (tmp_path / f"{MARK}0").write_text(json.dumps({"step": 5}).ljust(attempts.LIMIT + 1))
    (tmp_path / f"{MARK}1").write_text(json.dumps({"other": 2}).ljust(attempts.LIMIT))
    assert looked(tmp_path) == {"other": 2}


@pytest.mark.parametrize(
    ("crash", "kills", "counted"),
    [
        ("", 3, 4),  # a kill from outside: the report of a crash was opened, and nothing written to it
        ("Fatal Python error: Segmentation fault", 3, 5),
        ("", 2, 5),  # memory ran out meanwhile
        (None, 3, 4),
    ],
)
def test_an_attempt_counts_where_the_load_itself_ended_it(tmp_path, monkeypatch, crash, kills, counted):
    monkeypatch.setattr(attempts, "kills_for_memory", lambda: 3)
    (tmp_path / f"{MARK}0").write_text(json.dumps({"step": 5, "other": 2}))
    (tmp_path / f"{UNDER_WAY}0").write_text(json.dumps({"name": "step", "kills": kills}))
    if crash is not None:
        (tmp_path / f"{CRASH}1").write_text(crash)
    assert looked(tmp_path) == {"step": counted, "other": 2}
    assert looked(tmp_path) == {"step": counted, "other": 2}  # it is judged once
    assert [path.name for path in tmp_path.iterdir()] == [f"{MARK}0"]


def with_marks(folder, shared):
    """A scenario: what three ranks restore once only the last host knows that the newest was tried too often."""
    setting = RunSetup(folder=folder, ranks=3, shared=shared)
    trainee = Trainee.of(setting)
    trainee.train(STEPS)
    trainee.checkpointer.close()
    checkpoint = max(s.checkpoint for s in trainee.checkpointer.own if s.checkpoint)
    copied(setting.place, "now", "left")
    if dist.get_rank() == 2:
        (setting.disk(2) / f"{MARK}2").write_text(json.dumps({checkpoint.name: MOST}))
    dist.barrier()
    again = Trainee.of(setting)
    with listening() as said:
        found = again.restored()
    again.checkpointer.close()
    return found, [line for line in said if line.startswith("skipping the checkpoint of step")]


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_what_one_host_knows_counts_on_all(tmp_path, shared):
    with Pool(3, timeout=60) as pool:
        every = pool.call(with_marks, folder=str(tmp_path), shared=shared)
    assert [found for found, _ in every] == [[STEPS - 1, ""]] * 3
    assert all(len(said) == 1 and said[0].startswith(f"skipping the checkpoint of step {STEPS}:") for _, said in every)


def killed(root):
    """A start that is killed while it loads."""
    checkpointer, state, _ = build_checkpointer(Path(root), 0, 1, Files())
    state.load_state_dict = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    resume(checkpointer, "auto")


@pytest.mark.slow
def test_kills_from_outside_give_no_checkpoint_up_however_many(tmp_path):
    root = tmp_path / "disk"
    saved(root, 6)
    for _ in range(MOST + 1):
        assert ForkedProcess(killed, [str(root)]).join(60) == -signal.SIGKILL
    assert [count for mark in marks(root) for count in mark.values()] == [1]  # the one that nothing is known of yet
    assert restarted(root, deadly=0)[:2] == (0, "6")


def test_an_attempt_during_which_memory_ran_out_counts(tmp_path, monkeypatch):
    root = tmp_path / "disk"
    saved(root, 6)
    saves, starved = root / "run" / "saves", [3]
    monkeypatch.setattr(attempts, "kills_for_memory", lambda: starved[0])

    class End(BaseException):
        pass

    def attempt(more):
        """One start that dies during the load; what the next one knows."""
        found = Attempts(RankGroup(0, 1, None), Files(), saves, 0)
        found.look()
        with pytest.raises(End), found.counted(checkpoint):
            (saves / "kept").mkdir()
            for path in saves.glob(f"{UNDER_WAY}*"):
                shutil.copy(path, saves / "kept")
            shutil.copy(saves / f"{MARK}0", saves / "kept")
            raise End
        for path in (saves / "kept").iterdir():
            shutil.move(path, saves / path.name)
        (saves / "kept").rmdir()
        starved[0] += more
        found = Attempts(RankGroup(0, 1, None), Files(), saves, 0)
        found.look()
        return found.counts[checkpoint.name]

    checkpoint = manifests(saves)[0][1].checkpoint
    assert [attempt(more) for more in (1, 0, 1, 1, 0)] == [1, 1, 2, 3, 3]
