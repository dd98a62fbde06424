"""Windows of torch.profiler with Python's stacks, folded into a tree as they end: operators, kernels, or both.

torch keeps every event of a window in memory, and takes long to end one, so windows are single optimizer steps, but for
the first. A program without an optimizer has one window of all that it does. What an accelerator ran has the
correlation id of the operator that launched it.

Two faults of torch (seen in 2.13) are kept away from. A named part (`record_function`) that begins in one window and
ends in another writes to memory of the first, which is freed: so no window opens while there is such a part, and
`Optimizer.step`, at the end of which windows open and close, is one. And the name of code that is gone when a window
ends, such as a module's after its import, is read all the same: so it is held until then.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
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
from shoestring.profile.tree import NodeKind, TreeBuilder

FIRST_STEPS, EVERY = 2, 20
"""Steps of the first window, and of how many one is recorded then."""

BACKWARD, SPAN = 1, 7
"""torch's scopes of a function of the backward pass, and of a named part; others are of operators."""

RAN = ("kernel", "gpu_memcpy", "gpu_memset")
"""Kineto's kinds of what an accelerator ran."""
_LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "hipLaunchKernel")


def device_name() -> str:
    """What computes besides the processor; empty where that is nothing."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() and torch.cuda.is_initialized() else ""


# -- what an accelerator ran -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ran:
    """A kernel or a copy; times are nanoseconds."""

    name: str
    device: int
    start: int
    end: int
    operator: int
    """Correlation id of the operator that launched it; 0 is not known."""
    copies: bool


def ran(events: Iterable[Any]) -> list[Ran]:
    """What an accelerator ran, of the events of Kineto, in the order in which it began."""
    found = [
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
    return sorted(found, key=lambda each: each.start)


def dropped(events: Iterable[Any]) -> int:
    """Kernels that were launched and left no record."""
    kernels, launches = set[int](), set[int]()
    for event in events:
        if activity_of(event) == "kernel":
            kernels.add(event.correlation_id())
        elif event.name() in _LAUNCHES:
            launches.add(event.correlation_id())
    return len(launches - kernels)


def idle(work: Sequence[Ran]) -> list[int]:
    """Of each, in the order in which they began, the nanoseconds before it in which its device had nothing to run."""
    until, gaps = dict[int, int](), []
    for each in work:
        gaps.append(max(each.start - until.get(each.device, each.start), 0))
        until[each.device] = max(until.get(each.device, each.end), each.end)
    return gaps


def alone(work: Sequence[Ran]) -> list[int]:
    """Of each copy the nanoseconds in which no kernel ran on its device; 0 of a kernel."""
    busy: dict[int, list[list[int]]] = {}
    for each in work:
        if not each.copies:
            spans = busy.setdefault(each.device, [])
            if spans and each.start <= spans[-1][1]:
                spans[-1][1] = max(spans[-1][1], each.end)
            else:
                spans.append([each.start, each.end])
    return [_uncovered(each, np.array(busy.get(each.device, []) or [[0, 0]])) if each.copies else 0 for each in work]


def _uncovered(copy: Ran, busy: np.ndarray) -> int:
    covered = np.minimum(busy[:, 1], copy.end) - np.maximum(busy[:, 0], copy.start)
    return copy.end - copy.start - int(np.maximum(covered, 0).sum())


def add_kernels(builder: TreeBuilder, work: Sequence[Ran], nodes: Mapping[int, int], weight: float) -> None:
    """Add what an accelerator ran below the operators that launched it; below the root where that is not known.

    Args:
        nodes: of operators, by their correlation ids.
        weight: how many steps those of the window stand for.
    """
    for each, gap, lone in zip(work, idle(work), alone(work), strict=True):
        node = builder.node(nodes.get(each.operator, 0), NodeKind.KERNEL, each.name)
        took, before, unhidden = (round(value * weight) for value in (each.end - each.start, gap, lone))
        builder.add(node, count=round(weight), device=took, idle=before, alone=unhidden)


# -- operators and Python's lines ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """Where an event's children go."""

    event: Any
    node: int


class EventFold:
    """Adds events of torch.profiler to a tree.

    Args:
        timed: whether operators and lines get the times of the window; otherwise only what an accelerator ran has any.
    """

    def __init__(self, timed: bool = True) -> None:
        self.timed = timed
        self.builder, self.forward = TreeBuilder(), dict[int, int]()
        self.dropped = 0

    def add(self, results: Any, weight: float) -> None:
        """Add the events of a window that stands for so many steps."""
        nodes: dict[int, int] = {}
        for root in results.experimental_event_tree():
            self._add(root, weight, nodes)
        events = results.events()
        add_kernels(self.builder, ran(events), nodes, weight)
        self.dropped += dropped(events)

    def _add(self, root: Any, weight: float, nodes: dict[int, int]) -> None:
        left = [_Place(root, 0)]
        while left:
            place = left.pop()
            event, node = place.event, self._node(place.event, place.node)
            if node is None:
                continue
            if isinstance(event.extra_fields, profiling._ExtraFields_TorchOp):
                nodes[event.correlation_id] = node
            if self.timed:
                self._time(event, node, weight)
            left += [_Place(child, node) for child in reversed(event.children)]

    def _time(self, event: Any, node: int, weight: float) -> None:
        inner = sum(child.duration_time_ns for child in event.children)
        own = round(max(event.duration_time_ns - inner, 0) * weight)
        variance = own * own * (1 - 1 / weight)  # of calls that are independent; those of a step are not quite
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


# -- windows ---------------------------------------------------------------------------------------------------------


class TorchWindows:
    """Opens a window of torch.profiler for the first steps and then for one of `EVERY`, and folds each as it ends."""

    def __init__(self, fold: EventFold) -> None:
        self.fold = fold
        self.profiler: Any = None
        self.recorded, self.overhead, self.covered, self.skipped = 0.0, 0.0, 0, 0
        self.executed, self.parts, self.hooks = _executed(), _Parts(), ExitStack()
        self.hooks.enter_context(self.parts.seen())

    def stepped(self, steps: int) -> None:
        """An optimizer step has ended; so many have."""
        if self.profiler is not None:
            if steps >= FIRST_STEPS:
                self.close(1 if steps <= FIRST_STEPS else steps - self.covered, steps)
        elif steps == 1 or steps % EVERY == EVERY - 1:
            if self.parts.unfinished:
                self.skipped += 1
            else:
                self.open()

    def finish(self, steps: int) -> None:
        """The program has ended, after so many steps."""
        self.close(max(steps - self.covered, 1), steps)
        self.hooks.close()

    def open(self) -> None:
        """Begin a window."""
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # what was launched before the window is not of it; its end waits, too
        self.profiler = torch.profiler.profile(activities=activities, with_stack=True)
        self.executed.holding = self.parts.window = True
        began = time.perf_counter()
        self.profiler.start()
        self.opened = time.perf_counter()
        self.overhead += self.opened - began

    def close(self, weight: float, steps: int) -> None:
        """End a window that stands for so many steps."""
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
        """Sentences on what left no record."""
        said = []
        if lost := self.fold.dropped:
            said.append(f"{lost:,} kernels that were launched in the recorded steps left no record.")
        if self.skipped:
            said.append(
                f"{self.skipped:,} steps were not recorded: a named part was open that began in an earlier one."
            )
        return said


class _Parts:
    """Sees named parts begin and end, to say which began in a window and have not ended."""

    def __init__(self) -> None:
        self.unfinished, self.window = set[int](), False

    @contextmanager
    def seen(self) -> Iterator[None]:
        """While this lasts, parts are seen."""
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
    """Code that was executed while a window was open, such as that of modules."""

    holding: bool = False
    code: list[Any] = field(default_factory=list)

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.holding and event == "exec":
            self.code.append(arguments[0])


@cache
def _executed() -> _Executed:
    """That of this process, for an audit hook cannot be removed."""
    executed = _Executed()
    sys.addaudithook(executed.hook)
    return executed
