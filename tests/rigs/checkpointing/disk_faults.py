"""Full disks, quotas, read-only and broken devices: training continues, what was safe stays so, and the user is told.

Two ranks on two hosts train and save at all levels while one of their acts on files fails, or all of them for a while.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shoestring.checkpoint.tiers.disk import checked, manifests
from shoestring.checkpoint.tiers.file_acts import Files
from shoestring.core.errors import CheckpointError
from shoestring.testing.pool import Pool
from tests.rigs.checkpointing.known import RunSetup, Trainee
from tests.rigs.checkpointing.surroundings import copied, listening
from tests.rigs.checkpointing.trainee import kind_of

CODES = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
STEPS, HEALED = 8, 6  # steps of a run, and the one before which the device works again
PEERS, DISK = 3, 2  # steps between checkpoints; memory's are at every one
BATCH = 20
_BY_DESCRIPTOR = ("reserve", "write", "sync", "sync folder")  # the system names no path in their errors


@dataclass(frozen=True)
class Fault:
    """What fails on one rank: its acts [first, first + count), counted from the run's start."""

    rank: int
    first: int
    count: int
    code: int

    def __str__(self) -> str:
        return f"{errno.errorcode[self.code]} at act {self.first} of rank {self.rank}, {self.count} times"


@dataclass
class Failing(Files):
    """Counts acts, and lets some of them fail."""

    fault: Fault | None = None
    passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def before(self, act: str, path: Path, data: memoryview | bytes | Path = b"", at: int = 0) -> None:
        self.passed.append(f"{act}: {kind_of(path)}")
        number, fault = len(self.passed) - 1, self.fault
        if fault and fault.first <= number < fault.first + fault.count:
            self.failed.append(self.passed[-1])
            raise error_of(fault.code, act, path)


def error_of(code: int, act: str, path: Path) -> OSError:
    """What the system raises where an act fails."""
    error = OSError(code, os.strerror(code))
    if act not in _BY_DESCRIPTOR:
        error.filename = str(path)
    return error


@dataclass(frozen=True)
class RankOutcome:
    """What became of a run on one rank."""

    acts: list[str]
    """That could fail."""
    failed: list[str]
    wrong: list[str]


def survived(setting: RunSetup, fault: Fault | None) -> RankOutcome:
    """Train under a fault, then restore; a collective of the ranks."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    files = Failing(fault=fault if fault and fault.rank == rank else None)
    trainee, wrong = Trainee.of(setting, files), list[str]()
    healed, before = 0, dict[str, int]()
    with listening() as said:
        for step in range(1, STEPS + 1):
            if step == HEALED:
                before = {**trainee.checkpointer.safe}
                copied(setting.place, "now", "before")
                files.fault, healed = None, len(files.passed)
            wrong += _stepped(trainee, step, said)
    safe: dict[str, int] = {**trainee.checkpointer.safe}
    acts = files.passed[:healed]
    if safe["disk"] != STEPS:
        wrong.append(f"no checkpoint to disk after the device worked again: {safe}, {said}")
    trainee.checkpointer.close()
    wrong += _left(setting, rank)
    copied(setting.place, "now", "after")
    again = Trainee.of(setting)
    wrong += _restores(again, "after", safe)
    wrong += [f"killed before it worked again, {each}" for each in _restores(again, "before", before)]
    again.checkpointer.close()
    return RankOutcome(acts, files.failed, wrong)


def _stepped(trainee: Trainee, step: int, said: list[str]) -> Iterator[str]:
    """One step; what is wrong after it."""
    checkpointer, setting = trainee.checkpointer, trainee.setting
    trainee.at(step)
    checkpointer.wait()
    checkpointer.capture(False)
    checkpointer.drain()
    told = checkpointer.group.all_gather(said)  # of all steps, for each reason is given once
    folder = Path(checkpointer.settings.folder)
    if step % setting.disk_every == 0 and checkpointer.safe["disk"] != step and not named(told, folder):
        yield f"step {step} was not saved to disk, and nobody was told where it failed: {told}"
    if checkpointer.safe["disk"] and checkpointer.world.first:
        yield from _intact(folder, checkpointer.safe["disk"])


def named(told: Sequence[list[str]], folder: Path) -> bool:
    """Whether a warning names a path below the folder, and a reason that the system gives."""
    reasons = [os.strerror(code) for code in CODES]
    lines = [line for said in told for line in said]
    return any(f"`{folder}" in line and any(reason in line for reason in reasons) for line in lines)


def _intact(folder: Path, safe: int) -> Iterator[str]:
    there = {record.checkpoint.step: (path, record) for path, record in manifests(folder)}
    if safe not in there:
        yield f"step {safe} was safe on disk, there is {sorted(there)}"
        return
    try:
        checked(*there[safe])
    except CheckpointError as error:
        yield f"step {safe} was safe on disk: {error}"


def _left(setting: RunSetup, rank: int) -> Iterator[str]:
    """Temporary files that are still there after a good checkpoint."""
    dist.barrier()
    folders = [setting.disk(0), *map(setting.memory, range(setting.hosts))] if rank == 0 else []
    for path in (each for folder in folders for each in folder.rglob("*")):
        if path.name.endswith(".tmp") or ".shared" in path.name:
            yield f"`{path.name}` is left"
    dist.barrier()


def _restores(trainee: Trainee, left: str, safe: Mapping[str, int]) -> Iterator[str]:
    """Restore from everything that was left, without one host's memory, and from disk alone."""
    setting, least = trainee.setting, {"memory": "memory", "one host": "peers", "disk": "disk"}
    for what, level in least.items():
        copied(setting.place, left, "now")
        if dist.get_rank() == 0 and what != "memory":
            for host in range(setting.hosts) if what == "disk" else (0,):
                shutil.rmtree(setting.memory(host), ignore_errors=True)
        dist.barrier()
        step, reason = trainee.restored()
        if reason or (step or 0) < max(safe[level], safe["disk"]):
            yield f"from {what}: step {step} {reason}, safe was {dict(safe)}"


def several(folder: str, faults: Sequence[Mapping[str, int] | None]) -> list[dict[str, Any]]:
    """A scenario: a run for each of the faults."""
    found = []
    for number, fault in enumerate(faults):
        setting = RunSetup(folder=f"{folder}/{number}", ranks=dist.get_world_size(), peers_every=PEERS, disk_every=DISK)
        found.append(asdict(survived(setting, Fault(**fault) if fault else None)))
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(setting.place, ignore_errors=True)
    return found


def drawn(acts: Sequence[Sequence[str]], points: int, seed: int = 0) -> list[Fault]:
    """Faults at points spread evenly over the acts of all ranks: once, for some acts, or for some steps."""
    draw = random.Random(seed)
    every = [(rank, number) for rank, passed in enumerate(acts) for number in range(len(passed))]
    chosen = [every[len(every) * index // points] for index in range(points)]
    return [Fault(rank, number, draw.choice([1, 1, 4, 1000]), draw.choice(CODES)) for rank, number in chosen]


def injected(folder: Path, points: int, ranks: int = 2) -> Iterator[tuple[Fault, list[str]]]:
    """Runs under faults; of each what was not as it should be."""
    with Pool(ranks, timeout=600) as pool:
        passed = [each[0]["acts"] for each in pool.call(several, folder=str(folder), faults=[None])]
        faults = drawn(passed, points)
        for start in range(0, points, BATCH):
            batch = faults[start : start + BATCH]
            told = pool.call(several, folder=str(folder), faults=[asdict(fault) for fault in batch])
            for index, fault in enumerate(batch):
                wrong = [line for rank in told for line in rank[index]["wrong"]]
                if not any(rank[index]["failed"] for rank in told):
                    wrong.append("nothing failed")
                yield fault, [f"{fault}, {told[fault.rank][index]['failed'][:1]}: {line}" for line in wrong]
