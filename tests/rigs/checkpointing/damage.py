"""Damage of every kind to what is saved: each is found, all ranks fall back alike, and what they load is of one step.

A few ranks stay and restore again and again. Before each time the folders are put back as a run left them, something
is lost (nothing, one host's memory, all memory) and something is damaged; a model of the redundancy that knows nothing
of how the cache recovers says which step must be restored.
"""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shoestring.checkpoint.format.manifest import CheckpointId, Record
from shoestring.checkpoint.format.part import Part
from shoestring.checkpoint.tiers.disk import MANIFEST, checked
from shoestring.checkpoint.tiers.peer_copies import sets
from shoestring.checkpoint.tiers.slots import SEAL, sealed
from shoestring.core.errors import CheckpointError
from shoestring.testing.pool import Pool
from tests.rigs.checkpointing.known import PAGE, STEPS, RunSetup, Trainee

BATCH = 100  # corruptions of one call of the ranks
LOSSES = ("nothing", "nothing", "one host's memory", "all memory")


# -- what is left, by a model of its own ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A slot or a folder on disk: its record, and its parts' files by the parts' names."""

    checkpoint: CheckpointId
    hosts: tuple[int, ...]
    """That can read it."""
    record: Path
    parts: Mapping[str, Path]
    lengths: Mapping[str, int]

    @property
    def step(self) -> int:
        return self.checkpoint.step

    @property
    def memory(self) -> bool:
        return self.record.name != MANIFEST


def places(setting: RunSetup) -> list[Place]:
    """All that a run has left, without what has a damaged record."""
    found = []
    for host in range(setting.hosts):
        for path in sorted(setting.memory(host).rglob(f"*{SEAL}")):
            found.append((path, (host,)))
        if host == 0 or not setting.shared:
            hosts = tuple(range(setting.hosts)) if setting.shared else (host,)
            found += [(path, hosts) for path in sorted(setting.disk(host).glob(f"step-*/{MANIFEST}"))]
    return [place for path, hosts in found if (place := _place(path, hosts)) is not None]


def _place(path: Path, hosts: tuple[int, ...]) -> Place | None:
    try:
        record = Record.read(path)
    except CheckpointError:
        return None
    files = {name: path.parent / entry.file for name, entry in record.parts.items()}
    return Place(record.checkpoint, hosts, path, files, {n: e.nbytes for n, e in record.parts.items()})


def expected(setting: RunSetup, there: Sequence[Place], hurt: set[Path]) -> int | None:
    """The newest step of which every byte can still be had; None where there is none."""
    left = [place for place in there if place.record not in hurt and place.record.exists()]
    steps = sorted({place.step for place in left}, reverse=True)
    return next((step for step in steps if whole(setting, [p for p in left if p.step == step], hurt)), None)


def whole(setting: RunSetup, left: Sequence[Place], hurt: set[Path]) -> bool:
    def having(part: str) -> set[int]:
        return {host for p in left if part in p.parts and p.parts[part] not in hurt for host in p.hosts}

    def rebuilt(rank: int) -> bool:
        of = next(each for each in sets(setting.hosts, 4) if rank // setting.local in each)
        others = [host * setting.local + rank % setting.local for host in of if host != rank // setting.local]
        return bool(others) and all(having(f"private-{r}") & having(f"parity-{r}") for r in others)

    def spread(rank: int) -> bool:  # on disk by this rank, or in any host's memory by the rank at its place there
        twins = range(rank % setting.local, setting.ranks, setting.local)
        return bool(having(f"share-{rank}")) or any(having(f"rest-{twin}") for twin in twins if twin != rank)

    ranks = range(setting.ranks)
    own = all(having(f"private-{rank}") or rebuilt(rank) for rank in ranks)
    return own and (setting.hosts == 1 or all(spread(rank) for rank in ranks))


# -- damage -----------------------------------------------------------------------------------------------------------


Damage = Callable[[list[Place], random.Random], set[Path] | None]
"""Hurts something of what there is, and tells which files; None where there is nothing to hurt so."""


def _targets(there: Sequence[Place], prefix: str = "") -> list[tuple[Place, str]]:
    return [(p, name) for p in there for name in p.parts if p.record.name.startswith(prefix)]


def _hit(path: Path, change: Callable[[bytearray], bytes | bytearray]) -> set[Path] | None:
    before = path.read_bytes()
    after = bytes(change(bytearray(before)))
    path.write_bytes(after)
    return {path} if after != before else None


def _flipped(draw: random.Random, stop: int | None = None) -> Callable[[bytearray], bytearray]:
    def change(data: bytearray) -> bytearray:
        data[draw.randrange(min(len(data), stop or len(data)))] ^= 1 << draw.randrange(8)
        return data

    return change


def _zeroed(draw: random.Random) -> Callable[[bytearray], bytearray]:
    def change(data: bytearray) -> bytearray:
        start = draw.randrange(-(-len(data) // PAGE)) * PAGE
        data[start : start + PAGE] = bytes(len(data[start : start + PAGE]))
        return data

    return change


def _ways(draw: random.Random) -> Callable[[bytearray], bytes | bytearray]:
    """One of the plain kinds of damage."""
    return draw.choice([_flipped(draw), _zeroed(draw), lambda data: data[: draw.randrange(len(data))]])


def _part(change: Callable[[random.Random], Any], prefix: str = "") -> Damage:
    def damage(there: list[Place], draw: random.Random) -> set[Path] | None:
        if not (targets := _targets(there, prefix)):
            return None
        place, name = draw.choice(targets)
        return _hit(place.parts[name], change(draw))

    return damage


def _record(memory: bool) -> Damage:
    def damage(there: list[Place], draw: random.Random) -> set[Path] | None:
        targets = [place.record for place in there if place.memory == memory]
        return _hit(draw.choice(targets), _ways(draw)) if targets else None

    return damage


def _swapped(alike: Callable[[Place, str, Place, str], bool]) -> Damage:
    """Two files take each other's place."""

    def damage(there: list[Place], draw: random.Random) -> set[Path] | None:
        if not (targets := _targets(there)):
            return None
        place, name = draw.choice(targets)
        one = place.parts[name]
        others = [p.parts[n] for p, n in targets if alike(place, name, p, n) and p.parts[n] != one]
        return _exchange(one, draw.choice(others)) if others else None

    return damage


def _exchange(one: Path, other: Path) -> set[Path] | None:
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    return {one, other} if first != second else None


def _ranks(place: Place, name: str, other: Place, twin: str) -> bool:
    return place.step == other.step and name.split("-")[0] == twin.split("-")[0] and name != twin


def _checkpoints(place: Place, name: str, other: Place, twin: str) -> bool:
    return place.step != other.step and name == twin and place.memory == other.memory


def _records(there: list[Place], draw: random.Random) -> set[Path] | None:
    """The seals or manifests of two checkpoints take each other's place."""
    one = draw.choice(there)
    others = [p for p in there if p.memory == one.memory and p.step != one.step and p.hosts == one.hosts]
    return _exchange(one.record, draw.choice(others).record) if others else None


def _missing(there: list[Place], draw: random.Random) -> set[Path]:
    place = draw.choice(there)
    path = draw.choice([place.record, *place.parts.values()])
    path.unlink()
    return {path}


def _mixed(there: list[Place], draw: random.Random) -> set[Path] | None:
    """A file whose end is of another checkpoint: a write that was cut short, if there had been no seal."""
    found = [(p, n, q) for p, n in _targets(there) for q in there if _checkpoints(p, n, q, n) and n in q.parts]
    if not found:
        return None
    place, name, other = draw.choice(found)
    theirs = other.parts[name].read_bytes()

    def change(data: bytearray) -> bytes:
        cut = draw.randrange(len(data))
        return bytes(data[:cut]) + theirs[cut : len(data)]

    return _hit(place.parts[name], change)


DAMAGES: Mapping[str, Damage] = {
    "bit flip": _part(_flipped),
    "truncation": _part(lambda draw: lambda data: data[: draw.randrange(len(data))]),
    "zero page": _part(_zeroed),
    "header": _part(partial(_flipped, stop=400)),
    "replica": _part(_ways, "held-"),
    "parity": _part(_ways, "held-"),
    "manifest": _record(memory=False),
    "seal": _record(memory=True),
    "swapped ranks": _swapped(_ranks),
    "swapped generations": _swapped(_checkpoints),
    "swapped records": _records,
    "missing file": _missing,
    "mixed file": _mixed,
}


def found(path: Path, there: Sequence[Place]) -> bool:
    """Whether a check of the place that a damaged file is of says so."""
    place = next(each for each in there if path == each.record or path in each.parts.values())
    try:
        if not place.memory:
            checked(place.record.parent, Record.read(place.record))
            return False
        if (record := sealed(place.record)) is None:
            return True
        for entry in record.parts.values():
            file = place.record.parent / entry.file
            if not file.is_file() or file.stat().st_size < entry.nbytes:
                return True
            Part.open(file, entry.nbytes, entry.sums, slot=True).verify()
    except CheckpointError:
        return True
    return False


# -- trials -----------------------------------------------------------------------------------------------------------


def cut(there: Iterable[Place]) -> None:
    """Cut the files to what is in them: in memory they are longer, and are mostly damaged where nothing is."""
    for place in there:
        for name, path in place.parts.items():
            with path.open("r+b") as file:
                file.truncate(place.lengths[name])


def prepare(setting: RunSetup, trainee: Trainee) -> None:
    """Train, and keep what was left."""
    trainee.train(STEPS)
    dist.barrier()
    if dist.get_rank() == 0:
        cut(places(setting))
        (setting.place / "now").rename(setting.place / "left")
    dist.barrier()


def strike(setting: RunSetup, seed: str) -> tuple[str, int | None, list[str]]:
    """Put everything back, lose and damage something: what, the step that must be restored, and what went unseen."""
    draw = random.Random(seed)
    now = setting.place / "now"
    shutil.rmtree(now, ignore_errors=True)
    shutil.copytree(setting.place / "left", now)
    there, loss = places(setting), draw.choice(LOSSES)
    lost = {"nothing": 0, "one host's memory": 1}.get(loss, setting.hosts)
    for host in draw.sample(range(setting.hosts), lost):
        shutil.rmtree(setting.memory(host))
    left, hurt, told = [place for place in there if place.record.exists()], set[Path](), []
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        struck, name, whole = None, "", [place for place in left if not hurt & {place.record, *place.parts.values()}]
        while struck is None and whole:
            name = draw.choice(list(DAMAGES))
            struck = DAMAGES[name](whole, draw)
        if struck:
            hurt |= struck
            told.append(f"{name} of {', '.join(str(path.relative_to(now)) for path in sorted(struck))}")
    unseen = [f"unseen: {path}" for path in sorted(hurt) if not found(path, left)]
    return f"{loss} lost; {'; '.join(told)}", expected(setting, there, hurt), unseen


def trials(setting: Mapping[str, Any], first: int, count: int) -> list[str]:
    """A scenario: strike and restore so many times; what was not as it should be, one line each."""
    logging.getLogger("shoestring").setLevel(logging.CRITICAL)
    chosen = RunSetup(**setting)
    trainee, wrong = Trainee.of(chosen), []
    checkpointer = trainee.checkpointer
    try:
        if not (chosen.place / "left").exists():
            prepare(chosen, trainee)
        for number in range(first, first + count):
            struck = strike(chosen, f"{chosen.ranks} {number}") if dist.get_rank() == 0 else None
            what, step, unseen = checkpointer.group.all_gather(struck)[0]
            told = checkpointer.group.all_gather(trainee.restored())
            wrong += [f"trial {number}, {what}: {each}" for each in unseen]
            if any(each != [step, ""] for each in told):
                wrong.append(f"trial {number}, {what}: {told} in place of step {step}")
    finally:
        checkpointer.close()
    return wrong


def corrupted(
    setting: RunSetup, count: int, first: int = 0, *, pool: Pool, scenario: Callable[..., list[str]] = trials
) -> Iterator[tuple[int, list[str]]]:
    """Trials of one setting; after each batch the number of those done, and what was wrong."""
    for start in range(first, count, BATCH):
        size = min(BATCH, count - start)
        yield start + size, pool.call(scenario, setting=asdict(setting), first=start, count=size)[0]
