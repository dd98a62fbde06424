"""Records optimizer steps, garbage collections, compilations, and the process's use of memory and processors."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from shoestring.profile.python_samples import imports_package, path_of
from shoestring.profile.recording import Events, MemoryAt, StepTimes, WorkAt

MOST_STEPS, MOST_LOOKS, MOST_EVENTS = 64, 32, 64
LONGEST_NAME = 200
COMPILED = ("## Call CompiledFxGraph", "Torch-Compiled Region", "CompiledFunction")
"""Prefixes of the names of operators that run compiled code."""
LOOK_EVERY = 0.02
"""Initial interval between measurements of the process's memory and processor time, in seconds."""


class StepClock:
    """Measures the step times of one optimizer, the first that steps; in a long run, one entry covers several steps.

    Args:
        heard: function called at the end of each step.
    """

    def __init__(self, heard: Callable[[], None] | None = None) -> None:
        self.heard = heard
        self.steps, self.width = 0, 1
        self.times: list[StepTimes] = []
        self.open: list[float] = []
        self.last: float | None = None
        self.resident = 0  # resident bytes; `Surroundings.look` updates it
        self.optimizer: weakref.ref[Any] | None = None

    def step(self, optimizer: Any, *_: object) -> None:
        """Record the end of an optimizer step; torch calls this hook after each step."""
        known = self.optimizer and self.optimizer()
        if known is None:
            self.optimizer = weakref.ref(optimizer)
        elif known is not optimizer:
            return
        now = time.perf_counter()
        if self.last is not None:  # the start time of the first step is unknown
            self.open.append(now - self.last)
            if len(self.open) >= self.width:
                first, seconds = self.steps + 1 - len(self.open), round(sum(self.open), 6)
                self.times.append(StepTimes(first, len(self.open), seconds, round(max(self.open), 6), self.resident))
                self.open = []
            if len(self.times) >= MOST_STEPS:  # merge pairs of adjacent entries, to bound the memory
                self.width *= 2
                self.times = [
                    StepTimes(
                        a.first,
                        a.steps + b.steps,
                        round(a.seconds + b.seconds, 6),
                        max(a.longest, b.longest),
                        b.resident,
                    )
                    for a, b in zip(self.times[::2], self.times[1::2], strict=True)
                ]
        self.steps += 1
        if self.heard is not None:
            self.heard()
        self.last = time.perf_counter()


class Surroundings:
    """Samples the process's allocated memory, its threads per operator, and the processor time of the training thread.

    The sampling thread calls `look`. If a thread of the program called it, then on a busy machine the thread might be
    descheduled in a system call, and the profile would attribute this time to a line of the program.

    The C library counts the allocated bytes; if it does not support this, memory is unknown. The number of resident
    pages cannot replace the count: the allocator reuses freed memory before it requests new pages, so this number does
    not show which allocations grow.
    """

    def __init__(self, clock: StepClock, ident: int) -> None:
        self.clock, self.ident = clock, ident
        self.work: list[WorkAt] = []
        self.memory: list[MemoryAt] = []
        self.counted: Callable[[], int] | None = None
        with suppress(OSError, AttributeError, TypeError):  # glibc has `mallinfo2` from 2.33 on
            mallinfo2 = ctypes.CDLL(None).mallinfo2
            mallinfo2.restype = _Allocations
            # bytes in arenas, and in mapped regions
            self.counted = lambda: (info := mallinfo2()).uordblks + info.hblkhd
        self.threads = 0
        self.looked, self.interval = -1.0, LOOK_EVERY

    def look(self, seconds: float) -> None:
        """Take a measurement if the interval has passed; `seconds` is the time since the start of the recording."""
        self.look_at_threads()
        if seconds - self.looked < self.interval:
            return
        resident = 0
        with suppress(OSError, ValueError, IndexError):  # /proc/self/statm exists only on Linux
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        self.looked, self.clock.resident = seconds, resident
        with suppress(OSError, AttributeError):  # the thread has ended, or its clock cannot be read
            processor = time.clock_gettime(time.pthread_getcpuclockid(self.ident))
            self.work.append(WorkAt(self.clock.steps, round(processor, 4)))
        if self.counted is not None:
            on_accelerator = torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0
            self.memory.append(MemoryAt(round(seconds, 3), self.counted() + on_accelerator))
        if max(len(self.work), len(self.memory)) >= MOST_LOOKS:
            self.interval *= 2
            del self.memory[1::2], self.work[1::2]

    def look_at_threads(self) -> None:
        """Update the number of threads per operator; also called on the training thread, whose number may differ."""
        self.threads = max(self.threads, torch.get_num_threads())


class Happenings:
    """Counts events and sums their times, by the name of the event."""

    def __init__(self) -> None:
        self.events: dict[str, Events] = {}
        self.collecting = 0.0
        self.began_at = time.time()

    def add(self, name: str, seconds: float, where: str = "") -> None:
        """Count an event; once 63 names are in use, events with new names are counted as `others`."""
        name = name[:LONGEST_NAME]
        if name not in self.events and len(self.events) >= MOST_EVENTS - 1:
            name, where = "others", ""
        old = self.events.get(name, Events(0, 0.0, 0.0, where))
        self.events[name] = Events(old.count + 1, old.seconds + seconds, max(old.longest, seconds), old.where)

    def collected(self, phase: str, _: dict[str, int]) -> None:
        """Record a garbage collection; Python calls this hook when a collection begins or ends."""
        if phase == "start":
            self.collecting = time.perf_counter()
        elif self.collecting:
            seconds, self.collecting = time.perf_counter() - self.collecting, 0.0
            caller = sys._getframe().f_back  # None while Python shuts down
            where = f"{caller.f_code.co_filename}:{caller.f_lineno}" if caller else ""
            if not imports_package(path_of(caller)):
                self.add("garbage collection", seconds, where)

    def compiled(self) -> None:
        """Count torch.compile's compilations, recompilations and graph breaks, from its last 64 compilations."""
        if "torch._dynamo" not in sys.modules:
            return
        with suppress(ImportError, AttributeError):  # not torch's public interface
            from torch._dynamo.utils import get_compilation_metrics

            for metrics in get_compilation_metrics():
                if (metrics.start_time or 0.0) < self.began_at:
                    continue
                where = f"{metrics.co_filename}:{metrics.co_firstlineno}"
                seconds = metrics.entire_frame_compile_time_s or 0.0
                self.add(f"compile: {metrics.co_name}", seconds, where)
                if metrics.recompile_reason:
                    self.add(f"recompile: {metrics.recompile_reason}", seconds, where)
                for reason in metrics.restart_reasons or ():
                    self.add(f"graph break: {reason.partition(chr(10))[0]}", 0.0, where)


@contextmanager
def watched(happenings: Happenings, clock: StepClock) -> Iterator[None]:
    """Context in which torch and Python report events to `happenings` and steps to `clock`."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    hook = register_optimizer_step_post_hook(clock.step)
    gc.callbacks.append(happenings.collected)
    try:
        yield
    finally:
        gc.callbacks.remove(happenings.collected)
        hook.remove()
        happenings.compiled()


class _Allocations(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keep",
        )
    ]


def unseen(names: Iterable[str]) -> list[str]:
    """Return sentences about the work that operators with these names hide from the profile."""
    if not any(name.startswith(COMPILED) for name in names):
        return []
    return [
        "What torch.compile has fused is own time of its region, without lines; matrix products that it leaves to torch"
        " are seen below it.",
    ]


def versions() -> dict[str, str]:
    """Return the versions of torch and Python."""
    return {"torch": str(torch.__version__), "python": sys.version.split()[0]}
