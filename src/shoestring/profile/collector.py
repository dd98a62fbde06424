"""Records a program while it runs: operators natively (`native/callpaths.cpp`), Python's own time by sampling."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from types import FrameType
from typing import Any

import numpy as np
import torch

from shoestring import native
from shoestring.profile.recording import Facts, Profile
from shoestring.profile.tree import CallTree, NodeKind, TreeBuilder

SAMPLES_A_SECOND = 100
"""Of Python's own time. They only say how it is shared out: how much there is, is known exactly."""

DEEPEST = 192
"""Python frames of a sample; of deeper stacks the outermost are kept."""

Path = tuple[tuple[str, int], ...]
"""From the outside in: file<TAB>function, and line."""


@cache
def _library() -> Any:
    library = native.load("callpaths")
    library.callpaths_start.argtypes = [ctypes.c_int]
    library.callpaths_nanoseconds.restype = ctypes.c_double
    library.callpaths_inside.argtypes = [ctypes.c_uint64]
    library.callpaths_ident.restype = library.callpaths_name.restype = ctypes.c_uint64
    library.callpaths_name.argtypes = [ctypes.c_uint32, ctypes.c_char_p, ctypes.c_uint64]
    library.callpaths_read.argtypes = [ctypes.c_uint32, ctypes.c_uint32, *[ctypes.c_void_p] * 3]
    library.callpaths_cost.argtypes = [ctypes.c_uint32, ctypes.c_void_p]
    return library


class PythonSampler(threading.Thread):
    """Looks now and then where threads are that run no operator."""

    def __init__(self, library: Any, threads: Sequence[int]) -> None:
        super().__init__(name="shoestring-profile", daemon=True)
        self.library, self.watched = library, list(threads)
        self.seen: Counter[tuple[int, Path]] = Counter()
        self.ending = threading.Event()

    def run(self) -> None:
        while not self.ending.wait(1 / SAMPLES_A_SECOND):
            frames = sys._current_frames()
            for ident in self.watched:
                if (frame := frames.get(ident)) is not None and not self.library.callpaths_inside(ident):
                    self.seen[ident, path_of(frame)] += 1

    def finish(self) -> None:
        self.ending.set()
        self.join()


def path_of(frame: FrameType | None) -> Path:
    """The call path of a frame."""
    path: list[tuple[str, int]] = []
    while frame is not None:
        code = frame.f_code
        path.append((f"{code.co_filename}\t{code.co_qualname}", frame.f_lineno or 0))
        frame = frame.f_back
    return tuple(path[::-1][:DEEPEST])


@dataclass
class Recorded:
    """What was recorded."""

    tree: CallTree
    seconds: float
    """From start to stop, of the thread that started it."""
    overhead: float
    """Seconds of those that recording took."""
    lost: int
    """Operators whose call path found no room."""

    def profile(self) -> Profile:
        """As it is saved."""
        versions = {"torch": str(torch.__version__), "python": sys.version.split()[0]}
        return Profile(self.tree, Facts(list(sys.argv), self.seconds, self.overhead, self.lost, versions=versions))


@dataclass
class Collector:
    """Records all threads from `start` to `stop`; there is one at a time in a process.

    Raises:
        CompileError: there is no compiler, or Python's headers are missing.
    """

    frames: bool = True
    sampler: PythonSampler | None = None
    began: float = 0.0
    before: list[_ThreadData] = field(default_factory=list)

    def start(self) -> None:
        """Begin to record."""
        library = _library()
        if library.callpaths_start(int(self.frames)):
            raise RuntimeError("a profile is being recorded in this process already")
        self.before = [_read(library, thread) for thread in range(library.callpaths_threads())]
        self.ident = threading.get_ident()
        self.sampler = PythonSampler(library, [self.ident]) if self.frames else None
        if self.sampler is not None:
            self.sampler.start()
        self.began = time.perf_counter()

    def stop(self) -> Recorded:
        """End the recording; what was recorded since `start`."""
        library = _library()
        seconds = time.perf_counter() - self.began
        library.callpaths_stop()
        if self.sampler is not None:
            self.sampler.finish()
        tick = library.callpaths_nanoseconds()
        names = [_name(library, number) for number in range(library.callpaths_names())]
        after = [_read(library, thread) for thread in range(library.callpaths_threads())]
        for data, earlier in zip(after, self.before, strict=False):
            data.subtract(earlier)
        builder = TreeBuilder()
        places = [data.graft(builder, names, tick) for data in after]
        for data, own in zip(after, places, strict=True):
            data.link(builder, own, places, names, tick)
        mine = next((data for data in after if data.ident == self.ident), None)
        overhead = int(mine.cost[0]) * tick / 1e9 if mine else 0.0
        if self.sampler is not None:
            outside = seconds * 1e9 - overhead * 1e9 - (mine.outermost * tick if mine else 0.0)
            _share_out(builder, self.sampler.seen, max(outside, 0.0))
        return Recorded(builder.build(), seconds, overhead, sum(int(data.cost[1]) for data in after))


@dataclass
class _ThreadData:
    """A thread's tree as the native collector has it."""

    places: np.ndarray
    """(N, 6): parent, name, line, kind, arguments, variants."""
    numbers: np.ndarray
    """(N, 6): count, inclusive, within, least, most, graphed; times in ticks."""
    means: np.ndarray
    """(N, 3): squares of all calls; bytes and floating-point operations of a call."""
    ident: int
    cost: np.ndarray
    """(3): ticks that recording took, calls that found no room, and calls."""

    @property
    def outermost(self) -> int:
        """Ticks of operators that no other contains."""
        return int((self.numbers[:, 1] - self.numbers[:, 2]).sum())

    def subtract(self, earlier: _ThreadData) -> None:
        """Leave out what was recorded before; least and most stay those of all time."""
        size = len(earlier.numbers)
        self.numbers[:size, _SUMMED] -= earlier.numbers[:, _SUMMED]
        self.means[:size, 0] -= earlier.means[:, 0]
        self.cost = self.cost - earlier.cost

    def graft(self, builder: TreeBuilder, names: Sequence[str], tick: float) -> dict[int, int]:
        """Add all nodes that are not below a link; where those are that were called."""
        return self._graft(builder, names, tick, {0: 0}, range(1, len(self.places)))

    def link(
        self,
        builder: TreeBuilder,
        own: dict[int, int],
        all_places: Sequence[dict[int, int]],
        names: Sequence[str],
        tick: float,
    ) -> None:
        """Add the nodes below links, now that all that they may point to is there."""
        for node in range(1, len(self.places)):
            parent, thread, target, kind = (int(value) for value in self.places[node, :4])
            if kind == NodeKind.LINK and parent in own:
                forward = all_places[thread].get(target, -1) if thread < len(all_places) else -1
                own[node] = builder.node(own[parent], NodeKind.LINK, "", 0, forward)
        self._graft(builder, names, tick, own, [node for node in range(1, len(self.places)) if node not in own])

    def _graft(
        self, builder: TreeBuilder, names: Sequence[str], tick: float, own: dict[int, int], nodes: Sequence[int]
    ) -> dict[int, int]:
        active = _with_calls(self.places[:, 0], self.numbers[:, 0])
        for node in nodes:
            parent, name, line, kind, arguments, variants = (int(value) for value in self.places[node])
            if kind == NodeKind.LINK or parent not in own or not active[node]:
                continue
            own[node] = builder.node(own[parent], kind, names[name], line)
            count, inclusive, within, least, most, graphed = (int(value) for value in self.numbers[node])
            squares, nbytes, flops = self.means[node].tolist()
            if count:
                builder.add(
                    own[node],
                    count=count,
                    own=round((inclusive - within) * tick),
                    least=round(least * tick),
                    most=round(most * tick),
                    squares=squares * tick * tick,
                    graphed=graphed,
                    bytes=round(nbytes * count),
                    flops=round(flops * count),
                    inputs=names[arguments],
                    variants=variants,
                )
        return own


_SUMMED = [0, 1, 2, 5]
"""Columns of `_ThreadData.numbers` that add up over calls."""


def _with_calls(parent: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Which nodes were called, or have one below them that was."""
    active = count > 0
    for node in range(len(parent) - 1, 0, -1):
        if active[node]:
            active[parent[node]] = True
    return active


def _read(library: Any, thread: int) -> _ThreadData:
    size = library.callpaths_size(thread)
    places, numbers = np.zeros((size, 6), np.uint32), np.zeros((size, 6), np.uint64)
    means, cost = np.zeros((size, 3)), np.zeros(3, np.uint64)
    library.callpaths_read(thread, size, *(each.ctypes.data for each in (places, numbers, means)))
    library.callpaths_cost(thread, cost.ctypes.data)
    return _ThreadData(
        places.astype(np.int64),
        numbers.astype(np.int64),
        means,
        library.callpaths_ident(thread),
        cost.astype(np.int64),
    )


def _name(library: Any, number: int) -> str:
    size = library.callpaths_name(number, None, 0)
    room = ctypes.create_string_buffer(size + 1)
    library.callpaths_name(number, room, size)
    return room.raw[:size].decode(errors="replace")


def _share_out(builder: TreeBuilder, seen: Counter[tuple[int, Path]], nanoseconds: float) -> None:
    """Give the time outside operators to the lines that samples were taken at."""
    total = sum(seen.values())
    if not total:
        builder.add(0, own=round(nanoseconds))
    for (_, path), samples in seen.items():
        node = 0
        for name, line in path:
            node = builder.node(node, NodeKind.PYTHON, name, line)
        builder.add(node, own=round(nanoseconds * samples / total))
