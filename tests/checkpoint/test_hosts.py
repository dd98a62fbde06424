"""A host is lost with its memory: the others and a fresh one resume from what peers kept, bitwise."""

import random
import shutil
from dataclasses import replace

import pytest

from shoestring.testing.netlab import netlab, netlab_available
from tests.rigs.checkpointing import kills
from tests.rigs.checkpointing.lost_hosts import HOSTS, STEPS, Fleet, lose, resumed
from tests.rigs.checkpointing.trainee import FaultyRun, began, finished, run

REASON = netlab_available()
slow = pytest.mark.slow


@slow
@pytest.mark.netlab
@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_a_lost_host_is_rebuilt_from_parity(tmp_path):
    fleet, how = Fleet.made(tmp_path), ("--checkpoint.tiered.redundancy", "parity")
    expected = fleet.local("local", "--checkpoint.tiered.memory_folder", str(tmp_path / "memory"), workers=HOSTS)
    with netlab(hosts=HOSTS, shared=fleet.shared) as lab:
        job = lose(lab, fleet, "lost", 10, 2, *how)
        assert fleet.losses("lost") == expected and list(expected) == list(range(1, STEPS + 1))
        ((step, again),) = resumed(job)
    assert step >= 8 and again <= 5  # of an interval of four, and a step that waits for the one before


@pytest.mark.parametrize(("under", "hosts", "how"), [
    pytest.param("fsdp", 3, "copy", marks=[slow, pytest.mark.all_cases]),
    pytest.param("ddp", 2, "copy", marks=slow),
    pytest.param("fsdp", 4, "parity", marks=[slow, pytest.mark.all_cases]),
])  # fmt: skip
def test_the_memory_of_any_host_may_be_lost(tmp_path, under, hosts, how):
    settings = {"memory_every": 1, "peers_every": 3, "disk_every": 0, "redundancy": how}
    task = FaultyRun(folder=str(tmp_path / "task"), ranks=hosts, under=under, settings=settings, steps=14)
    expected = kills.undisturbed(task)
    for lost in range(hosts):
        struck = replace(task, folder=str(kills.fresh(task.place)), victim=lost, point="after forward", count=11)
        assert not run(struck)
        (memory,) = (task.place / "memory").glob("*/*")
        shutil.rmtree(memory / f"host-{lost}")
        again = replace(struck, victim=-1, point="", start=1)
        assert run(again)
        assert (began(again) or 0) >= 6
        assert finished(again).digests == expected.digests


@slow
def test_without_peers_a_lost_host_costs_everything_since_the_last_checkpoint_on_disk(tmp_path):
    settings = {"memory_every": 1, "peers_every": 0, "disk_every": 5}
    task = FaultyRun(folder=str(tmp_path / "task"), under="fsdp", settings=settings, steps=14)
    expected = kills.undisturbed(task)
    struck = replace(task, folder=str(kills.fresh(task.place)), victim=1, point="after forward", count=12)
    assert not run(struck, draw=random.Random(0))
    shutil.rmtree(next((task.place / "memory").glob("*/*")) / "host-1")
    again = replace(struck, victim=-1, point="", start=1)
    assert run(again) and (began(again) or 0) >= 5 and finished(again).digests == expected.digests


@slow
@pytest.mark.parametrize("how", ["copy", "parity"])
def test_where_no_host_comes_for_a_lost_one_the_others_continue(tmp_path, how):
    settings = {"memory_every": 1, "peers_every": 3, "disk_every": 0, "redundancy": how}
    task = FaultyRun(folder=str(kills.fresh(tmp_path / "task")), ranks=3, under="fsdp", settings=settings, steps=14)
    struck = replace(task, victim=2, point="after forward", count=11)
    assert not run(struck)
    shutil.rmtree(next((task.place / "memory").glob("*/*")) / "host-2")
    fewer = replace(struck, ranks=2, victim=-1, point="", start=1)
    assert run(fewer) and 6 <= (began(fewer) or 0) <= 11
