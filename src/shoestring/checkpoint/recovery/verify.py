"""Verifies that the chosen checkpoint can be read, before anything is loaded.

The ranks rebuild lost parts from parity, memory-map the other parts, determine which bytes each rank needs, and verify
these bytes on the hosts that hold them. All ranks agree on the result, so that either all ranks load the checkpoint or
none does.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from shoestring.checkpoint.format.layout import PRIVATE
from shoestring.checkpoint.format.manifest import CheckpointId, Record
from shoestring.checkpoint.recovery.decide import ResumePlan
from shoestring.checkpoint.recovery.offers import MEMORY, Offer
from shoestring.checkpoint.recovery.reader import Damage, Reader, Wanted, gather_damage
from shoestring.checkpoint.tiers import peer_copies
from shoestring.checkpoint.tiers.keeper import REBUILT
from shoestring.checkpoint.tiers.slots import Slot
from shoestring.checkpoint.tiers.tiered import Checkpointer
from shoestring.core.errors import CheckpointError

log = logging.getLogger("shoestring")


@dataclass(frozen=True)
class Unusable:
    """The reasons why the chosen checkpoint cannot be loaded; equal on all ranks."""

    damaged: Damage = field(default_factory=dict)
    misfit: str = ""
    """Reason why the checkpoint cannot be loaded although no part is damaged; empty if parts are damaged."""


def verify(plan: ResumePlan, damaged: Mapping[tuple[int, str], str], checkpointer: Checkpointer) -> Wanted | Unusable:
    """Verify all data that this rank needs of the chosen checkpoint; a collective.

    Args:
        damaged: maps the key of an offer that is known to be damaged to a description of the damage.
    """
    assert plan.checkpoint is not None
    world, group = checkpointer.world, checkpointer.group
    offers = list(plan.offers)
    for how in plan.rebuilds:
        rebuilt = _rebuild(plan.checkpoint, plan.offers, how, checkpointer)
        if not isinstance(rebuilt, Offer):
            return Unusable(rebuilt)
        if rebuilt.key in damaged:  # the part was rebuilt before, but did not fit into this host's memory
            return Unusable(dict.fromkeys(_parities(plan.offers), "a part rebuilt from it did not fit into memory"))
        offers.append(rebuilt)
    reader = Reader(world, group, offers)
    if wrong := reader.open():
        return Unusable(wrong)
    wanted, reads, reason = None, {}, ""
    try:
        reader.sort()
        wanted = Wanted(checkpointer.kept, world, plan.checkpoint, reader)
        reads = wanted.reads()
    except CheckpointError as error:
        reason = str(error)
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
    if reason := next(filter(None, group.all_gather(reason)), ""):
        return Unusable(misfit=reason)
    assert wanted is not None
    return Unusable(wrong) if (wrong := reader.verify(reads)) else wanted


def _rebuild(
    checkpoint: CheckpointId, offers: tuple[Offer, ...], how: peer_copies.Rebuild, checkpointer: Checkpointer
) -> Offer | Damage:
    """Rebuild a part in a slot of rank `how.builder`; returns the rebuilt part as an offer, or the damaged offers."""
    world, group = checkpointer.world, checkpointer.group
    parts: dict[int, Tensor] = {}
    parities: dict[int, Tensor] = {}
    host, damaged = world.rank // world.local_size, []
    for rank, holder in how.holders.items():
        if holder != world.rank:
            continue
        for name, into in ((f"{PRIVATE}-{rank}", parts), (f"{peer_copies.PARITY}-{rank}", parities)):
            offer = next(offer for offer in offers if (offer.host, offer.part) == (host, name))
            try:
                part = offer.open()
                part.verify()
                into[rank] = part.data
            except CheckpointError as error:
                log.warning("%s", error)
                damaged.append((offer, error))
    if wrong := gather_damage(group, damaged):
        return wrong
    name, target, room = f"{PRIVATE}-{how.lost}", None, torch.empty(0, dtype=torch.uint8)
    if world.rank == how.builder:
        target = Slot(checkpointer.folder / f"{REBUILT}{how.lost}", checkpointer.files)
        target.begin()
        room = target.room(name, how.of.lengths[how.of.ranks.index(how.lost)])
    sealed = None
    if peer_copies.rebuild(group, how, parts, parities, room) and target is not None:
        sealed = [target.seal(checkpoint).dumps().decode(), str(target.stem.parent)]
    if (sealed := group.all_gather(sealed)[how.builder]) is None:
        wrong = f"the state of former rank {how.lost}, rebuilt from parity, has a wrong checksum"
        log.warning("%s", wrong)
        return dict.fromkeys(_parities(offers), wrong)
    text, folder = sealed
    entry = Record.loads(text.encode(), folder).parts[name]
    path = str(Path(folder) / entry.file)
    return Offer(checkpoint, how.builder // world.local_size, MEMORY, path, name, entry)


def _parities(offers: tuple[Offer, ...]) -> list[tuple[int, str]]:
    return [offer.key for offer in offers if offer.part.startswith(peer_copies.PARITY)]
