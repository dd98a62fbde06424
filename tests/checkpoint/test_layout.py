"""Boxes, and which rank saves what, against brute force."""

import itertools

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shoestring.checkpoint.format.layout import (
    KINDS,
    PRIVATE,
    REST,
    SHARE,
    Box,
    Leaf,
    divided,
    shard_runs,
    sources,
)

EXTENT = 5  # of the arrays in which boxes are marked


@st.composite
def boxes(draw, dimensions, inside=None):
    offset, shape = [], []
    for dim in range(dimensions):
        low = inside.offset[dim] if inside else 0
        high = low + inside.shape[dim] if inside else EXTENT
        first = draw(st.integers(low, high))
        offset.append(first)
        shape.append(draw(st.integers(0, high - first)))
    return Box(tuple(offset), tuple(shape))


def marked(box):
    """An array with a 1 where the box is."""
    mask = np.zeros((EXTENT,) * len(box.shape), dtype=int)
    mask[box.inside(Box((0,) * len(box.shape), mask.shape))] += 1
    return mask


dimensions = st.integers(0, 3)


@given(st.data(), dimensions)
def test_overlap(data, dims):
    one, other = data.draw(boxes(dims)), data.draw(boxes(dims))
    shared, expected = one.overlap(other), marked(one) * marked(other)
    if shared is None:
        assert not expected.any()
    else:
        assert (marked(shared) == expected).all() and shared.numel == expected.sum() > 0


@given(st.data(), dimensions)
def test_what_is_without_a_part_covers_the_rest_once(data, dims):
    whole = data.draw(boxes(dims))
    part = data.draw(boxes(dims, whole))
    rest = sum((marked(each) for each in whole.without(part)), np.zeros((EXTENT,) * dims, dtype=int))
    assert (rest == marked(whole) - marked(part)).all()


@given(st.data(), dimensions)
def test_sources_cover_what_is_wanted_once_from_the_earliest_offer(data, dims):
    wanted = data.draw(boxes(dims))
    offers = [(data.draw(boxes(dims)), number) for number in range(data.draw(st.integers(0, 5)))]
    found = sources(wanted, offers)
    first = np.full((EXTENT,) * dims, -1)
    for box, number in reversed(offers):
        first[marked(box).astype(bool)] = number
    needed = marked(wanted).astype(bool)
    if found is None:
        assert (first[needed] == -1).any()
        return
    got = np.full((EXTENT,) * dims, -1)
    for box, number in found:
        assert (got[marked(box).astype(bool)] == -1).all()
        got[marked(box).astype(bool)] = number
    assert (got[needed] == first[needed]).all() and (got[~needed] == -1).all() and (first[needed] >= 0).all()


# -- who saves what ---------------------------------------------------------------------------------------------------


@st.composite
def jobs(draw):
    """(ranks of a host, what each rank holds): tensors whose rows are cut over rank groups, which others replicate."""
    hosts, local = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    held = [[] for _ in range(hosts * local)]
    for number in range(draw(st.integers(1, 4))):
        groups = draw(st.sampled_from(["all", "own", "host", "twins", "some"]))
        cut = {
            "all": [tuple(range(hosts * local))],
            "own": [(rank,) for rank in range(hosts * local)],
            "host": [tuple(range(h * local, (h + 1) * local)) for h in range(hosts)],
            "twins": [tuple(range(place, hosts * local, local)) for place in range(local)],
            "some": [tuple(sorted(draw(st.sets(st.integers(0, hosts * local - 1), min_size=1))))],
        }[groups]
        rows = [draw(st.integers(0, 7)) for _ in cut]
        width = draw(st.integers(0, 3))
        scalar = len(cut) == 1 and draw(st.booleans())
        whole = torch.randint(255, () if scalar else (sum(rows), width), dtype=torch.uint8)
        for index, holders in enumerate(cut):
            first, extent = sum(rows[:index]), rows[index]
            box = Box((), ()) if scalar else Box((first, 0), (extent, width))
            data = whole if scalar else whole[first : first + extent]
            for rank in holders:
                held[rank].append(Leaf(f"t{number}", tuple(whole.shape), box, holders, data))
    return local, held


def spots(leaf):
    """Each element of a leaf with its value; one without elements is one spot itself."""
    if not leaf.data.numel():
        return [(leaf.name, leaf.box.offset, leaf.box.shape)]
    sides = [range(offset, offset + extent) for offset, extent in zip(leaf.box.offset, leaf.box.shape, strict=True)]
    values = leaf.data.flatten().tolist()
    return [(leaf.name, at, value) for at, value in zip(itertools.product(*sides), values, strict=True)]


def all_spots(leaves):
    return [spot for leaf in leaves for spot in spots(leaf)]


def elements(found):
    """Without those that stand for an empty tensor."""
    return [spot for spot in found if isinstance(spot[2], int)]


@given(jobs())
def test_disk_gets_everything_once_and_each_host_keeps_all_that_its_ranks_hold(job):
    local, held = job
    saved = [divided(leaves, rank, local) for rank, leaves in enumerate(held)]
    disk = all_spots(leaf for found in saved for kind in (PRIVATE, SHARE) for leaf in found[kind])
    everything = set(all_spots(leaf for leaves in held for leaf in leaves))
    assert set(disk) == everything
    assert len(elements(disk)) == len(elements(everything))
    for host in range(len(held) // local):
        ranks = range(host * local, (host + 1) * local)
        kept = elements(all_spots(leaf for rank in ranks for kind in KINDS for leaf in saved[rank][kind]))
        assert set(kept) == set(elements(all_spots(leaf for rank in ranks for leaf in held[rank])))
        assert len(kept) == len(set(kept))


@given(jobs())
def test_only_what_no_other_host_has_is_private(job):
    local, held = job
    for rank, leaves in enumerate(held):
        found = divided(leaves, rank, local)
        for kind, several in ((PRIVATE, False), (SHARE, True), (REST, True)):
            assert all((len({r // local for r in leaf.holders}) > 1) == several for leaf in found[kind])


def test_a_tensor_without_elements_is_saved_wherever_it_stands():
    def leaf(name, *shape):
        return Leaf(name, shape, Box((0,) * len(shape), shape), (0, 1), torch.zeros(shape))

    for order in itertools.permutations([leaf("a", 0, 3), leaf("b", 4), leaf("c", 0)]):
        found = [divided(order, rank, 1) for rank in range(2)]
        assert sorted({each.name for each in found[0][SHARE] + found[1][SHARE]}) == ["a", "b", "c"]


def test_equal_shares():
    """Four hosts of two ranks hold one tensor: each rank keeps half of it, and writes an eighth."""
    leaf = Leaf("w", (64, 3), Box((0, 0), (64, 3)), tuple(range(8)), torch.arange(192).view(64, 3))
    for rank in range(8):
        found = divided([leaf], rank, 2)
        rows = {kind: sum(each.row_count for each in found[kind]) for kind in KINDS}
        assert rows == {PRIVATE: 0, SHARE: 8, REST: 24}


@given(st.integers(0, 23), st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3), st.data()), max_size=3))
def test_a_shard_over_several_mesh_axes_is_what_torch_makes_it(size, axes):
    """Each placement divides what those before it have left, into chunks that need not be equal."""
    rows, runs = torch.arange(size), [(0, size)]
    for parts, strides, data in axes:
        index = data.draw(st.integers(0, parts - 1))
        placement = Shard(0) if strides == 1 else _StridedShard(0, split_factor=strides)
        rows = placement._split_tensor(rows, parts, with_padding=False)[0][index]
        runs = shard_runs(runs, parts, index, strides)
    assert [row for first, extent in runs for row in range(first, first + extent)] == rows.tolist()
    assert all(extent for _, extent in runs) or len(runs) == 1
