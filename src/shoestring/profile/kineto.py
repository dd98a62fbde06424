"""Records windows of torch.profiler with Python stacks, and adds kernels and (optionally) operators to a call tree.

torch holds every event of a window in memory and takes long to end a window, so every window after the first is a
single optimizer step. In a program without an optimizer, one window covers the whole run. Kernels and copies have the
correlation id of the operator that launched them.

This module works around two bugs of torch (seen in 2.13). First, a span (`record_function`) that begins in one window
and ends in another writes to freed memory of the first window. No window opens while a span from an earlier window is
open. `Optimizer.step` is such a span, because windows open and close at its end. Second, when a window ends, torch
reads the names of code objects that may have been freed, such as the code of a module after its import. References to
code objects are therefore held until the window has ended.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch._C import _profiler as profiling
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity

from shoestring._torch import activity_of
from shoestring.profile.tree import INNER, OUTER, NodeKind, TreeBuilder

FIRST_STEPS, EVERY = 2, 20
"""Number of steps in the first window; after that window, one step in `EVERY` is recorded."""

BACKWARD, SPAN = 1, 7
"""torch's record scopes of backward functions and of spans (`record_function`); all other scopes belong to
operators."""

RAN = ("kernel", "gpu_memcpy", "gpu_memset")
"""Kineto's activity types for kernels, copies and fills on an accelerator."""
_LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "hipLaunchKernel")


def device_name() -> str:
    """Name of the accelerator in use; empty if there is none."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() and torch.cuda.is_initialized() else ""


# -- what an accelerator ran -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ran:
    """A kernel, copy or fill that ran on an accelerator; times are in nanoseconds."""

    name: str
    device: int
    start: int
    end: int
    operator: int
    """Correlation id of the operator that launched the kernel or copy; 0 if unknown."""
    copies: bool


def ran(events: Iterable[Any]) -> list[Ran]:
    """The kernels and copies among Kineto's events, ordered by start."""
    work = [
        Ran(
            event.name(),
            event.device_index(),
            event.start_ns(),
            event.start_ns() + event.duration_ns(),
            event.linked_correlation_id(),
            kind != "kernel",
        )
        for event in events
        if (kind := activity_of(event)) in RAN
    ]
    return sorted(work, key=lambda item: item.start)


def dropped(events: Iterable[Any]) -> int:
    """Number of kernels that were launched but not recorded."""
    kernels, launches = set[int](), set[int]()
    for event in events:
        if activity_of(event) == "kernel":
            kernels.add(event.correlation_id())
        elif event.name() in _LAUNCHES:
            launches.add(event.correlation_id())
    return len(launches - kernels)


def idle(work: Sequence[Ran]) -> list[int]:
    """Nanoseconds in which the device was idle before each kernel or copy; `work` is ordered by start."""
    until, gaps = dict[int, int](), []
    for item in work:
        gaps.append(max(item.start - until.get(item.device, item.start), 0))
        until[item.device] = max(until.get(item.device, item.end), item.end)
    return gaps


def alone(work: Sequence[Ran]) -> list[int]:
    """Nanoseconds of each copy during which no kernel ran on its device; 0 for kernels."""
    busy: dict[int, list[list[int]]] = {}  # device -> disjoint intervals in which kernels ran
    for item in work:
        if not item.copies:
            spans = busy.setdefault(item.device, [])
            if spans and item.start <= spans[-1][1]:
                spans[-1][1] = max(spans[-1][1], item.end)
            else:
                spans.append([item.start, item.end])
    kernels = {device: np.array(spans) for device, spans in busy.items()}
    exposed = []
    for item in work:
        nanoseconds = item.end - item.start if item.copies else 0
        if item.copies and item.device in kernels:
            starts, ends = kernels[item.device].T
            covered = np.minimum(ends, item.end) - np.maximum(starts, item.start)
            nanoseconds -= int(np.maximum(covered, 0).sum())
        exposed.append(nanoseconds)
    return exposed


def add_kernels(builder: TreeBuilder, work: Sequence[Ran], nodes: Mapping[int, int], weight: float) -> None:
    """Add kernels and copies below the operators that launched them, or below the root if the operator is unknown.

    Args:
        nodes: nodes of operators by their correlation ids.
        weight: number of steps that one recorded step of the window represents.
    """
    for item, gap, lone in zip(work, idle(work), alone(work), strict=True):
        node = builder.node(nodes.get(item.operator, 0), NodeKind.KERNEL, item.name)
        took, before, exposed = (round(value * weight) for value in (item.end - item.start, gap, lone))
        builder.add(node, count=round(weight), device=took, idle=before, alone=exposed)


# -- operators and Python's lines ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """An event of the profiler and its place in the call tree."""

    event: Any
    node: int
    """Node of the event's parent."""
    above: _Place | None = None
    """`_Place` of the parent, if the parent is a Python frame."""
    frame: tuple[str, int] | None = None
    level: int = 0
    """Number of consecutive Python frames directly above the event."""

    def innermost(self) -> list[tuple[str, int]]:
        """The innermost `INNER` frames of a deep stack, the outermost of these frames first."""
        frames: list[tuple[str, int]] = []
        place: _Place | None = self
        while place is not None and place.frame is not None and len(frames) < INNER:
            frames.append(place.frame)
            place = place.above
        return frames[::-1]


class EventFold:
    """Adds events of torch.profiler to a tree.

    Args:
        timed: whether to record times of operators and lines; if false, only kernels and copies get times.
    """

    def __init__(self, timed: bool = True) -> None:
        self.timed = timed
        self.builder, self.forward = TreeBuilder(), dict[int, int]()
        self.dropped = 0

    def add(self, results: Any, weight: float) -> None:
        """Add the events of a window, in which one recorded step represents `weight` steps."""
        nodes: dict[int, int] = {}
        left = [_Place(root, 0) for root in reversed(results.experimental_event_tree())]
        while left:
            place = left.pop()
            event, frame = place.event, _frame(place.event)
            python_call = isinstance(event.extra_fields, profiling._ExtraFields_PyCall)
            if python_call and event.extra_fields.callsite.file_name.endswith("torch/profiler/profiler.py"):
                continue  # a call of the profiler itself
            if frame is not None:
                place = replace(place, frame=frame, level=place.level + 1)
                node = self._line(place)
            else:
                node = self._node(event, place.node)
            if isinstance(event.extra_fields, profiling._ExtraFields_TorchOp):
                nodes[event.correlation_id] = node
            if self.timed:
                self._time(event, node, weight)
            above, level = (place, place.level) if frame is not None else (None, 0)
            left += [_Place(child, node, above, None, level) for child in reversed(event.children)]
        events = results.events()
        add_kernels(self.builder, ran(events), nodes, weight)
        self.dropped += dropped(events)

    def _time(self, event: Any, node: int, weight: float) -> None:
        inner = sum(child.duration_time_ns for child in event.children)
        own = round(max(event.duration_time_ns - inner, 0) * weight)
        # assumes that calls are independent, which is only roughly true within a step
        variance = own * own * (1 - 1 / weight)
        if not isinstance(event.extra_fields, profiling._ExtraFields_TorchOp):
            self.builder.add(node, own=own, own_variance=variance)
            return
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

    def _node(self, event: Any, above: int) -> int:
        """The node of an operator, span or backward function; for other events, the node of their parent."""
        fields = event.extra_fields
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

    def _line(self, place: _Place) -> int:
        """The node of a Python frame; in a deep stack, a gap node replaces the frames in the middle."""
        if place.level <= OUTER + INNER:
            return self.builder.line(place.node, place.frame)
        outermost: _Place | None = place
        while outermost is not None and outermost.level > OUTER + 1:
            outermost = outermost.above
        assert outermost is not None
        node = self.builder.line(outermost.node, None)
        for frame in place.innermost():
            node = self.builder.line(node, frame)
        return node


def _frame(event: Any) -> tuple[str, int] | None:
    """The file, function and line of a Python frame; None for other events."""
    fields = event.extra_fields
    if not isinstance(fields, profiling._ExtraFields_PyCall | profiling._ExtraFields_PyCCall):
        return None
    return f"{_whole(fields.caller.file_name)}\t{fields.caller.function_name}", fields.caller.line_number


@cache
def _whole(file: str) -> str:
    """The absolute path of a file; torch strips the `sys.path` entry under which it was imported."""
    if Path(file).is_absolute():
        return file
    folders = (Path(folder or ".").resolve() / file for folder in sys.path)
    return str(next((path for path in folders if path.is_file()), file))


# -- windows ---------------------------------------------------------------------------------------------------------


class TorchWindows:
    """Records the first steps and then one step in `EVERY` with torch.profiler, and adds each window to a tree."""

    def __init__(self, fold: EventFold) -> None:
        self.fold = fold
        self.profiler: Any = None
        self.recorded, self.overhead, self.covered, self.skipped = 0.0, 0.0, 0, 0
        self.executed, self.parts, self.hooks = _executed(), _Parts(), ExitStack()
        self.hooks.enter_context(self.parts.seen())

    def stepped(self, steps: int) -> None:
        """Open or close a window, after optimizer step number `steps`."""
        if self.profiler is not None:
            if steps >= FIRST_STEPS:
                self.close(1 if steps <= FIRST_STEPS else steps - self.covered, steps)
        elif steps == 1 or steps % EVERY == EVERY - 1:
            if self.parts.unfinished:
                self.skipped += 1
            else:
                self.open()

    def finish(self, steps: int) -> None:
        """Close the last window when the program has ended after `steps` steps."""
        self.close(max(steps - self.covered, 1), steps)
        self.hooks.close()

    def open(self) -> None:
        """Open a window."""
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # exclude earlier kernels from the window; ending the window also synchronizes
        self.profiler = torch.profiler.profile(activities=activities, with_stack=True)
        self.executed.holding = self.parts.window = True
        began = time.perf_counter()
        self.profiler.start()
        self.opened = time.perf_counter()
        self.overhead += self.opened - began

    def close(self, weight: float, steps: int) -> None:
        """Close the window, in which one recorded step represents `weight` steps."""
        if self.profiler is None:
            return
        began = time.perf_counter()
        self.recorded += began - self.opened
        self.profiler.stop()
        self.fold.add(self.profiler.profiler.kineto_results, weight)
        self.executed.holding = self.parts.window = False
        self.executed.code.clear()
        self.profiler, self.covered = None, steps
        self.overhead += time.perf_counter() - began

    def unseen(self) -> list[str]:
        """Sentences about kernels and steps that are missing from the profile."""
        sentences = []
        if lost := self.fold.dropped:
            sentences.append(f"{lost:,} kernels that were launched in the recorded steps left no record.")
        if self.skipped:
            sentences.append(
                f"{self.skipped:,} steps were not recorded: a named part was open that began in an earlier one."
            )
        return sentences


class _Parts:
    """Tracks spans (`record_function`) that began in a window and have not ended."""

    def __init__(self) -> None:
        self.unfinished, self.window = set[int](), False

    @contextmanager
    def seen(self) -> Iterator[None]:
        """Track spans that begin and end inside this context."""
        enter, leave = record_function.__enter__, record_function.__exit__

        def entered(part: record_function) -> Any:
            if self.window:
                self.unfinished.add(id(part))
            return enter(part)

        def left(part: record_function, *error: Any) -> None:
            self.unfinished.discard(id(part))
            leave(part, *error)

        with patch.multiple(record_function, __enter__=entered, __exit__=left):
            yield


@dataclass
class _Executed:
    """Holds references to code objects executed while a window is open, such as the code of modules."""

    holding: bool = False
    code: list[Any] = field(default_factory=list)

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.holding and event == "exec":
            self.code.append(arguments[0])


@cache
def _executed() -> _Executed:
    """The process's only `_Executed`; a second one is never made, because an audit hook cannot be removed."""
    executed = _Executed()
    sys.addaudithook(executed.hook)
    return executed
