"""What the ranks do in the tests of parity: encode parts of lengths that are awkward, lose one, and rebuild it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from shoestring.checkpoint.format.manifest import CheckpointId
from shoestring.checkpoint.tiers import peer_copies
from shoestring.checkpoint.tiers.file_acts import Files
from shoestring.checkpoint.tiers.rank_group import RankGroup
from shoestring.checkpoint.tiers.slots import Slot
from shoestring.testing.scenarios import here


def part(rank: int, length: int) -> Tensor:
    return torch.randint(256, (length,), generator=torch.Generator().manual_seed(rank), dtype=torch.uint8)


def rebuilds(*, folder: str, lengths: list[int], lost: int, holders: dict[str, int], builder: int) -> bool:
    """Whether the lost rank's part comes out again, after holders and builder have got what they hold."""
    world = here()
    group = RankGroup.join(world)
    slot = Slot(Path(folder) / f"held-{world.rank}", Files())
    of = peer_copies.parity_set(group, 1, world.size, part(world.rank, lengths[world.rank]))
    peer_copies.encode(group, of, part(world.rank, lengths[world.rank]), slot, CheckpointId(1, 0, "a", world.size, 1))
    parity = slot.parts([peer_copies.PARITY])[f"{peer_copies.PARITY}-{world.rank}"]
    parities = [
        torch.frombuffer(bytearray(each), dtype=torch.uint8)
        for each in group.all_gather_bytes(parity.numpy().tobytes())
    ]
    mine = [int(rank) for rank, holder in holders.items() if holder == world.rank]
    into = torch.empty(lengths[lost] if world.rank == builder else 0, dtype=torch.uint8)
    how = peer_copies.Rebuild(of, lost, {int(rank): holder for rank, holder in holders.items()}, builder)
    good = peer_copies.rebuild(
        group, how, {rank: part(rank, lengths[rank]) for rank in mine}, {rank: parities[rank] for rank in mine}, into
    )
    group.close()
    return good and (world.rank != builder or torch.equal(into, part(lost, lengths[lost])))


def gathers(*, lengths: list[int]) -> bool:
    """Whether every rank's bytes are on this one."""
    world = here()
    group = RankGroup.join(world)
    expected = [part(rank, length).numpy().tobytes() for rank, length in enumerate(lengths)]
    found = group.all_gather_bytes(expected[world.rank])
    group.close()
    return found == expected
