"""Without a compiler: windows of torch.profiler with Python's stacks, folded into the same tree as they end."""

from __future__ import annotations

import logging
import sys
import time
from contextlib import ExitStack

import torch

from shoestring.core.errors import ConfigError
from shoestring.native import CompileError
from shoestring.planning.system import cores
from shoestring.profile.collector import Collector, Recorded
from shoestring.profile.happenings import Happenings, StepClock, versions, watched
from shoestring.profile.kineto import EVERY, EventFold, TorchWindows, device_name
from shoestring.profile.recording import Facts

log = logging.getLogger("shoestring")


def started(share: float, budget: float | None, native_frames: bool) -> Collector | TorchCollector:
    """The native collector where it can be compiled, and otherwise this one; recording.

    Raises:
        RuntimeError: a profile is being recorded already.
        ConfigError: a share or budget that is none, or native frames where they cannot be recorded.
    """
    collector = Collector(share=share, budget=budget, native_frames=native_frames)
    try:
        collector.start()
    except CompileError as error:
        if native_frames:
            raise ConfigError(f"native frames cannot be recorded: {error}") from error
        collector = TorchCollector(str(error))
        collector.start()
    return collector


class TorchCollector:
    """Does what `Collector` does, at the cost of torch.profiler with stacks in the steps that it records."""

    def __init__(self, reason: str) -> None:
        log.warning(
            "no native collector: %s. Profiling by torch.profiler with stacks, which can double the time of a step, so"
            " of each %d steps one is recorded",
            reason,
            EVERY,
        )

    def start(self) -> None:
        """Begin to record."""
        self.windows, self.happenings, self.clock = TorchWindows(EventFold()), Happenings(), StepClock(self._stepped)
        self.hooks = ExitStack()
        self.hooks.enter_context(watched(self.happenings, self.clock))
        self.began, self.began_processor = time.perf_counter(), time.process_time()
        self.windows.open()

    def stop(self) -> Recorded:
        """End the recording; what was recorded since `start`."""
        seconds, processor = time.perf_counter() - self.began, time.process_time() - self.began_processor
        self.windows.finish(self.clock.steps)
        self.hooks.close()
        facts = Facts(
            list(sys.argv),
            seconds,
            self.windows.overhead,
            steps=self.clock.steps,
            clock=self.clock.times,
            waits=self.happenings.events,
            unseen=self.windows.unseen(),
            share=min(self.windows.recorded / seconds, 1.0),
            versions=versions(),
            processor=processor,
            cores=cores(),
            threads=torch.get_num_threads(),
            collector="torch.profiler",
            device=device_name(),
        )
        return Recorded(self.windows.fold.builder.build(), facts)

    def _stepped(self) -> None:
        self.windows.stepped(self.clock.steps)
