"""The collector for hosts without a compiler: records single steps with torch.profiler and adds them to a call tree."""

from __future__ import annotations

import logging
import sys
import time
from contextlib import ExitStack

import torch

from shoestring.core.errors import ConfigError
from shoestring.native import CompileError
from shoestring.processors import processors
from shoestring.profile.collector import Collector, Recorded
from shoestring.profile.happenings import Happenings, StepClock, versions, watched
from shoestring.profile.kineto import EVERY, EventFold, TorchWindows, device_name
from shoestring.profile.recording import Facts

log = logging.getLogger("shoestring")


def started(share: float, budget: float | None, native_frames: bool) -> Collector | TorchCollector:
    """Start and return the native collector, or a `TorchCollector` if the native collector cannot be compiled.

    Raises:
        RuntimeError: a profile is being recorded already.
        ConfigError: the share or budget is invalid, or native frames cannot be recorded here.
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
    """Replaces `Collector` if there is no compiler; recorded steps are slower, as torch.profiler records stacks."""

    def __init__(self, reason: str) -> None:
        log.warning(
            "no native collector: %s. torch.profiler records stacks instead, which can double the time of a step, so"
            " only one step in %d is recorded",
            reason,
            EVERY,
        )

    def start(self) -> None:
        """Start recording."""
        self.windows, self.happenings = TorchWindows(EventFold()), Happenings()
        self.clock = StepClock(lambda: self.windows.stepped(self.clock.steps))
        self.hooks = ExitStack()
        self.hooks.enter_context(watched(self.happenings, self.clock))
        self.began, self.began_processor = time.perf_counter(), time.process_time()
        self.windows.open()

    def stop(self) -> Recorded:
        """Stop recording; returns everything recorded since `start`."""
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
            cores=processors(),
            threads=torch.get_num_threads(),
            collector="torch.profiler",
            device=device_name(),
        )
        return Recorded(self.windows.fold.builder.build(), facts)
