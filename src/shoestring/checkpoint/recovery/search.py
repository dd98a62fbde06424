"""Resuming from the newest checkpoint that can be put together from what is left in memories and on disks.

All ranks tell what they see (*offers*), take the newest checkpoint whose every part can be had, verify what they will
read of it, vote, and only then read: from this host's memory, its disk, or other hosts. A damaged offer is dropped and
the choice made again, so that all ranks fall back together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoestring.checkpoint.format.layout import PRIVATE
from shoestring.checkpoint.format.manifest import CheckpointId, Record
from shoestring.checkpoint.recovery.reader import DISK, MEMORY, Offer, Reader, Wanted, opened
from shoestring.checkpoint.tiers import peer_copies
from shoestring.checkpoint.tiers.disk import manifests
from shoestring.checkpoint.tiers.rank_group import RankGroup
from shoestring.checkpoint.tiers.slots import Slot, seals
from shoestring.core.errors import CheckpointError
from shoestring.core.job import Kept
from shoestring.core.world import World

log = logging.getLogger("shoestring")


@dataclass(frozen=True)
class Choice:
    """A checkpoint, and what can be read of it."""

    checkpoint: CheckpointId
    offers: tuple[Offer, ...]
    lost: tuple[peer_copies.Rebuild, ...]
    """Parts that must be rebuilt from parity first."""

    @property
    def worst(self) -> str:
        """The farthest level that is needed: memory, peers or disk."""
        nearest = {}
        for offer in self.offers:
            level = DISK if offer.level == DISK else "peers" if offer.held else MEMORY
            rank = (MEMORY, "peers", DISK).index(level)
            nearest[offer.part] = min(rank, nearest.get(offer.part, 3))
        needed = [nearest[part] for part in nearest if part.startswith(PRIVATE)]
        return (MEMORY, "peers", DISK)[max([*needed, 1 if self.lost else 0])]


@dataclass(eq=False)
class Recovery:
    """One attempt to find and read a checkpoint; every method that talks is a collective."""

    kept: Mapping[str, Kept]
    world: World
    group: RankGroup
    bad: set[tuple[int, str]] = field(default_factory=set)
    """Offers that turned out to be damaged."""
    reason: str = ""
    """Why the last attempt failed."""
    unseen: str = ""
    """Why some rank could not look for offers; the same on all ranks once it is gathered."""

    @property
    def host(self) -> int:
        return self.world.rank // self.world.local_size

    # -- offers -------------------------------------------------------------------------------------------------------

    def offers(self, memory: Path | None, disk: Path | None) -> list[Offer]:
        """What all hosts have; the first rank of each looks."""
        seen: list[Any] = []
        if self.world.local_rank == 0:
            seen += self._seen(MEMORY, memory, lambda root: ((path.parent, each) for path, each in seals_under(root)))
            seen += self._seen(DISK, disk, manifests)
        gathered = self.group.all_gather([seen, self.unseen])
        self.unseen = next((unseen for _, unseen in gathered if unseen), "")
        offers = []
        for rank, (listed, _) in enumerate(gathered):
            for level, folder, text in listed:
                record = Record.loads(text.encode(), folder)
                notes = tuple(record.notes.items())
                for name, entry in record.parts.items():
                    path = str(Path(folder) / entry.file)
                    host = rank // self.world.local_size
                    offers.append(Offer(record.checkpoint, host, level, path, name, entry, notes))
        return offers

    def _seen(self, level: str, root: Path | None, look: Callable[[Path], Iterable[tuple[Path, Record]]]) -> list[Any]:
        """[level, folder, record] of what is found below `root`; nothing where that fails, as if it were damaged."""
        try:
            return [[level, str(path), each.dumps().decode()] for path, each in look(root)] if root else []
        except OSError as error:
            self.unseen = f"cannot look for checkpoints in `{root}`: {error.strerror or error}"
            log.warning("%s", self.unseen)
            return []

    def choices(self, offers: Iterable[Offer]) -> Iterator[Choice]:
        """The checkpoints of which every rank's private part can be had, newest first."""
        good = [offer for offer in offers if offer.key not in self.bad]
        for checkpoint in sorted({offer.checkpoint for offer in good}, reverse=True):
            there = tuple(offer for offer in good if offer.checkpoint == checkpoint)
            lost = self._rebuilds(there, checkpoint.ranks)
            if lost is not None:
                yield Choice(checkpoint, there, tuple(lost))

    def _rebuilds(self, offers: Sequence[Offer], ranks: int) -> list[peer_copies.Rebuild] | None:
        """How the parts that nobody has are rebuilt; None where one cannot be. Looks at each offer a few times only,
        and ends at the first rank that is lost: a record may speak of a million of them."""
        of: dict[str, list[Offer]] = {}
        sets: dict[int, list[Offer]] = {}
        for offer in offers:
            of.setdefault(offer.part, []).append(offer)
            for rank in dict(offer.notes).get("ranks", ()):
                sets.setdefault(rank, []).append(offer)
        rebuilds = []
        for rank in range(ranks):
            if f"{PRIVATE}-{rank}" not in of:
                how = self._rebuild(of, sets.get(rank, ()), rank)
                if how is None:
                    return None
                rebuilds.append(how)
        return rebuilds

    def _rebuild(
        self, by_part: Mapping[str, list[Offer]], sets: Iterable[Offer], lost: int
    ) -> peer_copies.Rebuild | None:
        """How a lost rank's part is rebuilt; None where too little of its set is left."""
        for offer in sets:
            notes = dict(offer.notes)
            of = peer_copies.ParitySet(*(tuple(notes[name]) for name in ("ranks", "lengths", "marks")))
            holders = {}
            for rank in of.ranks:
                having = _having(by_part, f"{PRIVATE}-{rank}", f"{peer_copies.PARITY}-{rank}")
                if rank != lost and having:
                    holders[rank] = having[0] * self.world.local_size + rank % self.world.local_size
            if len(holders) == len(of.ranks) - 1:
                busy = [rank // self.world.local_size for rank in holders.values()]
                host = peer_copies.pick_builder(range(self.world.hosts), busy)
                return peer_copies.Rebuild(
                    of, lost, holders, host * self.world.local_size + lost % self.world.local_size
                )
        return None

    # -- an attempt ---------------------------------------------------------------------------------------------------

    def attempt(self, choice: Choice, slot: Callable[[int], Slot]) -> Wanted | None:
        """What this rank needs, found whole; None, and more in `bad`, where something is damaged.

        Args:
            slot: a slot of this rank for the part of a former rank that is rebuilt here.
        """
        offers = list(choice.offers)
        for how in choice.lost:
            rebuilt = self._rebuilt(choice, how, slot)
            if self.bad & {offer.key for offer in rebuilt}:  # there is no room for it: not again
                self.bad |= {offer.key for offer in offers if offer.part.startswith(peer_copies.PARITY)}
            offers += rebuilt
            if self.bad & {offer.key for offer in offers}:
                return None
        reader = Reader(self.world, self.group, offers)
        if damaged := reader.open():
            self.bad |= damaged
            return None
        wanted, reads, reason = None, {}, ""
        try:
            reader.sort()
            wanted = Wanted(self.kept, self.world, choice.checkpoint, reader)
            reads = wanted.reads()
        except (CheckpointError, KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
            reason = f"{type(error).__name__}: {error}" if not isinstance(error, CheckpointError) else str(error)
        if reason := next(filter(None, self.group.all_gather(reason)), ""):
            self.give_up(replace(choice, offers=tuple(offers)), reason)
            return None
        assert wanted is not None
        if damaged := reader.verify(reads):
            self.bad |= damaged
            return None
        return wanted

    def give_up(self, choice: Choice, reason: str) -> None:
        """Take none of a choice's offers."""
        self.reason = f"step {choice.checkpoint.step}: {reason}"
        log.warning("skipping the checkpoint of %s", self.reason)
        self.bad |= {offer.key for offer in choice.offers}

    def _rebuilt(self, choice: Choice, how: peer_copies.Rebuild, slot: Callable[[int], Slot]) -> list[Offer]:
        """Rebuild a part in a slot of the builder, which then offers it."""
        parts: dict[int, Tensor] = {}
        parities: dict[int, Tensor] = {}
        damaged = []
        for rank, holder in how.holders.items():
            if holder != self.world.rank:
                continue
            for name, into in ((f"{PRIVATE}-{rank}", parts), (f"{peer_copies.PARITY}-{rank}", parities)):
                offer = next(each for each in choice.offers if (each.host, each.part) == (self.host, name))
                try:
                    part = opened(offer)
                    part.verify()
                    into[rank] = part.data
                except CheckpointError as error:
                    log.warning("%s", error)
                    damaged.append(list(offer.key))
        if any(told := self.group.all_gather(damaged)):
            self.bad |= {(host, path) for each in told for host, path in each}
            return []
        nbytes = how.of.lengths[how.of.ranks.index(how.lost)]
        name = f"{PRIVATE}-{how.lost}"
        builds = self.world.rank == how.builder
        target = slot(how.lost) if builds else None
        into = torch.empty(0, dtype=torch.uint8)
        if target is not None:
            target.begin()
            into = target.room(name, nbytes)
        record = None
        if peer_copies.rebuild(self.group, how, parts, parities, into) and target is not None:
            record = [target.seal(choice.checkpoint).dumps().decode(), str(target.stem.parent)]
        if (told := self.group.all_gather(record)[how.builder]) is None:
            log.warning("the state of former rank %s, rebuilt from parity, is not what it was", how.lost)
            self.bad |= {offer.key for offer in choice.offers if offer.part.startswith(peer_copies.PARITY)}
            return []
        text, folder = told
        entry = Record.loads(text.encode(), folder).parts[name]
        host = how.builder // self.world.local_size
        return [Offer(choice.checkpoint, host, MEMORY, str(Path(folder) / entry.file), name, entry)]


def _having(by_part: Mapping[str, list[Offer]], *parts: str) -> list[int]:
    """The hosts that have all of these parts, memory before disk."""
    offers = [offer for part in parts for offer in by_part.get(part, ())]
    ordered = sorted(offers, key=lambda offer: (offer.level == DISK, offer.held, offer.host))
    hosts = dict.fromkeys(offer.host for offer in ordered)
    return [host for host in hosts if all(any(o.host == host for o in by_part.get(part, ())) for part in parts)]


def seals_under(memory: Path) -> Iterator[tuple[Path, Record]]:
    """The seals of all slots of a run on this host."""
    for folder in sorted(path for path in memory.glob("host-*") if path.is_dir()):
        yield from seals(folder)
