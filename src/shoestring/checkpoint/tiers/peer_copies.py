"""Stores a rank's private part redundantly on other hosts, as a copy or as parity, so that the part survives the loss
of its host.

A copy is sent to a partner host. Hosts form pairs, because pairs survive more combinations of two lost hosts than a
ring does. Parity is the XOR code of the SCR library. In a set of N ranks, each rank divides its part of B bytes into
(N-1) segments, sends one segment to each of the other ranks, and stores the XOR of the segments that it receives.
Parity takes B/(N-1) bytes per rank instead of B, and the part of any single lost rank can be rebuilt.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoestring.checkpoint.format.checksum import crc32
from shoestring.checkpoint.format.layout import PRIVATE
from shoestring.checkpoint.format.manifest import CheckpointId, Record
from shoestring.checkpoint.tiers.rank_group import PIECE, RankGroup
from shoestring.checkpoint.tiers.slots import Slot

PARITY = "parity"
_WORD = 8  # number of bytes that are XORed at once
_STRIDE = PIECE // 2  # number of bytes of a segment that are rebuilt at once


def partner(host: int, hosts: int) -> int:
    """Return the host that holds the copy for `host`. Hosts form pairs; if the number of hosts is odd, the last three
    hosts form a ring."""
    if hosts % 2 and host >= hosts - 3:
        return hosts - 3 + (host - (hosts - 3) + 1) % 3
    return host ^ 1


def sets(hosts: int, size: int) -> list[range]:
    """Divide hosts into sets of at least `size` hosts, as equal as possible; if there are fewer hosts, they form one
    set."""
    count = max(1, hosts // size)
    edges = [hosts * index // count for index in range(count + 1)]
    return [range(first, stop) for first, stop in itertools.pairwise(edges)]


def copy(group: RankGroup, local: int, part: Tensor, slot: Slot, checkpoint: CheckpointId) -> Record:
    """Send this rank's part to its partner, receive another rank's part into `slot`, and seal the slot; a collective.

    Raises:
        ConnectionError: data was damaged during a transfer to any rank; raised on all ranks.
    """
    hosts, host = group.size // local, group.rank // local
    target = partner(host, hosts) * local + group.rank % local
    source = next(index for index in range(hosts) if partner(index, hosts) == host) * local + group.rank % local
    lengths = group.all_gather(len(part))
    slot.begin()
    room = slot.room(f"{PRIVATE}-{source}", lengths[source])
    group.exchange([(target, part)], [(source, room)])
    marks = group.all_gather([_mark(part), source, _mark(room)])  # checksums of the sent part and the received part
    for holder, (_, owner, mark) in enumerate(marks):
        if mark != marks[owner][0]:
            raise ConnectionError(f"rank {holder} holds a damaged copy of rank {owner}'s state")
    return slot.seal(checkpoint)


def _mark(data: Tensor) -> int:
    return crc32(data.numpy().data)


# -- parity -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ParitySet:
    """Ranks whose parts are encoded together, with the lengths of the parts in bytes."""

    ranks: tuple[int, ...]
    lengths: tuple[int, ...]
    marks: tuple[int, ...]
    """CRC-32 of each part."""

    @property
    def segment(self) -> int:
        """Size of a segment in bytes, which is also the size of the parity that a rank stores."""
        return -(-max(self.lengths) // (len(self.ranks) - 1) // _WORD) * _WORD

    def span(self, owner: int, keeper: int) -> tuple[int, int]:
        """Return (start, stop) of the segment of rank `owner` that is included in the parity of rank `keeper`."""
        place = [rank for rank in self.ranks if rank != owner].index(keeper)
        length = self.lengths[self.ranks.index(owner)]
        return min(place * self.segment, length), min((place + 1) * self.segment, length)


def parity_set(group: RankGroup, local: int, size: int, part: Tensor) -> ParitySet:
    """Return the parity set of this rank, which has one rank on each host of the set; a collective."""
    marks = group.all_gather([len(part), _mark(part)])
    hosts = next(members for members in sets(group.size // local, size) if group.rank // local in members)
    ranks = tuple(host * local + group.rank % local for host in hosts)
    return ParitySet(ranks, *zip(*(marks[rank] for rank in ranks), strict=True))


def encode(group: RankGroup, parity: ParitySet, part: Tensor, slot: Slot, checkpoint: CheckpointId) -> Record:
    """Compute in `slot` the parity that this rank stores for the other ranks of its set, and seal the slot; a
    collective.

    Raises:
        ConnectionError: data was damaged during a transfer to any rank; raised on all ranks.
    """
    slot.begin()
    room = slot.room(f"{PARITY}-{group.rank}", parity.segment)
    room.zero_()
    others = [rank for rank in parity.ranks if rank != group.rank]
    outgoing = {rank: part[slice(*parity.span(group.rank, rank))] for rank in others}
    spans = {rank: parity.span(rank, group.rank) for rank in others}
    widths = {rank: stop - start for rank, (start, stop) in spans.items()}
    damaged = set[int]()
    longest = max((*widths.values(), *map(len, outgoing.values())), default=0)
    buffers = {rank: torch.empty(min(PIECE, width), dtype=torch.uint8) for rank, width in widths.items()}
    for start in range(0, longest, PIECE):
        arriving = {rank: buffers[rank][: max(0, min(width - start, PIECE))] for rank, width in widths.items()}
        sends = [(rank, data[start : start + PIECE]) for rank, data in outgoing.items()]
        damaged |= group.exchange(sends, list(arriving.items()))
        for data in arriving.values():
            xor_(room[start : start + len(data)], data)
    for rank, sources in enumerate(group.all_gather(sorted(damaged))):
        if sources:
            raise ConnectionError(f"data that rank {sources[0]} sent to rank {rank} arrived damaged")
    return slot.seal(checkpoint, {name: list(values) for name, values in vars(parity).items()})


def xor_(target: Tensor, data: Tensor) -> None:
    """Compute target ^= data in place for uint8 tensors of equal length, in words of 8 bytes if both tensors are
    aligned."""
    whole = len(data) // _WORD * _WORD
    if target.data_ptr() % _WORD or data.data_ptr() % _WORD:
        whole = 0
    target[:whole].view(torch.int64).bitwise_xor_(data[:whole].view(torch.int64))
    target[whole:].bitwise_xor_(data[whole:])


@dataclass(frozen=True)
class Rebuild:
    """Describes how the part of a lost rank is rebuilt from the other ranks of its set."""

    of: ParitySet
    lost: int
    holders: dict[int, int]
    """Maps each former rank of the set, except the lost rank, to the present rank that holds its part and its
    parity."""
    builder: int
    """The present rank that rebuilds the lost part."""


def rebuild(
    group: RankGroup, how: Rebuild, parts: dict[int, Tensor], parities: dict[int, Tensor], into: Tensor
) -> bool:
    """Rebuild a lost part; a collective of all present ranks.

    Args:
        parts: maps each former rank whose data this rank holds to its part.
        parities: maps the same former ranks to their parities.
        into: memory for the lost part on the builder, (bytes,) uint8; empty on other ranks.

    Returns:
        On the builder, whether the rebuilt part has the checksum of the lost part; on all other ranks, True.

    Each holder computes the XOR of its parity and the segments that the other remaining ranks contributed to this
    parity. The result is the lost rank's segment, which the holder sends to the builder. No rank sends or receives much
    more than one part. Segments are processed in strides, and the loop is pipelined: a finished stride is sent to the
    builder together with the exchange for the next stride. So the loop has one more iteration than there are strides.
    """
    others = [rank for rank in how.of.ranks if rank != how.lost]
    held = [rank for rank in others if how.holders[rank] == group.rank]
    builds = group.rank == how.builder
    ready = {keeper: parities[keeper][:0] for keeper in held}  # segments of the lost rank in the previous stride
    for start in range(0, how.of.segment + _STRIDE, _STRIDE):
        pieces = {keeper: parities[keeper][start : start + _STRIDE].clone() for keeper in held}
        sends, receives, arriving = [], [], []
        for keeper in others:
            for other in others:
                if other == keeper:
                    continue
                low, high = how.of.span(other, keeper)
                width = max(0, min(high - low - start, _STRIDE))
                if how.holders[other] == group.rank:
                    sends.append((how.holders[keeper], parts[other][low + start : low + start + width]))
                if keeper in held:
                    buffer = torch.empty(width, dtype=torch.uint8)
                    receives.append((how.holders[other], buffer))
                    arriving.append((buffer, pieces[keeper][:width]))
            low, high = how.of.span(how.lost, keeper)
            first, stop = (min(at, high - low) for at in (max(0, start - _STRIDE), start))
            if keeper in held:
                sends.append((how.builder, ready[keeper][: stop - first]))
            if builds:
                receives.append((how.holders[keeper], into[low + first : low + stop]))
        group.exchange(sends, receives)  # the final checksum detects damaged data
        for buffer, target in arriving:
            xor_(target, buffer)
        ready = pieces
    return not builds or _mark(into) == how.of.marks[how.of.ranks.index(how.lost)]


def pick_builder(present: Sequence[int], busy: Sequence[int]) -> int:
    """Choose the host that rebuilds a part: the first of the `present` hosts that is not among the `busy` hosts, which
    hold data of the set; or the last present host if all are busy."""
    free = [rank for rank in present if rank not in busy]
    return free[0] if free else present[-1]
