"""Records a program while it runs: operators natively (`native/callpaths.cpp`), Python's own time by sampling."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from shoestring.core.errors import ConfigError
from shoestring.core.trace import listening
from shoestring.planning.system import cores
from shoestring.profile import native_tree
from shoestring.profile.happenings import Happenings, StepClock, Surroundings, unseen, versions, watched
from shoestring.profile.kineto import EventFold, TorchWindows, device_name
from shoestring.profile.native_frames import NativeFrames
from shoestring.profile.native_tree import ThreadData
from shoestring.profile.python_samples import PythonSampler
from shoestring.profile.recording import Facts, Profile
from shoestring.profile.spans import SpanListener
from shoestring.profile.tree import CallTree, NodeKind, TreeBuilder
from shoestring.profile.windows import Spent, Windows


@dataclass
class Recorded:
    """What was recorded."""

    tree: CallTree
    facts: Facts

    def profile(self) -> Profile:
        """As it is saved."""
        return Profile(self.tree, self.facts)


@dataclass
class Collector:
    """Records all threads from `start` to `stop`; there is one at a time in a process.

    Raises:
        CompileError: there is no compiler, or Python's headers are missing.
    """

    frames: bool = True
    """Whether Python's lines are recorded, too."""
    share: float = 1.0
    """Part of the time in which operators are recorded; what they took is scaled up to all of it."""
    budget: float | None = None
    """What recording may add to the program's processor time (0.03 is 3%); sets the share as the program runs."""
    native_frames: bool = False
    """Whether operators' own time is shared out to the native functions below them."""
    before: list[ThreadData] = field(default_factory=list)

    def start(self) -> None:
        """Begin to record.

        Raises:
            RuntimeError: a profile is being recorded already.
            ConfigError: a share or budget that is none, or native frames where they cannot be recorded.
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
        self.surroundings.look(0.0)  # a short program may end before the thread that looks has run
        self.began, self.began_processor = time.perf_counter(), time.process_time()
        if self.windows is not None:
            self.windows.begin()
        self.sampler.start()

    def stop(self) -> Recorded:
        """End the recording; what was recorded since `start`."""
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
        after = self._read()  # which may spell out what the names before do not say
        names = [native_tree.spelled(library, number) for number in range(library.callpaths_names())]
        for data, earlier in zip(after, self.before, strict=False):
            data.subtract(earlier)
        for data, (totals, variances) in zip(after, estimates, strict=False):
            data.replace(totals, variances)
        builder = TreeBuilder()
        places = [data.graft(builder, names, tick) for data in after]
        for data, own in zip(after, places, strict=True):
            data.link(builder, own, places, names, tick)
        if self.native is not None:
            self.native.share_out(builder, places)
        mine = next((data for data in after if data.ident == self.ident), None)
        overhead = int(mine.cost[0]) * tick / 1e9 if mine else 0.0
        if self.frames:
            outside = seconds * 1e9 - overhead * 1e9 - (mine.outermost * tick if mine else 0.0)
            own: dict[int, int] = next((own for data, own in zip(after, places, strict=True) if data is mine), {})
            for span, seen in self.sampler.seen.items():
                if span in own and builder.rows[own[span]][1] == NodeKind.SPAN:
                    seen.share_out(builder, builder.numbers[own[span]]["own"], own[span])
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
                cores=cores(),
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
