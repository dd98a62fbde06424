"""The ring of differences in memory: what it keeps, and what is left of it when a process ends in the middle."""

from __future__ import annotations

import shutil
import struct

import pytest
import torch

from shoestring.checkpoint.differences.ring import Ring
from shoestring.checkpoint.tiers.file_acts import Files
from shoestring.checkpoint.tiers.slots import Slot

CELLS = 4


def contents(step: int, entries: int = 1000) -> dict[str, torch.Tensor]:
    return {
        "codes": torch.full((entries,), step % 256, dtype=torch.uint8),
        "scales": torch.arange(7.0).view(7, 1) * step,
        "none": torch.empty(0, 3),
        "flags": torch.tensor([True, False]),
        "half": torch.tensor(0.5 * step, dtype=torch.bfloat16),
    }


@pytest.fixture
def ring(tmp_path):
    """Makes rings of the same file, as starts of a run do."""
    memory = tmp_path / "shoestring-0" / "run" / "host-0"

    def make(cells=CELLS, reason=""):
        return Ring(Slot(memory / "steps-0", Files()), cells, lambda _: reason)

    return make


def filled(made: Ring, steps: int) -> Ring:
    for step in range(1, steps + 1):
        assert made.write({"step": step, "words": "ä" * step}, contents(step)) > 1000
    return made


def whole(made: Ring, step: int) -> bool:
    """Whether a step can be read; if so, it is what was written."""
    read = made.read(step)
    if read is None:
        return False
    header, tensors = read
    assert header == {"step": step, "words": "ä" * step}
    for name, tensor in contents(step).items():
        assert torch.equal(tensors[name], tensor) and tensors[name].dtype == tensor.dtype
    return True


def test_the_newest_steps_are_there_for_the_next_process(ring):
    filled(ring(), 10)
    again = ring()
    assert again.read(9) is None and again.open()
    assert [step for step in range(15) if whole(again, step)] == [7, 8, 9, 10]
    filled(again, 11)
    assert [step for step in range(15) if whole(again, step)] == [8, 9, 10, 11]
    again.close()
    assert not ring().open()


def test_a_difference_that_outgrows_its_cell_is_kept(ring):
    made = filled(ring(), 6)
    assert made.write({"step": 7}, contents(7, 200_000))
    assert made.read(6) is None and torch.equal(made.read(7)[1]["codes"], contents(7, 200_000)["codes"])


def test_a_ring_of_fewer_cells_takes_the_place_of_one_of_more(ring):
    filled(ring(), 6)
    fewer = ring(2)
    assert fewer.open() and [step for step in range(9) if whole(fewer, step)] == [3, 4, 5, 6]
    filled(fewer, 8)
    assert [step for step in range(9) if whole(fewer, step)] == [7, 8]


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.7, 0.99])
def test_what_a_process_was_writing_when_it_ended_is_not_read(ring, share):
    """The new cell up to some byte over the old one, before and after its mark was there."""
    made = filled(ring(), 6)
    before = made.path.read_bytes()
    made.write({"step": 7, "words": "ä" * 7}, contents(7))
    after = made.path.read_bytes()
    start = 4096 + 7 % CELLS * struct.unpack("<8sIIQ", after[:24])[3]
    changed = [at for at in range(start + 24, len(after)) if before[at] != after[at]]
    cut = changed[int(share * len(changed))]
    for mark in (before[start : start + 24], after[start : start + 24], bytes(24)):
        torn = bytearray(after[:cut] + before[cut:])
        torn[start : start + 24] = mark
        made.path.write_bytes(torn)
        again = ring()
        assert again.open() and [step for step in range(9) if whole(again, step)] == (
            [3, 4, 5, 6] if cut == changed[0] and mark == before[start : start + 24] else [4, 5, 6]
        )


@pytest.mark.parametrize("damage", [b"", b"x", b"stepdiff" + bytes(16), bytes(5000)])
def test_what_is_no_ring_is_none(ring, damage):
    made = filled(ring(), 3)
    made.path.write_bytes(damage)
    assert not ring().open()
    assert whole(filled(ring(), 2), 2)


def test_a_ring_that_claims_to_be_larger_than_its_file_is_none(ring):
    made = filled(ring(), 3)
    with made.path.open("r+b") as file:
        file.truncate(10_000)
    assert not ring().open()


def test_without_room_nothing_is_kept_and_it_says_so(ring):
    made = ring(reason="no room")
    assert made.write({"step": 1}, contents(1)) == 0 and made.refused == "no room" and not made.path.exists()


def test_where_memory_has_no_room_the_process_keeps_it_for_itself(ring, tmp_path):
    made = ring()
    (tmp_path / "shoestring-0").write_text("no folder")
    assert whole(filled(made, 2), 2) and made.slot.lacking
    shutil.rmtree(tmp_path / "shoestring-0", ignore_errors=True)


def test_a_ring_that_is_found_is_leased_before_it_is_written_to(ring):
    filled(ring(), 3)
    again = ring(reason="no room")
    assert again.open() and whole(again, 3)
    assert again.write({"step": 4}, contents(4)) == 0 and again.refused and not again.path.exists()
