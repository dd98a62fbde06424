"""Which slots ranks fill whose seals fail now and then: all decide alike, and what was told to be safe stays."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.checkpoint.format.manifest import CheckpointId
from shoestring.checkpoint.tiers.file_acts import Files
from shoestring.checkpoint.tiers.slots import Sealed, Slot
from shoestring.checkpoint.tiers.tiered import Checkpointer


class Bare(Checkpointer):
    """A rank that only decides: nothing is copied, and seals are what the test says."""

    def __init__(self, slots):
        self.own = [Slot(Path(f"own-0-{index}"), Files()) for index in range(slots)]
        self.keeper = SimpleNamespace(pinned=None, reads=None, idle=True)
        self.schedule = SimpleNamespace(costs=list, outlives=True)
        self.world = SimpleNamespace(device=SimpleNamespace(type="cpu"))
        self.claim = SimpleNamespace(replaced=False)
        self.safe, self._fits, self._lasting, self._sealed = {}, True, 0, Sealed()
        self._under_way, self.staged, self.lasting = {}, [], set()

    def stage(self, slot, step):
        slot.checkpoint, slot.lacking = None, ""
        self._under_way[slot] = SimpleNamespace(done=lambda: (slot, step) not in self.staged)
        self.staged.append((slot, step))

    def seal(self, fine):
        slot, step = self.staged.pop(0)
        slot.checkpoint, slot.lacking = CheckpointId(step, 0, "ab", 1, 1), "" if fine else "full"
        self._sealed = self._sealed.then(step, fine)
        if fine:
            self.lasting.add(step)

    def has(self, step):
        return step in self.lasting and any(each.checkpoint and each.checkpoint.step == step for each in self.own)


@pytest.fixture(autouse=True)
def standing(monkeypatch):
    monkeypatch.setattr(Slot, "stands", True)


def change(data, rank):
    """Some of what is under way ends, on a thread of this rank's own."""
    while rank.staged and data.draw(st.booleans()):
        rank.seal(data.draw(st.sampled_from([True, True, False])))
    if data.draw(st.booleans()):
        rank.keeper.reads = None


@pytest.mark.slow
@settings(max_examples=120)
@given(st.data())
def test_ranks_decide_alike_and_what_was_safe_stays(data):
    slots = data.draw(st.integers(2, 4))
    ranks = [Bare(slots) for _ in range(data.draw(st.integers(1, 3)))]
    for step in range(1, data.draw(st.integers(5, 16))):
        pulse = [min(values) for values in zip(*(rank._state() for rank in ranks), strict=True)]
        for rank in ranks:
            change(data, rank)
        chosen = [rank._choose(*pulse[1:6]) for rank in ranks]
        assert len({slot is None for slot in chosen}) == 1
        written = data.draw(st.booleans())
        for rank, slot in zip(ranks, chosen, strict=True):
            if slot is not None:
                rank.stage(slot, step)
                if written and rank.keeper.reads is None:
                    rank.keeper.reads = slot
            change(data, rank)
        safe = {rank._lasting for rank in ranks}
        assert len(safe) == 1
        assert safe == {0} or all(rank.has(*safe) for rank in ranks)


def test_checkpoints_go_on_though_one_rank_cannot_seal():
    ranks = [Bare(3), Bare(3)]
    made = []
    for step in range(1, 12):
        pulse = [min(values) for values in zip(*(rank._state() for rank in ranks), strict=True)]
        chosen = [rank._choose(*pulse[1:6]) for rank in ranks]
        made += [step] if chosen[0] else []
        for number, (rank, slot) in enumerate(zip(ranks, chosen, strict=True)):
            rank.stage(slot, step)
            rank.seal(number == 0 or step < 5)
    assert made == [*range(1, 12)] and all(rank.has(4) for rank in ranks)
