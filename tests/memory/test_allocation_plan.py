"""The static allocation plan: nothing that lives at the same time overlaps, and little is wasted."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.cli import main
from shoestring.memory.allocation_plan import ALIGNMENT, caching_allocator_reserves, described, plan
from shoestring.memory.tracing.recording import BlockName, MemoryFacts, MemoryProfile, MemoryWindow

MIB = 2**20


def window(blocks):
    """A window of (bytes, born, died) blocks, died -1 for those that stay."""
    columns = np.array(blocks, np.int64).reshape(-1, 3).T
    table = {"bytes": columns[0], "born": columns[1], "died": columns[2], "born_at": columns[1], "died_at": columns[2]}
    table |= {"address": np.arange(columns.shape[1]), "name": np.zeros(columns.shape[1], np.int64)}
    return MemoryWindow(table, [BlockName("other", "block")], 0)


def overlapping(found, of):
    """Pairs of blocks that live at the same time and share a byte."""
    columns = of.columns
    born, died = columns["born"], np.where(columns["died"] < 0, 10**9, columns["died"])
    low, high = found.addresses, found.addresses + columns["bytes"]
    in_time = (born[:, None] < died) & (born < died[:, None])
    in_space = (low[:, None] < high) & (low < high[:, None])
    return np.argwhere(np.triu(in_time & in_space, 1))


def least(blocks):
    """The best of all orders in which blocks are put at the lowest free address, which is the least there can be."""
    best = None
    for order in permutations(blocks):
        placed, top = [], 0
        for nbytes, born, died in order:
            taken = sorted((low, low + size) for low, size, b, d in placed if born < d and b < died)
            address = 0
            for low, high in taken:
                if address + nbytes <= low:
                    break
                address = max(address, high)
            placed.append((address, nbytes, born, died))
            top = max(top, address + nbytes)
        best = top if best is None else min(best, top)
    return best


LIVES = st.tuples(st.integers(1, 9), st.integers(0, 12), st.integers(1, 8)).map(
    lambda drawn: (drawn[0] * ALIGNMENT, drawn[1], drawn[1] + drawn[2])
)
STAYING = st.tuples(st.integers(1, 2000), st.integers(0, 12)).map(lambda drawn: (*drawn, -1))


@settings(max_examples=150)
@given(st.lists(LIVES | STAYING, max_size=40))
def test_no_two_live_buffers_overlap(blocks):
    of = window(blocks)
    found = plan(of)
    assert not len(overlapping(found, of))
    assert found.nbytes >= found.least == max((of.total(event) for event in range(30)), default=0)
    assert found.nbytes == max((found.addresses + of.columns["bytes"] + -of.columns["bytes"] % ALIGNMENT), default=0)
    assert not (found.addresses % ALIGNMENT).any()


def test_a_buffer_that_is_moved_onto_another_is_seen():
    of = window([(640, 0, 4), (64, 1, 3), (640, 2, -1)])
    found = plan(of)
    assert not len(overlapping(found, of))
    found.addresses[1] = found.addresses[2] + 576
    assert overlapping(found, of).tolist() == [[1, 2]]


@settings(max_examples=60)
@given(st.lists(LIVES, min_size=1, max_size=5))
def test_small_cases_are_within_a_fifth_of_the_best_that_there_is(blocks):
    best = least(blocks)
    assert best <= plan(window(blocks)).nbytes <= 1.2 * best


def test_what_a_stack_of_activations_needs_is_its_peak():
    deep = [(1000 * ALIGNMENT, layer, 40 - layer) for layer in range(20)]
    state = [(300 * ALIGNMENT, 0, -1)] * 5
    passing = [(70 * ALIGNMENT, event, event + 1) for event in range(40)]
    found = plan(window(deep + state + passing))
    assert found.nbytes == found.least


@pytest.mark.parametrize(
    ("blocks", "reserved"),
    [
        ([(100, 0, -1), (100, 1, -1)], 2 * MIB),  # one segment of small blocks
        ([(3 * MIB, 0, -1), (3 * MIB, 1, -1)], 20 * MIB),  # one segment of large ones
        ([(11 * MIB, 0, 1), (11 * MIB, 2, -1)], 12 * MIB),  # used again
        ([(11 * MIB, 0, 1), (13 * MIB, 2, -1)], 26 * MIB),  # too small to be used again
        ([(24 * MIB, 0, 1), (12 * MIB, 2, -1), (12 * MIB, 3, -1)], 24 * MIB),  # split
        ([(12 * MIB, 0, 4), (8 * MIB, 1, 3), (8 * MIB, 2, 5), (16 * MIB, 6, -1)], 32 * MIB),  # merged, as neighbours
    ],
)
def test_the_simulated_allocator_keeps_torchs_rules(blocks, reserved):
    assert caching_allocator_reserves(window(blocks)) == reserved


def test_viewing_a_recording_shows_the_plan_beside_what_the_allocator_takes(tmp_path, capsys):
    of = window([(11 * MIB, 0, 1), (13 * MIB, 2, -1)])
    profile = MemoryProfile({"cuda:0": of}, MemoryFacts(reserved={"cuda:0": 30 * MIB}))
    (line,) = described(profile)
    assert "takes 13 MiB, 1.000x" in line and "reserves 26 MiB (2.000x)" in line and "held 30 MiB in the run" in line
    profile.save(tmp_path / "memory.npz")
    assert main(["memory", "view", str(tmp_path / "memory.npz")]) == 0
    assert line in capsys.readouterr().out
