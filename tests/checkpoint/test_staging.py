"""Filling slots again and again: what is kept from checkpoint to checkpoint must never be what is saved."""

import gc
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.checkpoint.format.checksum import sums
from shoestring.checkpoint.format.manifest import CheckpointId
from shoestring.checkpoint.format.part import ROOM, Part
from shoestring.checkpoint.format.tree import decode
from shoestring.checkpoint.tiers.file_acts import Files
from shoestring.checkpoint.tiers.slots import Slot
from shoestring.checkpoint.tiers.staging import BATCH, Stager
from shoestring.core.errors import CheckpointError
from shoestring.core.job import Kept
from shoestring.core.world import World

SHAPES = [(), (3,), (2, 5), (0, 4), (700, 3)]
ACTS = ["put", "drop", "write", "swap", "type", "shape", "number"]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]


class Holder:
    """State that is whatever it is now."""

    def __init__(self):
        self.state = {"nested": {}, "numbers": [1, 2.5], "tensors": {}}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state_dict):
        self.state = state_dict


class Rig:
    """One rank's stager with two slots, of shared and of own state."""

    def __init__(self, folder):
        self.held = {"shared": Holder(), "mine": Holder()}
        across = {"shared": "shard", "mine": "own"}
        self.kept = {name: Kept(each, across[name], None) for name, each in self.held.items()}
        self.stager = Stager(World(), self.stable, overlap=True)
        self.slots = [Slot(Path(folder, "user/run/host-0", f"own-0-{index}"), Files()) for index in range(2)]
        self.saves = 0

    def stable(self):
        return {each.untyped_storage().data_ptr() for each in self.held["shared"].state["tensors"].values()}

    def save(self):
        """Save once more, and read it back."""
        self.saves += 1
        slot = self.slots[self.saves % 2]
        self.stager.start(self.stager.drafts(self.kept, {"step": self.saves}), slot)
        self.stager.finish()
        slot.seal(CheckpointId(self.saves, 0, "ab", 1, 1))
        (data,) = slot.parts(["private"]).values()
        part = Part("a part", data, sums(data))
        read = {piece.tensor: part.read(piece) for piece in part.pieces}
        trees, homes = part.about["trees"], part.about["homes"]
        assert part.about["step"] == self.saves
        return {
            name: decode(tree, lambda path: read[f"{homes[path]}:{path}" if path in homes else path])
            for name, tree in (trees["shared"] | trees["own"]).items()
        }


def tensor(draw, shape, dtype):
    values = torch.randint(0, 2 if dtype is torch.bool else 100, shape, generator=draw)
    return values.to(dtype)


@pytest.fixture
def rig(tmp_path):
    found = Rig(tmp_path)
    yield found
    found.stager.close()


@pytest.mark.slow
@settings(max_examples=30)
@given(st.data())
def test_every_checkpoint_is_of_the_state_as_it_is(data):
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    with TemporaryDirectory() as folder:
        rig = Rig(folder)
        for _ in range(data.draw(st.integers(2, 6))):
            for holder in rig.held.values():
                for act in data.draw(st.lists(st.sampled_from(ACTS), max_size=4)):
                    change(holder.state, act, data, draw)
            same(rig.save(), {name: holder.state for name, holder in rig.held.items()})
        rig.stager.close()


def change(state, act, data, draw):
    tensors = state["tensors"]
    if act == "number":
        state["numbers"].append(data.draw(st.sampled_from([0, -1.5, 10**15, "x" * 300])))
        return
    name = data.draw(st.sampled_from(["a", "b", "c", "d"]))
    if act == "put" or name not in tensors:
        tensors[name] = tensor(draw, data.draw(st.sampled_from(SHAPES)), data.draw(st.sampled_from(DTYPES)))
    elif act == "drop":
        del tensors[name]
    elif act == "write":
        tensors[name].copy_(tensor(draw, tensors[name].shape, tensors[name].dtype))
    elif act == "type":
        tensors[name] = tensors[name].to(data.draw(st.sampled_from(DTYPES)))
    elif act == "shape":
        tensors[name] = tensors[name].flatten()
    else:  # another tensor, of the same form
        tensors[name] = tensor(draw, tensors[name].shape, tensors[name].dtype)


def same(ours, theirs):
    assert type(ours) is type(theirs)
    if isinstance(theirs, torch.Tensor):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for key, value in theirs.items():
            same(ours[key], value)
    else:
        assert ours == theirs


def test_nothing_is_made_again_while_the_state_has_the_same_form(rig):
    rig.held["shared"].state["tensors"] |= {f"t{index}": torch.zeros(3) for index in range(9)}
    rig.save()
    rig.save()
    frame, rooms = rig.stager._frame, [slot._rooms["private"] for slot in rig.slots]
    places = [room._places for room in rooms]
    rig.held["shared"].state["tensors"]["t1"] = torch.ones(3)
    rig.held["shared"].state["numbers"] = [0.125]  # shorter: the pieces stay where they are
    rig.save()
    rig.save()
    assert rig.stager._frame is frame and all(room._places is was for room, was in zip(rooms, places, strict=True))
    rig.held["shared"].state["numbers"] = [0.1] * ROOM  # longer than the header's room
    same(rig.save()["shared"], rig.held["shared"].state)
    assert rig.stager._frame is frame and rooms[rig.saves % 2]._places is not places[rig.saves % 2]


def test_what_goes_where_is_known_until_something_lies_elsewhere(rig, monkeypatch):
    asked = []
    monkeypatch.setattr(rig.stager, "stable", lambda: asked.append(1) or rig.stable())
    tensors = rig.held["shared"].state["tensors"]
    tensors |= {f"t{index}": torch.zeros(3) for index in range(4)}
    rig.held["mine"].state["tensors"]["changing"] = torch.zeros(3)
    for _ in rig.slots:
        rig.save()
    assert len(asked) == len(rig.slots)
    tensors["t1"].fill_(1)
    rig.held["mine"].state["tensors"]["changing"] = torch.ones(3)  # copied at once, wherever it lies
    for _ in rig.slots:
        same(rig.save()["shared"], rig.held["shared"].state)
    assert len(asked) == len(rig.slots)
    tensors["t1"] = torch.full((3,), 2.0)
    same(rig.save()["shared"], rig.held["shared"].state)
    assert len(asked) == len(rig.slots) + 1


def test_a_slot_that_is_closed_gives_its_memory_back(rig):
    rig.held["shared"].state["tensors"]["large"] = torch.ones(1 << 20)
    rig.save()
    rig.save()
    held = f"{rig.slots[0].stem}.private"
    assert held in Path("/proc/self/maps").read_text()
    rig.slots[0].close()
    assert held not in Path("/proc/self/maps").read_text()


def test_garbage_is_collected_again_afterwards(rig):
    assert gc.isenabled()
    rig.save()
    assert gc.isenabled()
    rig.held["mine"].state["nested"]["odd"] = object()
    with pytest.raises(CheckpointError, match="mine/nested/odd"):
        rig.save()
    assert gc.isenabled()
    gc.disable()
    try:
        del rig.held["mine"].state["nested"]["odd"]
        rig.save()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_copy_beside_training_has_a_bounded_rate_until_somebody_waits(rig):
    rig.held["shared"].state["tensors"] = {name: torch.ones(BATCH // 4) for name in "abc"}
    stager, began = rig.stager, time.perf_counter()
    stager._times.append(0.3)  # there was so much time before: a copy takes the half, a third of it for each batch
    stager.start(stager.drafts(rig.kept, {}), rig.slots[0])
    stager._copying.result()
    assert time.perf_counter() - began > 0.1
    stager.finish()
    stager._times.clear()
    stager._times.append(200.0)
    began = time.perf_counter()
    stager.start(stager.drafts(rig.kept, {}), rig.slots[1])
    stager.finish()
    assert time.perf_counter() - began < 30
    same(rig.save(), {name: holder.state for name, holder in rig.held.items()})
