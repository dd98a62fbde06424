"""Looking for checkpoints where a disk cannot be read, parts contradict each other, or some were rebuilt."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shoestring.checkpoint.format.layout import Box, Leaf
from shoestring.checkpoint.format.manifest import CheckpointId, Record
from shoestring.checkpoint.format.part import Draft
from shoestring.checkpoint.recovery.resume import resume
from shoestring.checkpoint.tiers.budget import OWN
from shoestring.checkpoint.tiers.disk import Disk
from shoestring.checkpoint.tiers.file_acts import Files
from shoestring.checkpoint.tiers.plain import saves
from shoestring.core.errors import CheckpointError
from shoestring.testing.pool import Pool
from tests.rigs.checkpointing.known import STEPS, RunSetup, Trainee, build_checkpointer
from tests.rigs.checkpointing.surroundings import copied, listening

TOO_LONG = "x" * 300  # for a name: the system refuses to look for it


def unreadable(folder, memory):
    """A scenario: what is restored where the second host cannot look for checkpoints on its disk."""
    setting = RunSetup(folder=folder, ranks=3, shared=False)
    trainee = Trainee.of(setting)
    trainee.train(STEPS)
    trainee.checkpointer.close()
    copied(setting.place, "now", "left")
    if not memory:
        for host in range(3) if dist.get_rank() == 0 else ():
            shutil.rmtree(setting.memory(host))
    dist.barrier()
    again = Trainee.of(setting)
    if dist.get_rank() == 1:
        again.checkpointer.settings = replace(again.checkpointer.settings, folder=str(setting.disk(1) / TOO_LONG))
    with listening() as said:
        try:
            found = resume(again.checkpointer, "auto")
        except CheckpointError as error:
            found = str(error)
    again.checkpointer.close()
    return found, said


@pytest.mark.slow
def test_a_rank_that_cannot_look_for_saves_keeps_no_other_waiting(tmp_path):
    with Pool(3, timeout=60) as pool:
        every = pool.call(unreadable, folder=str(tmp_path / "1"), memory=True)
        assert [found for found, _ in every] == [STEPS] * 3
        assert [len(said) for _, said in every] == [0, 1, 0] and "cannot look for checkpoints in" in every[1][1][0]
        every = pool.call(unreadable, folder=str(tmp_path / "2"), memory=False)
    assert len({found for found, _ in every}) == 1  # nor does it begin anew beside checkpoints that are there
    assert every[0][0].startswith("nothing to resume from: cannot look for checkpoints in") and TOO_LONG in every[0][0]


def test_one_file_checkpoints_that_cannot_be_looked_for(tmp_path, caplog):
    assert saves(tmp_path / TOO_LONG) == [] and "cannot look for checkpoints in" in caplog.text


# -- parts that contradict each other ---------------------------------------------------------------------------------


def half(name, first, dtype, shape, step=2):
    """Two rows of a tensor, as a part of the checkpoint of a step."""
    data = torch.ones(2, *shape[1:], dtype=dtype)
    leaf = Leaf("weight", shape, Box((first, 0), tuple(data.shape)), (0,), data)
    about = {"step": step, "trees": {"shared": {"model": {"map": [["weight", {"tensor": "weight"}]]}}, "own": {}}}
    draft = Draft.of([leaf], {**about, "homes": {}})
    part = torch.zeros(draft.nbytes, dtype=torch.uint8)
    draft.fill(part)
    return {name: part}


@pytest.mark.parametrize(("dtype", "shape"), [(torch.float64, (4, 3)), (torch.float32, (5, 3))])
def test_parts_of_which_one_tensor_has_two_types_are_refused(tmp_path, dtype, shape):
    checkpointer, *_ = build_checkpointer(tmp_path / "disk", 0, 1, Files())
    disk, checkpoint = Disk(tmp_path / "disk" / "run" / "saves", Files()), CheckpointId(2, 0, "ab", 1, 1)
    parts = half("private-0", 0, torch.float32, (4, 3)) | half("share-0", 2, dtype, shape)
    disk.commit(Record(checkpoint, disk.write(checkpoint, parts)))
    one, other = (f"`{disk.folder / checkpoint.name}/{part}-0.safetensors`" for part in ("private", "share"))
    said = f"`weight` is torch.float32 (4, 3) in {one} and {dtype} {shape} in {other}"
    with pytest.raises(CheckpointError, match=re.escape(said)):
        resume(checkpointer, "auto")
    good = half("private-0", 0, torch.float32, (4, 3), 3) | half("share-0", 2, torch.float32, (4, 3), 3)
    disk.commit(Record(CheckpointId(3, 0, "ab", 1, 1), disk.write(CheckpointId(3, 0, "ab", 1, 1), good)))
    assert resume(checkpointer, "auto") == 3  # the same, but for that
    checkpointer.close()


# -- what was rebuilt -------------------------------------------------------------------------------------------------


def rebuilt(folder, killed=False, room=True):
    """A scenario: what was rebuilt for a lost host, by steps after the run continued.

    Args:
        killed: once more, before it could save anything.
        room: whether there is memory for what the others hold.
    """
    setting = RunSetup(folder=folder, ranks=3, peers="parity")
    trainee = Trainee.of(setting)
    trainee.train(STEPS)
    own = trainee.checkpointer.world.memory.leases[OWN][0]
    trainee.checkpointer.close()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(setting.memory(1))
    dist.barrier()
    setting = replace(setting, disk_every=100)
    again = Trainee.of(setting)
    if not room:
        again.checkpointer.settings = replace(again.checkpointer.settings, max_memory_gb=1.1 * own / 1e9)
    step, reason = again.restored()
    if killed:
        again.checkpointer.close()
        again = Trainee.of(setting)
        step, reason = again.restored()
    there = [left(setting)]
    for now in range(step + 1, step + 3):
        again.at(now)
        again.checkpointer.wait()
        again.checkpointer.capture(False)
        again.checkpointer.drain()
        dist.barrier()
        there.append(left(setting))
    safe = again.checkpointer.safe["peers"]
    again.checkpointer.close()
    return [step, reason, there, safe]


def left(setting):
    return sum(len(list(Path(setting.memory(host)).rglob("rebuilt-*.seal"))) for host in range(setting.hosts))


@pytest.mark.slow
def test_what_was_rebuilt_goes_once_its_state_is_safe_again(tmp_path):
    with Pool(3, timeout=60) as pool:
        # Step 11 is in own memory only: another lost host would cost it, and what was rebuilt is needed until 12.
        for number, how in enumerate(({}, {"killed": True})):
            every = pool.call(rebuilt, folder=str(tmp_path / str(number)), **how)
            assert every == [[10, "", [1, 1, 0], 12]] * 3
        every = pool.call(rebuilt, folder=str(tmp_path / "2"), room=False)
        assert every == [[10, "", [1, 1, 1], 0]] * 3
