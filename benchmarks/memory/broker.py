"""Bars of `memory.broker`: four processes in a cgroup that has four fifths of what they wish for, and its own cost.

Two trainings with state on the host and a cache, one with checkpoints in memory, and one that is killed over and over.
The best fixed partition is searched for by running the same load with it.
"""

from __future__ import annotations

import json
import os
import random
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from benchmarks.harness import Bar, Deadline, Measured, NotRun
from benchmarks.intervals import of_median
from shoestring.core.leases import Priority
from shoestring.memory.broker.tenant import BrokeredMemory, Terms

MB = 1 << 20
ROUNDS = 200
SEARCHED = 12.0  # seconds for which a fixed partition is tried
LIMIT = 120.0  # seconds for what takes a fraction of one
OFFLOADING = {"kind": "offloading", "state": 64 * MB, "more": 48 * MB, "blocks": 24}
CHECKPOINTING = {"kind": "checkpointing", "state": 24 * MB}
KILLED = {"kind": "killed", "state": 48 * MB, "blocks": 2}
SLOTS, CHUNK = 3, 4 * MB
PARTITIONS = [  # blocks of both trainings, slots, blocks of what is killed
    (12, 12, 0, 0),
    (11, 11, 0, 0),
    (10, 10, 0, 0),
    (9, 9, 0, 0),
    (8, 8, 0, 2),
    (16, 4, 0, 0),
    (2, 2, 1, 0),
]
Partition = tuple[int, int, int, int]


@dataclass
class Cgroup:
    """A cgroup of our own for the memory of some processes, of version 1 or 2."""

    folder: Path

    @property
    def _one(self) -> bool:
        return (self.folder / "memory.limit_in_bytes").exists()

    def limit(self, nbytes: int) -> None:
        name = "memory.limit_in_bytes" if self._one else "memory.max"
        (self.folder / name).write_text(str(nbytes))

    def kills(self) -> int:
        text = (self.folder / ("memory.oom_control" if self._one else "memory.events")).read_text()
        return int(text.partition("oom_kill ")[2].split()[0])

    def peak(self) -> int:
        return int((self.folder / ("memory.max_usage_in_bytes" if self._one else "memory.peak")).read_text())


@contextmanager
def cgroup() -> Iterator[Cgroup]:
    two = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    folder = Path("/sys/fs/cgroup", "" if two else "memory", f"shoestring-bench-{os.getpid()}-{time.monotonic_ns()}")
    folder.mkdir()
    try:
        yield Cgroup(folder)
    finally:
        until = time.monotonic() + LIMIT
        while time.monotonic() < until:
            with suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.05)


@dataclass
class Load:
    """What the processes did."""

    steps: list[float] = field(default_factory=list)
    """Of each training, for each second of its CPU time; 0 if it died."""
    kills: int = 0
    refused: int = 0
    freed: list[float] = field(default_factory=list)
    """Seconds from each kill until what the process held was free."""
    peak: int = 0
    details: list[Any] = field(default_factory=list)


class Tenant:
    """One process of the load."""

    def __init__(self, how: dict[str, Any]) -> None:
        command = [sys.executable, "-m", "benchmarks.memory.broker_tenants", json.dumps(how)]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def line(self, limit: float = LIMIT) -> str:
        """The next line that it prints; empty if it died."""
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], limit)[0]:
            return ""
        return self.process.stdout.readline()

    def end(self) -> dict[str, Any] | None:
        """Let it end: what it has done; None if it died."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()
        text = self.line()
        self.kill()
        return json.loads(text) if text else None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(LIMIT)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


def run_load(limit: int | None, partition: Partition | None, *, rounds: int = 0, seconds: float = 0) -> Load:
    """Run all four processes, with the broker, or with a fixed partition.

    Args:
        limit: bytes of the cgroup.
        partition: what each may take beside what it needs; None for the broker.
        rounds: how often the fourth is killed; or else for how many `seconds` that goes on.
    """
    load, draw = Load(), random.Random(16)
    first, second, slots, third = partition or (10**6, 10**6, 1, 10**6)
    with cgroup() as group, tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        if limit is not None:
            group.limit(limit)
        folder = None if partition else f"{root}/user/broker"
        common = {"group": str(group.folder), "folder": folder, "root": root}  # removed with what the killed leave
        kinds = [(OFFLOADING, first), (OFFLOADING, second), (CHECKPOINTING, slots)]
        trainings = [Tenant(common | kind | {"allowed": allowed}) for kind, allowed in kinds]
        watch = BrokeredMemory(terms=Terms(Path(root, "user", "broker")))
        watch.join(watch=False)
        try:
            for training in trainings:
                training.line()
            until = time.monotonic() + seconds
            while len(load.freed) < rounds or time.monotonic() < until:
                fourth = Tenant(common | KILLED | {"allowed": third})
                load.freed.append(_killed_at_random(fourth, draw, watch, load))
            ended = [training.end() for training in trainings]
        finally:
            for training in trainings:
                training.kill()
            watch.leave()
        load.steps = [each["steps"] / each["cpu"] if each else 0.0 for each in ended]
        load.refused += sum(bool(each and each["refused"]) for each in ended)
        load.kills, load.peak, load.details = group.kills(), group.peak(), ended
    return load


def _killed_at_random(tenant: Tenant, draw: random.Random, watch: BrokeredMemory, load: Load) -> float:
    """Kill a process some time after its start; the seconds until nothing of it is leased."""
    late = draw.random() < 0.75  # after it has leased something, or at any time before
    if late:
        tenant.line()
    said = tenant.line(draw.uniform(0, 0.4))
    if said.startswith("{"):
        load.refused += json.loads(said)["refused"]
    identity = tenant.process.pid
    tenant.process.kill()
    began = time.monotonic()
    while _leases_of(watch, identity):
        time.sleep(0.001)
    freed = time.monotonic() - began
    tenant.kill()
    return freed


def _leases_of(watch: BrokeredMemory, process: int) -> bool:
    ledger = watch._ledger
    assert ledger is not None
    with ledger.locked(LIMIT):
        return any(seen.process == process for seen in ledger.scan())


@cache
def wishes() -> Load:
    """The load without a limit: what it takes and does then."""
    return run_load(None, (10**6, 10**6, 1, 10**6), seconds=SEARCHED)


def limit() -> int:
    return int(0.8 * wishes().peak)


@cache
def brokered() -> Load:
    return run_load(limit(), None, rounds=ROUNDS)


@cache
def best_partition() -> tuple[float, Partition]:
    """The fixed partition of those that kill nobody with which most is done, and its throughput."""
    found = [(run_load(limit(), partition, seconds=SEARCHED), partition) for partition in PARTITIONS]
    return max((throughput(load), partition) for load, partition in found if not load.kills)


def throughput(load: Load) -> float:
    """Mean over the trainings of steps a CPU second, as a part of what each does without a limit."""
    return statistics.mean(done / most for done, most in zip(load.steps, wishes().steps, strict=True))


def _sizes(load: Load) -> str:
    return f"{load.peak / MB:.0f} of {limit() / MB:.0f} MiB used at the peak, {wishes().peak / MB:.0f} wished for"


def killed_for_memory(_: Deadline) -> Measured:
    load = brokered()
    return Measured(load.kills, f"{len(load.freed)} kills at random; {_sizes(load)}")


def firm_refused(_: Deadline) -> Measured:
    return Measured(brokered().refused)


def slowest_to_be_free(_: Deadline) -> Measured:
    freed = sorted(brokered().freed)
    return Measured(freed[-1], f"median {statistics.median(freed):.3g} s of {len(freed)}")


def beside_the_best_partition(_: Deadline) -> Measured:
    best, partition = best_partition()
    found = throughput(brokered())
    note = f"{found:.3f} of what is done without a limit, against {best:.3f} with {partition} blocks and slots"
    return Measured(found / best, note)


def without_the_broker(_: Deadline) -> Measured:
    """Kills for memory where everybody takes what it wishes for."""
    load = run_load(limit(), (10**6, 10**6, 1, 10**6), seconds=SEARCHED)
    return Measured(load.kills, _sizes(load))


def cost_of_a_take(_: Deadline) -> Measured:
    """Median seconds of a lease that grows, among 20 tenants in processes of their own."""
    idle = "import sys, time; from pathlib import Path; from shoestring.core.leases import Priority; "
    idle += "from shoestring.memory.broker.tenant import BrokeredMemory, Terms; "
    idle += "m = BrokeredMemory(terms=Terms(Path(sys.argv[1]))); m.join(); "
    idle += "[m.take(f'{n}', 1 << 20, Priority.CACHE) for n in range(3)]; print(1, flush=True); sys.stdin.read()"
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        folder = Path(root, "user", "broker")
        command = [sys.executable, "-c", idle, str(folder)]
        others = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(19)]
        memory = BrokeredMemory(terms=Terms(folder))
        memory.join(watch=False)
        try:
            for other in others:
                assert other.stdout is not None and select.select([other.stdout], [], [], LIMIT)[0]
            times = []
            for number in range(1, 501):
                began = time.perf_counter()
                assert memory.take("growing", number << 12, Priority.CACHE)
                times.append(time.perf_counter() - began)
        finally:
            memory.leave()
            for other in others:
                other.kill()
                other.communicate()
    return of_median(times, f"95% below {sorted(times)[474]:.2g} s")


def limited(measure: Callable[[Deadline], Measured], deadline: Deadline) -> Measured | NotRun:
    """Measure where a cgroup can be made."""
    try:
        with cgroup():
            pass
    except OSError as error:
        return NotRun(f"cannot make a cgroup: {error.strerror}")
    return measure(deadline)


def rows() -> list[Bar]:
    load = "four processes, one killed 200 times, in a cgroup 20% below what they wish for: "
    return [
        Bar(
            "memory.broker-kills", f"{load}processes killed for memory", "<=", 0, partial(limited, killed_for_memory),
            kind="exact",
        ),
        Bar(
            "memory.broker-firm", f"{load}leases of what is required refused", "<=", 0, partial(limited, firm_refused),
            kind="exact",
        ),
        Bar(
            "memory.broker-dead", f"{load}longest time until the leases of a killed process are free (s)", "<=", 1.0,
            partial(limited, slowest_to_be_free),
        ),
        Bar(
            "memory.broker-throughput", f"{load}steps a CPU second, relative to the best fixed partition", ">=", 0.9,
            partial(limited, beside_the_best_partition), baseline=f"best of {len(PARTITIONS)} fixed partitions",
        ),
        Bar(
            "memory.broker-without", f"{load}without the broker, processes killed for memory", ">=", 1,
            partial(limited, without_the_broker), kind="exact",
        ),
        Bar("memory.broker-take", "median time of a lease among 20 tenants (s)", "<=", 1e-3, cost_of_a_take),
    ]  # fmt: skip
