"""What other hosts keep of a rank's private part, so that it survives its host: a copy, or parity over a set of hosts.

Copies go to a partner (hosts in pairs survive more double losses than a ring). Parity is the XOR code of SCR's level
XOR: a rank of a set of N cuts its part into N - 1 segments, one for each of the others, and each keeps the XOR of what
it was sent. That is B / (N - 1) bytes a rank in place of B, and any one rank of the set can be rebuilt.
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
_WORD = 8  # bytes that are XORed at once
_STRIDE = PIECE // 2  # bytes of a segment that are rebuilt at once; a rebuild takes two strides longer than its bytes


def partner(host: int, hosts: int) -> int:
    """The host that keeps this one's copy: of pairs, and of a ring of the last three where their number is odd."""
    if hosts % 2 and host >= hosts - 3:
        return hosts - 3 + (host - (hosts - 3) + 1) % 3
    return host ^ 1


def sets(hosts: int, size: int) -> list[range]:
    """The hosts in sets of about `size`, none smaller unless there are fewer."""
    count = max(1, hosts // size)
    edges = [hosts * index // count for index in range(count + 1)]
    return [range(first, stop) for first, stop in itertools.pairwise(edges)]


def copy(group: RankGroup, local: int, part: Tensor, slot: Slot, checkpoint: CheckpointId) -> Record:
    """Send this rank's part to its partner, and seal in `slot` what another one sent; a collective.

    Raises:
        ConnectionError: on all ranks: what some rank sealed is not what was sent to it.
    """
    hosts, host = group.size // local, group.rank // local
    target = partner(host, hosts) * local + group.rank % local
    source = next(h for h in range(hosts) if partner(h, hosts) == host) * local + group.rank % local
    lengths = group.all_gather(len(part))
    slot.begin()
    room = slot.room(f"{PRIVATE}-{source}", lengths[source])
    group.exchange([(target, part)], [(source, room)])
    marks = group.all_gather([_mark(part), source, _mark(room)])  # what arrived, read again from where it lies
    for holder, (_, of, mark) in enumerate(marks):
        if mark != marks[of][0]:
            raise ConnectionError(f"rank {holder} holds another copy of rank {of}'s state than was sent")
    return slot.seal(checkpoint)


def _mark(data: Tensor) -> int:
    return crc32(data.numpy().data)


# -- parity -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ParitySet:
    """Ranks whose parts are coded together, with the parts' lengths in bytes."""

    ranks: tuple[int, ...]
    lengths: tuple[int, ...]
    marks: tuple[int, ...]
    """CRC-32 of each part."""

    @property
    def segment(self) -> int:
        """Bytes of a segment, and of the parity that a rank keeps."""
        return -(-max(self.lengths) // (len(self.ranks) - 1) // _WORD) * _WORD

    def span(self, of: int, keeper: int) -> tuple[int, int]:
        """(start, stop) of the segment of rank `of` that goes into the parity of rank `keeper`."""
        place = [rank for rank in self.ranks if rank != of].index(keeper)
        length = self.lengths[self.ranks.index(of)]
        return min(place * self.segment, length), min((place + 1) * self.segment, length)


def parity_set(group: RankGroup, local: int, size: int, part: Tensor) -> ParitySet:
    """The set of this rank: one rank of each host in it; a collective."""
    marks = group.all_gather([len(part), _mark(part)])
    hosts = next(members for members in sets(group.size // local, size) if group.rank // local in members)
    ranks = tuple(host * local + group.rank % local for host in hosts)
    return ParitySet(ranks, *zip(*(marks[rank] for rank in ranks), strict=True))


def encode(group: RankGroup, of: ParitySet, part: Tensor, slot: Slot, checkpoint: CheckpointId) -> Record:
    """Seal in `slot` the parity that this rank keeps for the others of its set; a collective.

    Raises:
        ConnectionError: on all ranks: what arrived on some rank is not what was sent to it.
    """
    slot.begin()
    room = slot.room(f"{PARITY}-{group.rank}", of.segment)
    room.zero_()
    others = [rank for rank in of.ranks if rank != group.rank]
    outgoing = {rank: part[slice(*of.span(group.rank, rank))] for rank in others}
    widths = {rank: of.span(rank, group.rank) for rank in others}
    damaged = _xor_in(group, room, outgoing, {rank: stop - start for rank, (start, stop) in widths.items()})
    for rank, sources in enumerate(group.all_gather(sorted(damaged))):
        if sources:
            raise ConnectionError(f"what rank {sources[0]} sent to rank {rank} did not arrive whole")
    return slot.seal(checkpoint, {name: list(each) for name, each in vars(of).items()})


def _xor_in(group: RankGroup, room: Tensor, outgoing: dict[int, Tensor], widths: dict[int, int]) -> set[int]:
    """XOR what arrives from each rank into `room`, a piece at a time; the ranks of which it did not arrive whole."""
    damaged = set[int]()
    longest = max((*widths.values(), *map(len, outgoing.values())), default=0)
    buffers = {rank: torch.empty(min(PIECE, width), dtype=torch.uint8) for rank, width in widths.items()}
    for start in range(0, longest, PIECE):
        arriving = {rank: buffers[rank][: max(0, min(width - start, PIECE))] for rank, width in widths.items()}
        sends = [(rank, data[start : start + PIECE]) for rank, data in outgoing.items()]
        damaged |= group.exchange(sends, list(arriving.items()))
        for data in arriving.values():
            xor_(room[start : start + len(data)], data)
    return damaged


def xor_(target: Tensor, data: Tensor) -> None:
    """target ^= data, both uint8 of one length."""
    whole = len(data) // _WORD * _WORD
    if target.data_ptr() % _WORD or data.data_ptr() % _WORD:
        whole = 0
    target[:whole].view(torch.int64).bitwise_xor_(data[:whole].view(torch.int64))
    target[whole:].bitwise_xor_(data[whole:])


@dataclass(frozen=True)
class Rebuild:
    """How the part of a lost rank is rebuilt from its set."""

    of: ParitySet
    lost: int
    holders: dict[int, int]
    """Of each other rank of the set as it was: the present rank that has its part and its parity."""
    builder: int
    """The present rank that the part is rebuilt on."""


def rebuild(
    group: RankGroup, how: Rebuild, parts: dict[int, Tensor], parities: dict[int, Tensor], into: Tensor
) -> bool:
    """Rebuild a lost part; a collective of all present ranks.

    Args:
        parts: of former ranks that this rank is the holder of: their parts; `parities` likewise.
        into: (bytes of the lost part,) on the builder, and of no length elsewhere.

    Returns:
        Whether, on the builder, what came out is what the lost rank had.

    Each holder k XORs its parity with the others' segments for it, which leaves the lost rank's segment for k; the
    builder collects those. No rank sends or receives more than about one part, and none waits for another's end: a
    piece that is ready goes to the builder beside the exchange of the next one.
    """
    others = [rank for rank in how.of.ranks if rank != how.lost]
    held = [rank for rank in others if how.holders[rank] == group.rank]
    builds = group.rank == how.builder
    ready = {keeper: parities[keeper][:0] for keeper in held}  # of the stride before
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
        group.exchange(sends, receives)  # what does not arrive whole shows in the mark of what comes out
        for buffer, target in arriving:
            xor_(target, buffer)
        ready = pieces
    return not builds or _mark(into) == how.of.marks[how.of.ranks.index(how.lost)]


def pick_builder(present: Sequence[int], busy: Sequence[int]) -> int:
    """The present rank that rebuilds: one that holds nothing of the set if there is one, else the last."""
    free = [rank for rank in present if rank not in busy]
    return free[0] if free else present[-1]
