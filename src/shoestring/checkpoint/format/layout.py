"""Determines which rank holds which shard of a tensor, and which rank saves the shard to which place.

A *box* is a rectangular region of a tensor, such as a shard. A *leaf* describes a box of one tensor of the saved state
that this rank holds: the box's data, and the ranks that hold the same box. A shard of a fused weight may consist of
several boxes, such as a third each of the queries, keys and values. A box that several ranks hold is saved once: each
of these ranks saves an equal share of its rows.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

from shoestring.core.errors import CheckpointError
from shoestring.core.shard_order import Orders, ShardOrder
from shoestring.sharded import is_sharded

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Offer = TypeVar("Offer")

# Kinds of parts, which differ in the hosts that hold their data. Parts of all kinds are saved in this host's memory.
PRIVATE = "private"  # only this host holds the data: also saved on disk, and in another host's memory
SHARE = "share"  # several hosts hold the data, and this rank writes it to disk
REST = "rest"  # several hosts hold the data, and another rank writes it to disk
KINDS = (PRIVATE, SHARE, REST)


@dataclass(frozen=True)
class Box:
    """A rectangular region of a tensor: its first index and its size in every dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def overlap(self, other: Box) -> Box | None:
        """Return the intersection of two boxes; None if the intersection is empty."""
        first = tuple(map(max, self.offset, other.offset))
        stop = (
            min(a + m, b + n) for a, m, b, n in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        shape = tuple(end - begin for begin, end in zip(first, stop, strict=True))
        return Box(first, shape) if all(extent > 0 for extent in shape) else None

    def without(self, other: Box) -> Iterator[Box]:
        """Yield disjoint boxes that cover this box except for the box `other`, which must lie inside this box."""
        offset, shape = list(self.offset), list(self.shape)
        for dim, (begin, extent) in enumerate(zip(other.offset, other.shape, strict=True)):
            for first, stop in ((offset[dim], begin), (begin + extent, offset[dim] + shape[dim])):
                if stop > first:
                    yield Box(
                        (*offset[:dim], first, *offset[dim + 1 :]), (*shape[:dim], stop - first, *shape[dim + 1 :])
                    )
            offset[dim], shape[dim] = begin, extent

    def inside(self, outer: Box) -> tuple[slice, ...]:
        """Return the slices that select this box from a tensor that holds the data of the box `outer`."""
        starts = (inner - outside for inner, outside in zip(self.offset, outer.offset, strict=True))
        return tuple(slice(start, start + extent) for start, extent in zip(starts, self.shape, strict=True))

    def rows(self, first: int, stop: int) -> Box:
        """Return the rows [first, stop) of this box, along the first dimension; the box of a scalar is returned
        unchanged."""
        if not self.shape:
            return self
        return Box((self.offset[0] + first, *self.offset[1:]), (stop - first, *self.shape[1:]))


@dataclass(frozen=True, eq=False)
class Leaf:
    """A region of one tensor: `data` holds the region `box` of a tensor of shape `shape`."""

    name: str
    shape: tuple[int, ...]
    box: Box
    holders: tuple[int, ...]
    """The ranks that hold this box, in ascending order."""
    data: Tensor
    place: Box | None = None
    """Place of the data in this rank's local tensor; None if the data is the whole local tensor."""

    @property
    def row_count(self) -> int:
        return self.box.shape[0] if self.box.shape else 1

    @property
    def nbytes(self) -> int:
        return self.data.numel() * self.data.element_size()

    def rows(self, first: int, stop: int) -> Leaf:
        """Return a leaf that has only the rows [first, stop) of this leaf."""
        if (first, stop) == (0, self.row_count):
            return self
        place = (self.place or whole(self.box.shape)).rows(first, stop)
        return replace(self, box=self.box.rows(first, stop), data=self.data[first:stop], place=place)


def leaves_of(name: str, tensor: Tensor, holders: Sequence[int], order: ShardOrder | None = None) -> list[Leaf]:
    """Return the leaves of a tensor: one leaf, unless this rank's shard consists of several regions.

    Args:
        holders: ranks that hold a copy of the tensor; ignored for a DTensor, whose mesh lists the ranks.
        order: see `boxes_of`.

    Raises:
        CheckpointError: the tensor is a DTensor that is neither replicated nor sharded, such as a partial sum.
    """
    shape = tuple(tensor.shape)
    if not is_sharded(tensor):
        return [Leaf(name, shape, whole(shape), tuple(holders), tensor)]
    local, boxes = tensor.to_local().detach(), boxes_of(name, tensor, order)
    # The same box is held by the ranks with this rank's coordinates on all mesh axes that shard the tensor.
    mesh, coordinate = tensor.device_mesh.mesh, tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    index = tuple(
        slice(None) if placement.is_replicate() else slice(at, at + 1)
        for at, placement in zip(coordinate, tensor.placements, strict=True)
    )
    same = tuple(sorted(mesh[index].flatten().tolist()))
    if len(boxes) == 1:
        return [Leaf(name, shape, boxes[0][0], same, local)]
    outer = whole(local.shape)
    return [Leaf(name, shape, box, same, local[place.inside(outer)], place) for box, place in boxes]


def whole(shape: Sequence[int]) -> Box:
    """Return the box that covers a whole tensor of this shape."""
    return Box((0,) * len(shape), tuple(shape))


def order_at(path: str, tensor: Tensor, orders: Orders) -> ShardOrder | None:
    """Look up the shard order of a tensor by its path, which contains the name of a parameter; None if the tensor has
    the usual order."""
    if not orders or not is_sharded(tensor):
        return None
    order = next((orders[part] for part in path.split("/") if part in orders), None)
    return order if order is not None and order.describes(tensor) else None


def boxes_of(name: str, tensor: DTensor, order: ShardOrder | None = None) -> list[tuple[Box, Box]]:
    """Return the regions of a DTensor that this rank holds, each as a box of the whole tensor and a box of the local
    tensor.

    Args:
        order: the order of the DTensor's rows or columns, if it differs from the order in the saved tensor.
    """
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    runs = [[(0, size)] for size in tensor.shape]
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    for parts, index, placement in zip(tensor.device_mesh.shape, coordinate, tensor.placements, strict=True):
        if isinstance(placement, _StridedShard):
            runs[placement.dim] = shard_runs(runs[placement.dim], parts, index, int(placement.split_factor))
        elif isinstance(placement, Shard):
            runs[placement.dim] = shard_runs(runs[placement.dim], parts, index)
        elif not placement.is_replicate():
            raise CheckpointError(f"cannot save `{name}`: its placement is {placement}", hint="replicate or shard it")
    starts = [list(itertools.accumulate((size for _, size in of_dim), initial=0)) for of_dim in runs]
    dims = [[(*run, at) for run, at in zip(*of_dim, strict=False)] for of_dim in zip(runs, starts, strict=True)]
    boxes = []
    for region in itertools.product(*dims):
        shape = tuple(size for _, size, _ in region)
        first, at = tuple(start for start, _, _ in region), tuple(at for _, _, at in region)
        boxes.append((Box(first, shape), Box(at, shape)))
    return boxes if order is None else [pair for box, place in boxes for pair in _reordered(box, place, order)]


def _reordered(box: Box, place: Box, order: ShardOrder) -> Iterator[tuple[Box, Box]]:
    """Split a box of a DTensor whose rows or columns are reordered into boxes of the saved tensor, each with its place
    in the local tensor."""
    dim = order.dim

    def at(box: Box, start: int, size: int) -> Box:
        return Box((*box.offset[:dim], start, *box.offset[dim + 1 :]), (*box.shape[:dim], size, *box.shape[dim + 1 :]))

    if not box.numel:
        yield box, place
    for start, size, distance in order.of_range(box.offset[dim], box.shape[dim]) if box.numel else ():
        yield at(box, start, size), at(place, place.offset[dim] + distance, size)


Run = tuple[int, int]
"""First index and size of a contiguous range of a dimension."""


def shard_runs(runs: Sequence[Run], parts: int, index: int, strides: int = 1) -> list[Run]:
    """Shard a dimension further: return the shard `index` of `parts` of the ranges `runs`, which sharding over other
    mesh axes has left.

    Args:
        runs: ranges of the dimension, which are treated as if they were concatenated.
        strides: number of chunks into which the ranges are divided first; each chunk is then divided into parts
            (torch's `_StridedShard`).

    Returns:
        The ranges of the shard, in their order in the shard; a single empty range if the shard is empty.
    """
    shares = list[Run]()
    for number in range(strides):
        for start, size in _chunk(_chunk(runs, strides, number), parts, index):
            if shares and sum(shares[-1]) == start:
                shares[-1] = (shares[-1][0], shares[-1][1] + size)
            else:
                shares.append((start, size))
    return shares or [(sum(runs[-1]), 0)]


def _chunk(runs: Sequence[Run], count: int, number: int) -> list[Run]:
    """Return the chunk `number` of `count`, divided as by torch.chunk: the last chunks may be smaller or empty."""
    total, at, stretches = sum(size for _, size in runs), 0, list[Run]()
    low, high = (min(edge * -(-total // count), total) for edge in (number, number + 1))
    for start, size in runs:
        first, stop = max(low - at, 0), min(high - at, size)
        if first < stop:
            stretches.append((start + first, stop - first))
        at += size
    return stretches


# -- who saves what ---------------------------------------------------------------------------------------------------


def divided(leaves: Iterable[Leaf], rank: int, local_size: int) -> dict[str, list[Leaf]]:
    """Map each kind to the pieces of `leaves` that this rank saves.

    The ranks of one host that hold a box divide the box into equal shares of rows, and each rank saves one share in the
    host's memory. If several hosts hold the box, each share is divided again into equal pieces, one per host, and a
    rank writes only the piece with its host's index to disk.
    """
    pieces: dict[str, list[Leaf]] = {kind: [] for kind in KINDS}
    for holders, group in itertools.groupby(sorted(leaves, key=lambda leaf: leaf.holders), lambda leaf: leaf.holders):
        same = list(group)
        hosts = sorted({holder // local_size for holder in holders})
        local = [holder for holder in holders if holder // local_size == rank // local_size]
        place, ways = local.index(rank), len(local)
        if len(hosts) == 1:
            pieces[PRIVATE] += stretch(same, place, place + 1, ways)
            continue
        # If the numbers of ranks that hold the box differ between hosts, the hosts' shares differ too. Then the first
        # host that holds the box writes the whole box.
        regular = len(holders) == ways * len(hosts)
        count, at = (len(hosts), hosts.index(rank // local_size)) if regular else (1, 0)
        first, stop, parts = place * count, (place + 1) * count, ways * count
        if not (regular or hosts[0] == rank // local_size):
            pieces[REST] += stretch(same, first, stop, parts)
            continue
        pieces[REST] += stretch(same, first, first + at, parts) if at else ()
        pieces[SHARE] += stretch(same, first + at, first + at + 1, parts)
        pieces[REST] += stretch(same, first + at + 1, stop, parts) if first + at + 1 < stop else ()
    return pieces


def stretch(leaves: Sequence[Leaf], first: int, stop: int, parts: int) -> Iterator[Leaf]:
    """Divide the concatenated leaves into `parts` shares of whole rows and equal bytes; yield shares [first, stop)."""
    ends = list(itertools.accumulate(leaf.nbytes for leaf in leaves))
    if not ends or not ends[-1]:
        if first == 0:  # tensors without elements are also saved
            yield from leaves
        return
    begin, end = (_cut(leaves, ends, ends[-1] * part // parts, part == parts) for part in (first, stop))
    for index, leaf in enumerate(leaves):
        low = max((index, 0), begin)
        high = min((index, leaf.row_count), end)
        if low < high or (leaf.nbytes == 0 and begin <= (index, 0) < end):
            yield leaf.rows(low[1], high[1]) if leaf.nbytes else leaf


def _cut(leaves: Sequence[Leaf], ends: Sequence[int], byte: int, last: bool) -> tuple[int, int]:
    """Return the first (leaf index, row) that begins at or after byte offset `byte` in the concatenated leaves."""
    if last:
        return len(leaves), 0
    if not byte:  # leaves without elements may come first
        return 0, 0
    index = bisect_left(ends, byte + 1)
    leaf = leaves[index]
    row = -(-(byte - (ends[index] - leaf.nbytes)) * leaf.row_count // leaf.nbytes)
    return (index + 1, 0) if row == leaf.row_count else (index, row)


# -- from where to read -----------------------------------------------------------------------------------------------


def sources(wanted: Box, offers: Iterable[tuple[Box, Offer]]) -> list[tuple[Box, Offer]] | None:
    """Cover the box `wanted` by disjoint boxes, each with the offer (source) from which to read the box; returns None
    if the offers do not cover `wanted`.

    Earlier offers are preferred.
    """
    missing, covering = [wanted] if wanted.numel else [], list[tuple[Box, Offer]]()
    for box, offer in offers:
        rest = []
        for part in missing:
            shared = part.overlap(box)
            if shared is None:
                rest.append(part)
            else:
                covering.append((shared, offer))
                rest.extend(part.without(shared))
        missing = rest
        if not missing:
            break
    return None if missing else covering
