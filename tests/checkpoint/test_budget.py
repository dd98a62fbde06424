"""What saves take of a host's memory: by leases, given back to those who need it, and off where it is short."""

import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from shoestring import checkpoint
from shoestring.checkpoint.recovery.resume import resume
from shoestring.checkpoint.tiers import budget
from shoestring.checkpoint.tiers.budget import HELD, OWN, STAGING
from shoestring.checkpoint.tiers.file_acts import Files
from shoestring.core.errors import ConfigError
from shoestring.planning import system
from shoestring.testing.pool import Pool
from tests.rigs.checkpointing.known import BETWEEN, RunSetup, Trainee, build_checkpointer, trained
from tests.rigs.checkpointing.surroundings import listening, tmpfs

SMALL = 1e-5  # GB: one slot of these tests, not three
OFF = "no checkpoints to memory: no room for 3 slots of "


def limited(root, **settings):
    checkpointer, state, progress = build_checkpointer(root, 0, 1, Files())
    checkpointer.settings = replace(checkpointer.settings, **settings)
    return checkpointer, state, progress


def slots(checkpointer):
    return sorted({path.name.partition(".")[0] for path in checkpointer.folder.glob("*")})


def test_slots_are_leased_and_given_back(tmp_path):
    checkpointer, *rest = limited(tmp_path / "disk")
    trained(checkpointer, *rest, range(1, BETWEEN + 1))
    memory = checkpointer.world.memory
    nbytes = sum(map(len, checkpointer.own[0].parts(("private", "share", "rest")).values()))
    assert {name: taken for name, (taken, _) in memory.leases.items()} == {OWN: 3 * nbytes}
    assert 0 < memory.budget < 1 << 50
    checkpointer.close()
    assert memory.leases == {}


@pytest.mark.parametrize("spare", [system.SPARE, 0.0], ids=["free", "none free"])
def test_where_memory_is_short_checkpoints_go_to_disk_from_one_copy(tmp_path, monkeypatch, spare):
    monkeypatch.setattr(system, "SPARE", spare)  # the share of the free memory that the copy may take
    checkpointer, *rest = limited(tmp_path / "disk", max_memory_gb=SMALL)
    with listening() as said:
        trained(checkpointer, *rest, range(1, 4 * BETWEEN + 1))
    assert len(said) == 1 and said[0].startswith(OFF)
    assert (
        list(checkpointer.world.memory.leases) == [STAGING] and slots(checkpointer) == [] and len(checkpointer.own) == 1
    )
    assert checkpointer.safe == {"memory": 0, "peers": 0, "disk": 4 * BETWEEN}
    on_disk = [line for line in Path("/proc/self/maps").read_text().splitlines() if f"{tmp_path}/disk/" in line]
    assert bool(on_disk) == (not spare) and all(line.endswith("(deleted)") for line in on_disk)
    checkpointer.close()
    again, state, progress = limited(tmp_path / "disk", max_memory_gb=SMALL)
    assert resume(again, "auto") == 4 * BETWEEN
    trained(again, state, progress, range(4 * BETWEEN + 1, 5 * BETWEEN + 1))
    assert again.safe["disk"] == 5 * BETWEEN
    again.close()


def test_what_others_cannot_do_without_is_given_back_to_them(tmp_path):
    checkpointer, *rest = limited(tmp_path / "disk", max_memory_gb=1.0)
    trained(checkpointer, *rest, range(1, BETWEEN + 1))
    assert len(slots(checkpointer)) == 1 and checkpointer.world.memory.take("offload", 10**9)
    with listening() as said:
        trained(checkpointer, *rest, range(BETWEEN + 1, 3 * BETWEEN + 1))
    assert [line.startswith("no checkpoints to memory") and "offload 954 MiB" in line for line in said] == [True]
    assert slots(checkpointer) == [] and checkpointer.safe["disk"] == 3 * BETWEEN
    checkpointer.close()


def settled(root):
    """The budget of one start, which is then killed."""
    checkpointer, *rest = limited(root)
    trained(checkpointer, *rest, range(1, BETWEEN + 1))
    found = checkpointer.world.memory.budget
    checkpointer.close()
    return found


def test_the_budget_is_of_what_is_free_at_the_peak(tmp_path, monkeypatch):
    """Between two steps activations are gone; the next step needs them again, beside the slots."""
    monkeypatch.setattr(budget, "free_memory", lambda: 8e9)
    monkeypatch.setattr(budget, "peak_above_now", lambda: 3e9)
    before = settled(tmp_path / "1")
    assert before == pytest.approx(7 / 8 * 5e9)
    monkeypatch.setattr(budget, "peak_above_now", lambda: 9e9)
    assert settled(tmp_path / "2") == 0


def test_after_a_kill_for_memory_a_run_takes_less(tmp_path, monkeypatch):
    kills, root = [4], tmp_path / "disk"
    monkeypatch.setattr(budget, "free_memory", lambda: 8e9)
    monkeypatch.setattr(budget, "peak_above_now", lambda: 0)
    monkeypatch.setattr(budget, "kills_for_memory", lambda: kills[0])
    whole = settled(root)
    assert whole == pytest.approx(7e9, 1e-3) == settled(root)  # nothing was killed since
    kills[0] += 1
    assert settled(root) == settled(root) == pytest.approx(whole / 2, 1e-3)  # also after an end of another kind
    kills[0] += 2
    assert settled(root) == pytest.approx(whole / 4, 1e-3)
    assert settled(tmp_path / "another") == pytest.approx(whole, 1e-3)


def on_hosts(folder, budget, offload=0):
    """A scenario: three ranks on hosts of their own, with room for what is given, of which one needs some later."""
    setting = RunSetup(folder=folder, ranks=3)
    trainee = Trainee.of(setting)
    trainee.checkpointer.settings = replace(trainee.checkpointer.settings, max_memory_gb=budget[dist.get_rank()])
    checkpointer, found = trainee.checkpointer, {}
    with listening() as said:
        trainee.train(5)
        if dist.get_rank() == 1 and offload:
            checkpointer.world.memory.take("offload", offload)
        for step in range(6, 10):
            trainee.at(step)
            checkpointer.wait()
            checkpointer.capture(False)
            checkpointer.drain()
    for name, (nbytes, _) in checkpointer.world.memory.leases.items():
        found[name] = nbytes
    there = slots(checkpointer)
    checkpointer.close()
    again = Trainee.of(setting)
    step = again.restored()
    again.checkpointer.close()
    steps = checkpointer.schedule.steps
    return {"leases": found, "slots": there, "safe": checkpointer.safe, "said": said, "step": step, "steps": steps}


@pytest.mark.slow
def test_of_several_hosts_one_has_too_little(tmp_path):
    with Pool(3) as pool:
        every = pool.call(on_hosts, folder=str(tmp_path / "1"), budget=[1.0, 1.0, 1.0])
        assert all(each["safe"]["peers"] == 8 and each["step"] == [9, ""] and not each["said"] for each in every)
        own, held = every[1]["leases"][OWN], every[1]["leases"][HELD]
        assert own > held > 0

        short = (own + held / 2) / 1e9  # enough for its own slots
        every = pool.call(on_hosts, folder=str(tmp_path / "2"), budget=[1.0, short, 1.0])
        assert (
            every[0]["said"][0].startswith("no checkpoints to peers: no room for 2 slots")
            and len(every[0]["said"]) == 1
        )
        assert all(each["safe"] == {"memory": 8, "peers": 0, "disk": 8} for each in every)
        assert not [name for name in every[1]["slots"] if name.startswith("held")] and every[0]["step"] == [9, ""]

        short = own / 2 / 1e9
        every = pool.call(on_hosts, folder=str(tmp_path / "3"), budget=[1.0, short, 1.0])
        assert every[1]["slots"] == [] and every[1]["said"][0].startswith(
            "no checkpoints to memory: no room for 3 slots"
        )
        assert all(each["safe"] == {"memory": 0, "peers": 0, "disk": 8} for each in every)
        assert [each["step"] for each in every] == [[8, ""]] * 3
        assert [each["steps"] for each in every] == [{"memory": 0, "peers": 0, "disk": 4}] * 3

        enough, needed = (own + held) / 1e9, held // 2
        every = pool.call(on_hosts, folder=str(tmp_path / "4"), budget=[1.0, enough, 1.0], offload=needed)
        assert every[1]["leases"] == {OWN: own, "offload": needed}  # what is held for others goes first
        assert not [name for name in every[1]["slots"] if name.startswith("held")]
        assert all(each["safe"] == {"memory": 8, "peers": 4, "disk": 8} for each in every)
        assert "offload" in every[0]["said"][0] and len(every[0]["said"]) == 1


def preempted(folder, budget):
    """A scenario: three ranks that are stopped, on machines that end before a checkpoint to disk would."""
    trainee = Trainee.of(RunSetup(folder=folder, ranks=3))
    checkpointer = trainee.checkpointer
    checkpointer.settings = replace(checkpointer.settings, max_memory_gb=budget, deadline=1e-9)
    trainee.train(5)
    trainee.at(6)
    checkpointer.wait()
    checkpointer.capture(True)
    leases = {name: nbytes for name, (nbytes, _) in checkpointer.world.memory.leases.items()}
    checkpointer.close()
    return [checkpointer.safe, leases]


@pytest.mark.slow
def test_where_peers_have_no_room_a_deadline_keeps_no_checkpoint_from_the_disk(tmp_path):
    with Pool(3) as pool:
        every = pool.call(preempted, folder=str(tmp_path / "1"), budget=1.0)
        assert all(safe["peers"] == 6 and safe["disk"] == 4 for safe, _ in every)
        short = min(leases[OWN] + leases[HELD] / 2 for _, leases in every) / 1e9
        every = pool.call(preempted, folder=str(tmp_path / "2"), budget=short)
        assert all(safe["peers"] == 0 and safe["disk"] == 6 for safe, _ in every)


# -- a group of processes that is really limited ----------------------------------------------------------------------

LIMITED = """
import sys, torch
from dataclasses import replace
from pathlib import Path
from tests.rigs.checkpointing.known import build_checkpointer
from shoestring.checkpoint.tiers.file_acts import Files
group, folder, budget = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
activations = int(sys.argv[4])
checkpointer, state, progress = build_checkpointer(folder, 0, 1, Files())
checkpointer.settings = replace(checkpointer.settings, max_memory_gb=budget, disk_every=2)
state.make = lambda step: {"bytes": torch.full((64 << 20,), step, dtype=torch.uint8)}
(group / "cgroup.procs").write_text("0")
for progress.step in range(1, 9):
    state.content = state.make(progress.step)
    torch.ones(activations, dtype=torch.uint8)
    checkpointer.wait()
    checkpointer.capture(False)
    checkpointer.drain()
print(checkpointer.safe["disk"], checkpointer.safe["memory"])
"""
ROOM = 280 << 20  # of which the state has 64 MB, twice while it is made anew, and a slot of it is as large


def limit(group, nbytes):
    name = "memory.limit_in_bytes" if (group / "memory.limit_in_bytes").exists() else "memory.max"
    (group / name).write_text(str(nbytes))


@pytest.fixture
def group():
    """A cgroup of processes that have so much memory together."""
    v2 = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    place = Path("/sys/fs/cgroup", "" if v2 else "memory", f"shoestring-test-{os.getpid()}")
    try:
        place.mkdir()
        limit(place, ROOM)
    except OSError as error:
        with suppress(OSError):
            place.rmdir()
        pytest.skip(f"cannot make a cgroup: {error}")
    yield place
    place.rmdir()


def said(group, folder, budget, activations=0):
    path = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-c", LIMITED, str(group), str(folder), str(budget), str(activations)]
    with tmpfs(folder.with_name(f"{folder.name}-memory-0"), 1 << 30):
        return subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)


@pytest.mark.slow
def test_a_run_in_a_small_container_is_not_killed_for_its_slots(group, tmp_path):
    done = said(group, tmp_path / "disk", 0)
    assert (done.returncode, done.stdout.split()) == (0, ["8", "0"]), done.stderr
    assert "no checkpoints to memory: no room for 3 slots of 64 MiB" in done.stderr


@pytest.mark.slow
def test_it_would_be_killed_without_a_budget(group, tmp_path):
    assert said(group, tmp_path / "disk", 1000).returncode == -9


@pytest.mark.slow
def test_a_run_is_not_killed_for_the_activations_that_its_slots_leave_no_room_for(group, tmp_path):
    """Between two steps there is room for three slots, beside the activations of the next one there is not."""
    limit(group, 640 << 20)
    done = said(group, tmp_path / "disk", 0, 400 << 20)
    assert (done.returncode, done.stdout.split()) == (0, ["8", "0"]), done.stderr
    assert said(group, tmp_path / "other", 1000, 400 << 20).returncode == -9
    done = said(group, tmp_path / "third", 0, 100 << 20)  # here there is
    assert (done.returncode, done.stdout.split()) == (0, ["8", "6"]), done.stderr


# -- settings ---------------------------------------------------------------------------------------------------------


def test_settings_that_cannot_work_are_refused_and_say_what_to_do():
    with pytest.raises(
        ConfigError, match=r"slots` must be at least 3 .* copies, got 2 \(hint: .* a slot each; set slots = 3, or"
    ):
        checkpoint.Tiered(slots=2).validate(2)
    checkpoint.Tiered(slots=2).validate(1)
    checkpoint.Tiered(slots=2, redundancy="off").validate(2)
    with pytest.raises(ConfigError, match="max_memory_gb` must not be negative"):
        checkpoint.Tiered(max_memory_gb=-1.0).validate(1)
