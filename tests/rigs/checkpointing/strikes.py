"""Faults that strike a rank of a small run at named points, several in one start; and what such a rank tells."""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from shoestring.checkpoint.tiers import file_acts
from shoestring.checkpoint.tiers.file_acts import Lock
from shoestring.core.job import Job
from shoestring.naming import resolve
from tests.rigs.checkpointing.disk_faults import error_of
from tests.rigs.checkpointing.known import RunSetup
from tests.rigs.checkpointing.trainee import (
    REPLAYED,
    FaultyRun,
    Killer,
    digest,
    safe_steps,
    say,
    train,
)

Kind = Literal["kill", "stop", "full", "slow", "cut", "clock"]
PACING = 47  # SO_MAX_PACING_RATE, which Python has no name for: bytes a second that the system sends of a connection


@dataclass(frozen=True, kw_only=True)
class Strike:
    """A fault on one rank, when it passes a named point for the `count`-th time."""

    kind: Kind
    rank: int
    point: str
    count: int = 1
    amount: float = 0.0
    """Seconds of "stop" (SIGSTOP), and by which "clock" is set back; acts on files that fail after "full"; bytes a
    second of all connections after "slow". "kill" is SIGKILL, "cut" shuts all connections down."""


@dataclass(frozen=True, kw_only=True)
class StruckStart:
    """What a rank is told of the start that it is part of."""

    setup: RunSetup
    strikes: Sequence[Strike] = ()
    timeout: float
    """Seconds that an exchange may take."""
    waits: float
    """Seconds that a lock is waited for."""
    elsewhere: bool = False
    """Whether it runs on other hosts, from which locks on the disk do not reach those of an earlier start."""
    planted: str = ""
    """Name, `module:function`, of what is called first: tests plant a fault in the code under test by it."""

    @classmethod
    def loads(cls, text: str) -> StruckStart:
        told = json.loads(text)
        strikes = tuple(Strike(**each) for each in told.pop("strikes"))
        return cls(setup=RunSetup(**told.pop("setup")), strikes=strikes, **told)

    def dumps(self) -> str:
        return json.dumps(asdict(self))


@dataclass
class Striker(Killer):
    """Counts what a rank does, and strikes it.

    Args:
        unlocked: the folder in which locks keep nobody out.
    """

    task: FaultyRun
    strikes: Sequence[Strike]
    unlocked: Path | None = None
    _failing: int = 0
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        super().__init__("", 0)
        self._left = {strike: strike.count for strike in self.strikes}

    def before(self, act: str, path: Path, data: memoryview | bytes | Path = b"", at: int = 0) -> None:
        super().before(act, path, data, at)
        with self._guard:
            fails = self._failing > 0
            self._failing -= fails
        if fails:
            raise error_of(errno.ENOSPC, act, path)

    def reach(self, point: str) -> None:
        self.passed.add(point)
        with self._guard:  # of several threads
            here = [strike for strike in self._left if strike.point == point]
            for strike in here:
                self._left[strike] -= 1
            due = [strike for strike in here if self._left[strike] == 0]
        for strike in due:
            say(self.task, strike.rank, "struck", json.dumps([self.task.start, asdict(strike)]))
            self._strike(strike)

    def _strike(self, strike: Strike) -> None:
        match strike.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "full":
                self._failing = int(strike.amount)
            case "slow":
                for each in connections():
                    each.setsockopt(socket.SOL_SOCKET, PACING, int(strike.amount))
            case "cut":
                for each in connections():
                    with suppress(OSError):  # the other end was quicker
                        each.shutdown(socket.SHUT_RDWR)
            case "clock":
                os.environ["FAKETIME"] = f"-{strike.amount:.0f}"  # which libfaketime looks up at every call

    def lock(self, path: Path, says: str, wait: float | None = None) -> Lock:
        if path.parent != self.unlocked:
            return super().lock(path, says, wait)
        self.before("lock", path)
        held = Lock(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        path.write_text(says)
        return held


def connections() -> Iterator[socket.socket]:
    """This process's connections to others."""
    for path in Path("/proc/self/fd").iterdir():
        try:
            copy = socket.socket(fileno=os.dup(int(path.name)))
        except OSError:  # no socket, or closed meanwhile
            continue
        with copy:
            if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                with suppress(OSError):  # it only listens
                    copy.getpeername()
                    yield copy


def work(text: str, start: str, rank: int) -> None:
    """One rank of a start that is struck; it is forked.

    Args:
        text: the task, in JSON.
        start: a StruckStart.
    """
    task, struck = FaultyRun(**json.loads(text)), StruckStart.loads(start)
    setup, host = struck.setup, rank // task.local
    disk, memory = setup.disk(host), setup.memory(host + setup.hosts * struck.elsewhere)
    task = replace(task, settings={**task.settings, "folder": str(disk), "memory_folder": str(memory)})
    os.environ |= {"LOCAL_RANK": str(rank % task.local), "LOCAL_WORLD_SIZE": str(task.local)}
    file_acts.WAIT = struck.waits
    if "libfaketime" in Path("/proc/self/maps").read_text():
        time.sleep = _sleep
    if struck.planted:
        resolve(struck.planted, "planted")()
    striker = Striker(task, [s for s in struck.strikes if s.rank == rank], disk if struck.elsewhere else None)
    meeting = f"file://{task.place / f'meeting-{task.start}'}"
    timeout = timedelta(seconds=struck.timeout)
    meet = partial(dist.init_process_group, "gloo", init_method=meeting, world_size=task.ranks, timeout=timeout)
    train(task, rank, meet, striker, partial(tell, task, rank))


def _sleep(seconds: Any, /) -> None:
    """Where libfaketime (0.9.10) is loaded, the system refuses to wait for a point in time, as `time.sleep` does."""
    select.select([], [], [], seconds)


def tell(task: FaultyRun, rank: int, job: Job) -> None:
    """Say when a rank is at which step with which state, and what is safe: by level, and with its differences."""
    safe: list[Any] = safe_steps(job)
    replays = task.under == REPLAYED and safe[0]  # all ranks kept the step before, or this one could not have ended
    safe.append(job.progress.step - 1 if replays else 0)
    say(task, rank, "told", json.dumps([task.start, time.monotonic(), job.progress.step, digest(job), safe]))
