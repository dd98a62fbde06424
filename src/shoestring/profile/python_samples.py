"""Attributes Python's own time, outside operators, to lines, by sampling the frames of threads that run no operator.

The main thread is interrupted to sample itself (`native/asked.cpp`). A sampler in another thread would mostly find the
main thread where it releases the interpreter's lock, at lines that call operators. Other threads cannot be interrupted,
so the sampling thread samples them.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from types import CodeType, FrameType
from typing import Any

from shoestring import native
from shoestring.profile.lines import IMPORTS, package_of
from shoestring.profile.native_tree import INSIDE
from shoestring.profile.tree import GAP, NodeKind, TreeBuilder, both_ends

log = logging.getLogger("shoestring")

SHORTEST, LONGEST, GROWTH = 0.02, 0.05, 1.01
"""Seconds between samples: the first interval, the longest interval, and the ratio of each interval to the one before.
Sampling only decides how Python's own time is divided among lines; the total is measured exactly."""

RARE = 0.01
"""Samples of a library's line with less than this fraction of all samples count for its caller, so that trees stay
small in long runs."""


_BOOTSTRAP = "<frozen importlib."
# `co_name` is set as well, because code objects are compared by it, but not by file or qualified name.
_LEFT_OUT = compile("", "", "exec").replace(co_name=GAP, co_qualname=GAP), 0
_IMPORTING = compile("", IMPORTS, "exec").replace(co_qualname="importing packages"), 0

Path = list[tuple[CodeType, int]]


@cache
def asking() -> Any:
    """The native library that interrupts the main thread for samples; None if it cannot be compiled."""
    try:
        library = native.load("asked")
    except native.CompileError as error:
        log.warning("Python's own time is attributed less accurately, mostly to lines that call operators: %s", error)
        return None
    numbers = [ctypes.c_double] * 3
    library.asked_begin.argtypes = [ctypes.c_uint64, ctypes.py_object, ctypes.c_void_p, *numbers]
    return library


def path_of(frame: FrameType | None) -> Path:
    """A frame and its callers, the innermost first."""
    path: Path = []
    while frame is not None:
        path.append((frame.f_code, frame.f_lineno or 0))
        frame = frame.f_back
    return path


def imports_package(path: Path) -> bool:
    """Whether an installed package is being imported. Imports of the program's own modules do not count, because they
    may do the program's work."""
    importing = False
    for code, _ in reversed(path):
        if code.co_filename.startswith(_BOOTSTRAP):
            importing = True
        elif importing and package_of(code.co_filename):
            return True
        else:
            importing = False
    return importing


class Samples:
    """Samples of call paths as a tree, in which a line is a child of the line that called it; node 0 is the root."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, CodeType, int], int] = {}
        self.counts = [0]

    def add(self, frame: FrameType | None, times: int = 1) -> None:
        """Count a sample of this frame and its callers, `times` times."""
        path = path_of(frame)
        if imports_package(path):
            path = [_IMPORTING]
        node = 0
        for code, line in (entry or _LEFT_OUT for entry in both_ends(path[::-1])):
            node = self.known.setdefault((node, code, line), len(self.counts))
            if node == len(self.counts):
                self.counts.append(0)
        self.counts[node] += times

    def share_out(self, builder: TreeBuilder, nanoseconds: float, span: int = 0) -> None:
        """Divide time outside operators among the sampled lines.

        Args:
            nanoseconds: the time to divide.
            span: node of the tree inside which the samples were taken, and of whose own time this is a part; 0 for
                none. Lines that are already above this node are not added again.
        """
        if not span:
            builder.add(0, own=round(nanoseconds))
        total, counts = sum(self.counts), self._without_rare()
        wanted = list(map(bool, counts))
        for (parent, _, _), node in reversed(self.known.items()):
            wanted[parent] |= wanted[node]
        above = _lines_above(builder, span)
        places, level = [span] * len(counts), [0] * len(counts)
        for (parent, code, line), node in self.known.items():
            if not wanted[node]:
                continue
            frame = None if (code, line) == _LEFT_OUT else (f"{code.co_filename}\t{code.co_qualname}", line)
            at = level[parent]
            if places[parent] == span and above[at : at + 1] == [frame]:
                level[node] = at + 1
                continue
            level[node] = len(above)
            places[node] = builder.line(places[parent], frame)
            share = counts[node] / total
            own, variance = int(nanoseconds * share), nanoseconds**2 * share * (1 - share) / total
            builder.add(places[node], own=own, own_variance=variance)
            builder.add(span, own=-own)

    def _without_rare(self) -> list[int]:
        """Sample counts by node; counts of rare lines of libraries are moved to their callers."""
        counts = list(self.counts)
        imports = sum(counts[node] for (_, *line), node in self.known.items() if (*line,) == _IMPORTING)
        for (parent, code, _), node in reversed(self.known.items()):
            if parent and counts[node] < RARE * (sum(self.counts) - imports) and package_of(code.co_filename):
                counts[parent] += counts[node]
                counts[node] = 0
        return counts


def _lines_above(builder: TreeBuilder, node: int) -> list[tuple[str, int] | None]:
    """The lines above a node as (file and function, line), the outermost first; None for a gap."""
    names = list(builder.names)
    lines: list[tuple[str, int] | None] = []
    while node > 0:
        node, kind, name, line, _ = builder.rows[node]
        if kind == NodeKind.PYTHON:
            lines.append((names[name], line))
        elif kind == NodeKind.OVERFLOWN:
            lines.append(None)
    return lines[::-1]


class PythonSampler(threading.Thread):
    """Samples the Python frames of threads that are not running an operator.

    Args:
        threads: Python's identifiers of the threads to sample.
        inside: C function that maps a thread identifier to the thread's innermost span (0 for none), or to `INSIDE` if
            the thread is running an operator or is unknown.
        tick: called before each sample.
    """

    def __init__(self, threads: Sequence[int], inside: Any, tick: Callable[[], None]) -> None:
        super().__init__(name="shoestring-profile", daemon=True)
        self.watched, self.inside, self.tick = list(threads), inside, tick
        self.seen = {0: Samples()}
        self.interval = SHORTEST
        self.seconds = 0.0  # processor time of this thread
        self.ending = threading.Event()
        self.asking: Any = None
        self.looking = self.look  # keeps the bound method alive, because the library holds no reference

    def start(self) -> None:
        main = threading.main_thread().ident
        if main in self.watched and (library := asking()) is not None:
            self.watched.remove(main)
            self.asking = library
            library.asked_begin(main, self.looking, self.inside, SHORTEST, LONGEST, GROWTH)
        super().start()

    def look(self, times: int) -> None:
        """Sample the calling thread unless it runs an operator; the sample counts `times` times."""
        self._see(threading.get_ident(), sys._getframe(1), times)

    def run(self) -> None:
        while not self.ending.wait(self.interval):
            self.interval = min(LONGEST, self.interval * GROWTH)
            self.tick()
            frames = sys._current_frames() if self.watched else {}
            if self.ending.is_set():  # the program is already waiting for this thread to end
                return
            for ident in self.watched:
                if (frame := frames.get(ident)) is not None:
                    self._see(ident, frame)
            self.seconds = time.thread_time()

    def _see(self, ident: int, frame: FrameType, times: int = 1) -> None:
        if (span := self.inside(ident)) != INSIDE:
            self.seen.setdefault(span, Samples()).add(frame, times)

    def end(self) -> None:
        """Stop sampling; the thread itself ends soon after."""
        self.ending.set()
        if self.asking is not None:
            self.asking.asked_end()
