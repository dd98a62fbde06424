"""Without a compiler: windows of torch.profiler with Python's stacks, folded into the same tree as they end.

torch keeps every event of a window in memory, and takes long to end one, so windows are single optimizer steps. A
program without an optimizer has one window of all that it does.
"""

from __future__ import annotations

import logging
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch._C import _profiler as profiling
from torch.profiler import ProfilerActivity

from shoestring.native import CompileError
from shoestring.profile.collector import Collector, Recorded
from shoestring.profile.happenings import Happenings, StepClock, machine, watched
from shoestring.profile.recording import Facts
from shoestring.profile.tree import NodeKind, TreeBuilder

FIRST_STEPS, EVERY = 2, 20
"""Steps that are recorded at first, and of how many one is recorded then."""

BACKWARD, SPAN = 1, 7
"""torch's scopes of a function of the backward pass, and of a named part; others are of operators."""

log = logging.getLogger("shoestring")


def started(share: float, budget: float | None) -> Collector | TorchCollector:
    """The native collector where it can be compiled, and otherwise this one; recording.

    Raises:
        RuntimeError: a profile is being recorded already.
        ConfigError: a share or budget that is none.
    """
    collector = Collector(share=share, budget=budget)
    try:
        collector.start()
    except CompileError as error:
        collector = TorchCollector(str(error))
        collector.start()
    return collector


@dataclass(frozen=True)
class _Place:
    """Where an event's children go."""

    event: Any
    node: int
    weight: float


class TorchCollector:
    """Does what `Collector` does, at the cost of torch.profiler with stacks in the steps that it records."""

    def __init__(self, reason: str) -> None:
        log.warning(
            "no native collector: %s. Profiling by torch.profiler with stacks, which can double the time of a step, so"
            " of each %d steps one is recorded",
            reason,
            EVERY,
        )
        self.builder, self.forward = TreeBuilder(), dict[int, int]()
        self.profiler: Any = None
        self.recorded, self.overhead, self.covered = 0.0, 0.0, 0

    def start(self) -> None:
        """Begin to record."""
        self.happenings, self.clock = Happenings(), StepClock(self._stepped)
        self.hooks = ExitStack()
        self.hooks.enter_context(watched(self.happenings, self.clock))
        self.began, self.began_processor = time.perf_counter(), time.process_time()
        self._open()

    def stop(self) -> Recorded:
        """End the recording; what was recorded since `start`."""
        seconds, processor = time.perf_counter() - self.began, time.process_time() - self.began_processor
        self._close(max(self.clock.steps - self.covered, 1))
        self.hooks.close()
        facts = Facts(
            list(sys.argv),
            seconds,
            self.overhead,
            steps=self.clock.steps,
            clock=self.clock.times,
            waits=self.happenings.events,
            share=min(self.recorded / seconds, 1.0),
            versions=machine() | {"processor seconds": f"{processor:.3f}", "collector": "torch.profiler"},
        )
        return Recorded(self.builder.build(), facts)

    def _stepped(self) -> None:
        steps = self.clock.steps
        if self.profiler is not None:
            self._close(1 if steps <= FIRST_STEPS else steps - self.covered)
        if steps < FIRST_STEPS or steps % EVERY == EVERY - 1:
            self._open()

    def _open(self) -> None:
        self.profiler = torch.profiler.profile(activities=[ProfilerActivity.CPU], with_stack=True)
        began = time.perf_counter()
        self.profiler.start()
        self.opened = time.perf_counter()
        self.overhead += self.opened - began

    def _close(self, weight: float) -> None:
        """End a window that stands for so many steps."""
        if self.profiler is None:
            return
        began = time.perf_counter()
        self.recorded += began - self.opened
        self.profiler.stop()
        results = self.profiler.profiler.kineto_results
        self.profiler, self.covered = None, self.clock.steps
        for event in results.experimental_event_tree():
            self._fold(event, weight)
        self.overhead += time.perf_counter() - began

    def _fold(self, root: Any, weight: float) -> None:
        """Add an event and all below it."""
        left = [_Place(root, 0, weight)]
        while left:
            place = left.pop()
            event, node = place.event, self._node(place.event, place.node)
            if node is None:
                continue
            inner = sum(child.duration_time_ns for child in event.children)
            own = round(max(event.duration_time_ns - inner, 0) * weight)
            variance = own * own * (1 - 1 / weight)  # of calls that are independent; those of a step are not quite
            if isinstance(event.extra_fields, profiling._ExtraFields_TorchOp):
                took = round(event.duration_time_ns)
                self.builder.add(
                    node,
                    count=round(weight),
                    own=own,
                    least=took,
                    most=took,
                    squares=took * took * weight,
                    count_variance=weight * weight * (1 - 1 / weight),
                    own_variance=variance,
                )
            else:
                self.builder.add(node, own=own, own_variance=variance)
            left += [_Place(child, node, weight) for child in reversed(event.children)]

    def _node(self, event: Any, above: int) -> int | None:
        """Where an event is; None for torch.profiler's own."""
        fields = event.extra_fields
        if isinstance(fields, profiling._ExtraFields_PyCall):
            if fields.callsite.file_name.endswith("torch/profiler/profiler.py"):
                return None
            return self._line(above, fields.caller)
        if isinstance(fields, profiling._ExtraFields_PyCCall):
            return self._line(above, fields.caller)
        if not isinstance(fields, profiling._ExtraFields_TorchOp):
            return above
        scope: Any = fields.scope
        sequence = fields.sequence_number
        kind = {BACKWARD: NodeKind.BACKWARD, SPAN: NodeKind.SPAN}.get(int(scope), NodeKind.OPERATOR)
        if kind == NodeKind.BACKWARD and sequence in self.forward:
            above = self.builder.node(above, NodeKind.LINK, "", 0, self.forward[sequence])
        node = self.builder.node(above, kind, event.name)
        if kind == NodeKind.OPERATOR and sequence >= 0:
            self.forward.setdefault(sequence, node)
        return node

    def _line(self, above: int, frame: Any) -> int:
        name = f"{_whole(frame.file_name)}\t{frame.function_name}"
        return self.builder.node(above, NodeKind.PYTHON, name, frame.line_number)


@cache
def _whole(file: str) -> str:
    """The path of a file, of which torch leaves out the folder that it is imported from."""
    if Path(file).is_absolute():
        return file
    folders = (Path(folder or ".").resolve() / file for folder in sys.path)
    return str(next((path for path in folders if path.is_file()), file))
