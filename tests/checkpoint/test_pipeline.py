"""Checkpoints that are due before the one before is sealed: they take other slots, never the newest that all have."""

import errno
import threading
from dataclasses import replace
from functools import partial

import pytest
import torch

from shoestring.checkpoint import Tiered
from shoestring.checkpoint.tiers.disk import MANIFEST
from shoestring.checkpoint.tiers.file_acts import Files
from shoestring.checkpoint.tiers.slots import SEAL, Slot, seals, slots_folder
from shoestring.checkpoint.tiers.tiered import Checkpointer
from shoestring.core.job import Kept
from shoestring.core.kept import Progress
from shoestring.core.world import World
from tests.rigs.checkpointing.known import KnownState


class Gated(Files):
    """Nothing is sealed while the gate is closed, or there is no room for seals; and the disk has a gate of its own."""

    def __init__(self):
        self.gate, self.disk = threading.Event(), threading.Event()
        self.gate.set()
        self.disk.set()
        self.full = False

    def replace(self, path, data, *, durable=True):
        if path.name == MANIFEST:
            self.disk.wait(30)
        if path.name.endswith(SEAL):
            self.gate.wait(30)
            if self.full:
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
        super().replace(path, data, durable=durable)


class Rig:
    """One rank that saves every step to memory."""

    def __init__(self, folder, **settings):
        self.files, self.progress = Gated(), Progress()
        self.state = KnownState(partial(torch.full, (1000,)))
        kept = {"mine": Kept(self.state, "own", None), "progress": Kept(self.progress, "same", None)}
        self.settings = Tiered(
            folder=str(folder / "saves"),
            memory_folder=str(folder / "memory"),
            **{"memory_every": 1, "disk_every": 0} | settings,
        )
        self.folder = slots_folder(self.settings, World())
        self.checkpointer = Checkpointer(kept, self.progress, World(), self.settings, self.folder, set, self.files)

    def step(self):
        """One more; the steps that the slots hold then, or nothing of a slot that is being filled."""
        self.checkpointer.wait()
        self.progress.step += 1
        self.state.content = {"x": torch.tensor(float(self.progress.step))}
        self.checkpointer.capture(False)
        return self.held()

    def held(self):
        return sorted(record.checkpoint.step for _, record in seals(self.folder))


@pytest.fixture
def rig(tmp_path):
    made = []

    def make(**settings):
        made.append(Rig(tmp_path, **settings))
        return made[-1]

    yield make
    for each in made:
        each.files.gate.set()
        each.files.disk.set()
        each.checkpointer.close()


def test_checkpoints_continue_while_earlier_ones_are_sealed_but_not_over_the_newest_that_is_whole(rig):
    found = rig(slots=3)
    for _ in range(3):
        found.step()
        found.checkpointer.drain()
    assert found.held() == [1, 2, 3]
    found.files.gate.clear()
    assert found.step() == [2, 3]  # the oldest slot is filled anew,
    assert found.step() == [3]  # and before it is sealed the next one;
    assert found.step() == [3] and found.step() == [3]  # but 3 is all there is, so nothing takes its place
    found.files.gate.set()
    found.checkpointer.drain()
    assert found.held() == [3, 4, 5]
    found.step()  # what was put off is made up for
    found.checkpointer.drain()
    assert found.held() == [4, 5, 8]


def test_with_two_slots_one_checkpoint_is_under_way_at_a_time(rig):
    found = rig(slots=2)
    for _ in range(2):
        found.step()
        found.checkpointer.drain()
    found.files.gate.clear()
    assert found.step() == [2] and found.step() == [2]
    found.files.gate.set()
    found.checkpointer.drain()
    assert found.held() == [2, 3]


def test_nothing_is_copied_for_a_disk_that_is_late(rig):
    found = rig(memory_every=0, disk_every=5)
    found.files.disk.clear()
    held = [found.step() for _ in range(5)]
    found.checkpointer.stager.finish()
    held += [found.step() for _ in range(15)]
    assert {step for steps in held for step in steps} <= {5}
    found.files.disk.set()
    found.checkpointer.drain()
    found.step()  # what was put off is made up for
    found.checkpointer.drain()
    assert found.held() == [5, 21]


def test_slots_that_nobody_fills_any_more_go_once_something_newer_is_safe(rig):
    """As of a start of more ranks on this host, or of more slots, or with peers."""
    found = rig(disk_every=2)
    left = [found.folder / f"{name}.private" for name in ("own-1-0", "own-0-5", "held-0-1", "rebuilt-3")]
    others = [found.folder / name for name in ("steps-1.ring", "notes.txt")]
    for path in (*left, *others):
        path.write_bytes(b"x")
    found.step()
    found.checkpointer.drain()
    assert all(path.exists() for path in left)
    found.step()
    found.checkpointer.drain()
    assert [path for path in (*left, *others) if path.exists()] == others and found.held() == [1, 2]


@pytest.mark.parametrize("slots", [2, 3, 4])
def test_what_is_safe_in_memory_stays_while_later_checkpoints_cannot_be_sealed(rig, slots):
    found = rig(slots=slots)
    for _ in range(4):
        found.step()
        found.checkpointer.drain()
    assert found.checkpointer.safe["memory"] == 3  # and 4 is sealed, which is agreed on a step later
    found.files.full = True
    for _ in range(6):
        found.step()
        found.checkpointer.drain()
        assert 4 in found.held()
    newest = max(each.checkpoint.step for each in found.checkpointer.own if each.checkpoint)
    assert newest == 10  # what is staged goes on, for the disk
    found.files.full = False
    for _ in range(4):
        found.step()
        found.checkpointer.drain()
    assert 4 not in found.held() and found.checkpointer.safe["memory"] == 13


def test_memory_for_what_a_gpu_holds_is_reserved_beside_training(rig, monkeypatch):
    found, reserved, gate = (
        rig(slots=2, overlap=False),
        {},
        threading.Event(),
    )  # without overlap no GPU is asked to copy
    reserve = Slot.reserve

    def late(slot, sizes):
        gate.wait(30)
        reserved[slot.stem.name] = threading.current_thread().name
        reserve(slot, sizes)

    monkeypatch.setattr(Slot, "reserve", late)
    found.checkpointer.world = replace(found.checkpointer.world, device=torch.device("cuda"))
    assert found.step() == [] and found.step() == []  # training continues
    gate.set()
    found.checkpointer.drain()
    assert {*reserved.values()} == {"checkpoint-seal"} and {*reserved} == {"own-0-0", "own-0-1"}
    assert all((found.folder / f"{name}.private").stat().st_size > 0 for name in reserved)
    found.step()
    found.checkpointer.drain()
    assert found.held() == [3]
