"""Timings want a machine that does nothing else: how busy it is, waiting until it is calm, and giving up.

Two things disturb a timing on a virtual machine: other programs, and the hypervisor's other guests (stolen time). Both
are read from /proc before, between the rounds of, and after a measurement that is timed. Kernel threads are not counted
as other programs: on virtual hosts they carry the packets of what is measured.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

MOST_LOAD = 1.2
"""One-minute load average above which no timing begins."""
MOST_STOLEN = 0.02
"""Share of the processors' time that the hypervisor gave to others, above which a timing does not count."""
MOST_OTHERS = 0.2
"""Processors kept busy by other programs above which a timing does not count."""
PATIENCE = 1800.0
"""Seconds to wait for a calm machine, over a whole measurement."""
_LOOK = 2.0  # seconds over which shares are measured while waiting
_TICKS = os.sysconf("SC_CLK_TCK")
_INIT, _KTHREADD = 1, 2


class BusyMachineError(Exception):
    """The machine was not calm for long enough to measure; the text says what it was busy with."""


@dataclass(frozen=True)
class Usage:
    """Processor time used so far, in clock ticks."""

    seconds: float
    total: int
    stolen: int
    processes: dict[int, tuple[int, int]]
    """The parent and the ticks, with those of children that have ended, of every process.

    Only the first process's are its own: it takes over the children of processes that end, those of the measurement
    itself as well, and with them all that they have used.
    """

    @classmethod
    def now(cls, proc: Path = Path("/proc")) -> Usage:
        ticks = [int(word) for word in (proc / "stat").read_text().split("\n", 1)[0].split()[1:9]]
        processes = {}
        for path in proc.iterdir():
            if path.name.isdigit():
                try:
                    fields = (path / "stat").read_text().rpartition(")")[2].split()
                except OSError:  # it has ended
                    continue
                process = int(path.name)
                processes[process] = int(fields[1]), sum(map(int, fields[11 : 13 if process == _INIT else 15]))
        return cls(time.monotonic(), sum(ticks), ticks[7], processes)


@dataclass(frozen=True)
class Load:
    """How busy the machine was during a span of time, apart from this process and those that it started."""

    stolen: float
    others: float

    @classmethod
    def between(cls, before: Usage, after: Usage, own: int) -> Load:
        """The load from one look to the next, without the descendants of the process `own`."""
        used = 0
        for process, (_, ticks) in after.processes.items():
            line = {*_ancestors(process, after), *_ancestors(process, before)}  # it may have lost its parent since
            if own not in line and _KTHREADD not in line:
                used += max(0, ticks - before.processes.get(process, (0, ticks))[1])
        span = max(after.seconds - before.seconds, 1 / _TICKS)
        return cls((after.stolen - before.stolen) / max(after.total - before.total, 1), used / _TICKS / span)

    @property
    def calm(self) -> bool:
        return self.stolen <= MOST_STOLEN and self.others <= MOST_OTHERS

    def __str__(self) -> str:
        return f"{self.stolen:.1%} of the time stolen, {self.others:.2f} processors used by others"


def _ancestors(process: int, usage: Usage) -> list[int]:
    """The process, its parent, and so on."""
    line = [process]
    while line[-1] in usage.processes and (parent := usage.processes[line[-1]][0]) not in line:
        line.append(parent)
    return line


@dataclass
class Watch:
    """Watches one timed measurement."""

    patience: float = PATIENCE
    own: int = field(default_factory=os.getpid)
    loads: list[Load] = field(default_factory=list)
    """Of each span that counts."""
    _from: Usage = field(default_factory=Usage.now)

    def begin(self) -> None:
        """Wait until the load average and the shares are low.

        Raises:
            BusyMachineError: they are not within the patience.
        """
        self._wait(MOST_LOAD)

    def span(self) -> bool:
        """Whether the machine was calm since the last look; if not, wait until it is.

        Raises:
            BusyMachineError: it is not within the patience.
        """
        now = Usage.now()
        load, self._from = Load.between(self._from, now, self.own), now
        if load.calm:
            self.loads.append(load)
            return True
        self._wait()
        return False

    def _wait(self, most_load: float | None = None) -> None:
        """Look every two seconds; `most_load` bounds the load average, which counts the measurement itself too."""
        while True:
            before = Usage.now()
            time.sleep(_LOOK)
            self._from = Usage.now()
            load, average = Load.between(before, self._from, self.own), os.getloadavg()[0]
            if load.calm and (most_load is None or average <= most_load):
                return
            self.patience -= _LOOK
            if self.patience <= 0:
                raise BusyMachineError(f"{load}, load average {average:.2f}")

    def __str__(self) -> str:
        worst = Load(max(load.stolen for load in self.loads), max(load.others for load in self.loads))
        return f"{worst} at worst"


_watch: ContextVar[Watch | None] = ContextVar("watch", default=None)


@contextmanager
def watched(watch: Watch) -> Iterator[Watch]:
    """Wait for a calm machine, and let what times rounds within the block ask `was_calm` after each.

    Raises:
        BusyMachineError: the machine was busy before, within, or at the end.
    """
    watch.begin()
    token = _watch.set(watch)
    try:
        yield watch
    finally:
        _watch.reset(token)
    if not watch.span():
        raise BusyMachineError("other work ran beside the last part of the measurement, or its time was stolen")


def was_calm() -> bool:
    """Whether the round that has just ended counts; always, where no measurement is watched."""
    watch = _watch.get()
    return watch is None or watch.span()
