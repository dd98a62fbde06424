"""Records a running program: operators by native hooks (`native/callpaths.cpp`), time in Python by sampling."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from shoestring.core.errors import ConfigError
from shoestring.core.trace import listening, span
from shoestring.processors import processors
from shoestring.profile import native_tree
from shoestring.profile.happenings import Happenings, StepClock, Surroundings, unseen, versions, watched
from shoestring.profile.kineto import EventFold, TorchWindows, device_name
from shoestring.profile.native_frames import NativeFrames
from shoestring.profile.native_tree import ThreadData
from shoestring.profile.python_samples import PythonSampler
from shoestring.profile.recording import Facts, Profile
from shoestring.profile.tree import CallTree, NodeKind, TreeBuilder
from shoestring.profile.windows import Spent, Windows


class SpanListener:
    """Reports shoestring's own spans (communication, checkpoints, offload) to the native collector."""

    def __init__(self, library: Any) -> None:
        self.library, self.mine = library, threading.local()

    def begin(self, work: span, /) -> None:
        """Report the beginning of a span; called on the thread that runs the span."""
        if not hasattr(self.mine, "running"):
            self.mine.running = {}
        self.mine.running[id(work)] = self.library.callpaths_enter(work.name.encode())

    def end(self, work: span, /) -> None:
        """Report the end of a span, on the thread that began it; a span without a reported beginning is ignored."""
        running = getattr(self.mine, "running", {})
        if (entered := running.pop(id(work), None)) is not None:
            self.library.callpaths_leave(entered)


@dataclass
class Recorded:
    """The result of a recording: the call tree and facts about the run."""

    tree: CallTree
    facts: Facts

    def profile(self) -> Profile:
        """Return the recording as a profile, which can be saved."""
        return Profile(self.tree, self.facts)


@dataclass
class Collector:
    """Records all threads from `start` to `stop`; a process has at most one active collector.

    Raises:
        CompileError: there is no compiler, or Python's headers are missing.
    """

    frames: bool = True
    """Whether to record lines of Python in addition to operators."""
    share: float = 1.0
    """Fraction of the time in which operators are recorded; the recorded times are scaled up to the whole run."""
    budget: float | None = None
    """Processor time that recording may add, as a fraction of the program's processor time (0.03 is 3%); the share is
    adjusted to stay within this budget."""
    native_frames: bool = False
    """Whether to divide the own time of operators among the native functions that the operators call."""
    before: list[ThreadData] = field(default_factory=list)

    def start(self) -> None:
        """Start recording.

        Raises:
            RuntimeError: a profile is being recorded already.
            ConfigError: the share or budget is invalid, or native frames cannot be recorded here.
        """
        self.library = native_tree.library()
        self.windows = None
        if self.share != 1 or self.budget is not None:
            self.windows = Windows(self._read, self.library.callpaths_pause, self._cost, self.share, self.budget)
        if self.library.callpaths_start(int(self.frames)):
            raise RuntimeError("a profile is being recorded in this process already")
        try:
            self.native = NativeFrames(self.library) if self.native_frames else None
        except ConfigError:
            self.library.callpaths_stop()
            raise
        self.before = self._read()
        self.ident = threading.get_ident()
        self.kernels = TorchWindows(EventFold(timed=False)) if torch.cuda.is_available() else None
        self.happenings, self.clock = Happenings(), StepClock(self._stepped)
        self.surroundings = Surroundings(self.clock, self.ident)
        watched_threads = [self.ident] if self.frames else []
        self.sampler = PythonSampler(watched_threads, self.library.callpaths_inside, self._tick)
        self.hooks = ExitStack()
        self.hooks.enter_context(watched(self.happenings, self.clock))
        self.hooks.enter_context(listening(SpanListener(self.library)))
        self.surroundings.look(0.0)  # a short program may end before the sampling thread has run
        self.began, self.began_processor = time.perf_counter(), time.process_time()
        if self.windows is not None:
            self.windows.begin()
        self.sampler.start()

    def stop(self) -> Recorded:
        """Stop recording; returns everything recorded since `start`."""
        library, seconds = self.library, time.perf_counter() - self.began
        self.sampler.end()
        self.surroundings.look(seconds)
        processor = time.process_time() - self.began_processor
        if self.kernels is not None:
            self.kernels.finish(self.clock.steps)
        estimates = self.windows.finish(seconds) if self.windows is not None else []
        library.callpaths_stop()
        self.sampler.join()
        self.hooks.close()
        tick = library.callpaths_nanoseconds()
        after = self._read()  # before the names are read, because `_read` may add names
        names = [native_tree.spelled(library, number) for number in range(library.callpaths_names())]
        for data, earlier in zip(after, self.before, strict=False):
            data.subtract(earlier)  # the native trees still contain earlier recordings
        for data, (totals, variances) in zip(after, estimates, strict=False):
            data.replace(totals, variances)
        builder = TreeBuilder()
        # a link may point into another thread's tree, so all trees are grafted before the first link is resolved
        places = [data.graft(builder, names, tick) for data in after]
        for data, own in zip(after, places, strict=True):
            data.link(builder, own, places, names, tick)
        if self.native is not None:
            self.native.share_out(builder, places)
        caller = next((data for data in after if data.ident == self.ident), None)
        overhead = int(caller.cost[0]) * tick / 1e9 if caller else 0.0
        if self.frames:
            # Time in Python code is the time outside operators, spans and recording; samples divide it among lines.
            outside = seconds * 1e9 - overhead * 1e9 - (caller.outermost * tick if caller else 0.0)
            own: dict[int, int] = next((own for data, own in zip(after, places, strict=True) if data is caller), {})
            for entered, samples in self.sampler.seen.items():
                node = own.get(entered)
                if node is not None and builder.rows[node][1] == NodeKind.SPAN:
                    samples.share_out(builder, builder.numbers[node]["own"], node)
            self.sampler.seen[0].share_out(builder, max(outside, 0.0))
        if self.kernels is not None:
            builder.graft(self.kernels.fold.builder.build())
        tree = builder.build()
        return Recorded(
            tree,
            Facts(
                list(sys.argv),
                seconds,
                overhead,
                lost=sum(int(data.cost[1]) for data in after),
                steps=self.clock.steps,
                clock=self.clock.times,
                work=self.surroundings.work,
                waits=self.happenings.events,
                unseen=unseen(tree.names) + (self.kernels.unseen() if self.kernels is not None else []),
                device=device_name(),
                share=self.windows.recorded / seconds if self.windows is not None else 1.0,
                versions=versions(),
                processor=processor,
                beside=self.sampler.seconds,
                cores=processors(),
                threads=self.surroundings.threads,
                memory=self.surroundings.memory,
            ),
        )

    def _read(self) -> list[ThreadData]:
        library = self.library
        return [native_tree.read(library, thread) for thread in range(library.callpaths_threads())]

    def _cost(self) -> Spent:
        library = self.library
        ticks = sum(int(native_tree.cost(library, thread)[0]) for thread in range(library.callpaths_threads()))
        return Spent(ticks * library.callpaths_nanoseconds() / 1e9, time.process_time(), self.sampler.seconds)

    def _tick(self) -> None:
        seconds = time.perf_counter() - self.began
        self.surroundings.look(seconds)
        if self.native is not None:
            self.native.drain()
        if self.windows is not None:
            self.windows.tick(seconds)

    def _stepped(self) -> None:
        self.surroundings.look_at_threads()
        if self.kernels is not None:
            self.kernels.stepped(self.clock.steps)
        if self.windows is not None:
            self.windows.step(time.perf_counter() - self.began)
