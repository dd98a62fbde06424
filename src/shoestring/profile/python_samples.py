"""Attributes time in Python outside operators to lines, by sampling the frames of threads that run no operator.

The main thread is interrupted to sample itself (`native/asked.cpp`). A sampling thread would mostly see the main thread
at the points where the main thread releases the interpreter lock, which are lines that call operators. Other threads
cannot be interrupted, so the sampling thread samples them.
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
"""Interval between samples in seconds: the first interval, the longest interval, and the growth factor from one
interval to the next. Sampling only divides the time in Python among lines; the total is measured exactly."""

RARE = 0.01
"""Minimum fraction of all samples for a line of a library. A line with fewer samples is left out, and its samples count
for its caller, so that trees stay small in long runs."""


_BOOTSTRAP = "<frozen importlib."
# `co_name` is set as well, because comparing code objects compares `co_name`, but neither file nor qualified name.
_LEFT_OUT = compile("", "", "exec").replace(co_name=GAP, co_qualname=GAP), 0
_IMPORTING = compile("", IMPORTS, "exec").replace(co_qualname="importing packages"), 0

Path = list[tuple[CodeType, int]]


@cache
def asking() -> Any:
    """Load the native library that interrupts the main thread for samples; None if the library cannot be compiled."""
    try:
        library = native.load("asked")
    except native.CompileError as error:
        log.warning("Python's own time is attributed less accurately, mostly to lines that call operators: %s", error)
        return None
    numbers = [ctypes.c_double] * 3
    library.asked_begin.argtypes = [ctypes.c_uint64, ctypes.py_object, ctypes.c_void_p, *numbers]
    return library


def path_of(frame: FrameType | None) -> Path:
    """List (code, line) of a frame and its callers, the innermost first."""
    path: Path = []
    while frame is not None:
        path.append((frame.f_code, frame.f_lineno or 0))
        frame = frame.f_back
    return path


def imports_package(path: Path) -> bool:
    """Whether an installed package is being imported. Imports of the program's own modules do not count, because such
    an import may run the program's actual work."""
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
    """A tree of sampled call paths: the parent of a line is the line that called it, and node 0 is the root."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, CodeType, int], int] = {}
        self.counts = [0]

    def add(self, frame: FrameType | None, times: int = 1) -> None:
        """Count a sample of a frame and its callers; the sample has the weight `times`."""
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
            span: node of the span in which the samples were taken, from whose own time the divided time is subtracted;
                0 if there is no span. Lines that are already above the span's node are not added again.
        """
        if not span:
            builder.add(0, own=round(nanoseconds))
        total, counts = sum(self.counts), list(self.counts)
        # Samples of rare lines of libraries count for the lines that call them.
        imports = sum(counts[node] for (_, *line), node in self.known.items() if (*line,) == _IMPORTING)
        for (parent, code, _), node in reversed(self.known.items()):
            if parent and counts[node] < RARE * (total - imports) and package_of(code.co_filename):
                counts[parent] += counts[node]
                counts[node] = 0
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


def _lines_above(builder: TreeBuilder, node: int) -> list[tuple[str, int] | None]:
    """The lines above a node as (`file<TAB>function`, line), the outermost line first; None stands for a gap."""
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
        threads: Python's thread identifiers of the threads to sample.
        inside: C function that maps a thread identifier to the thread's innermost span (0 for none), or to `INSIDE` if
            the thread is running an operator or is unknown.
        tick: function called before each sample.
    """

    def __init__(self, threads: Sequence[int], inside: Any, tick: Callable[[], None]) -> None:
        super().__init__(name="shoestring-profile", daemon=True)
        self.watched, self.inside, self.tick = list(threads), inside, tick
        self.seen = {0: Samples()}
        self.interval = SHORTEST
        self.seconds = 0.0  # processor time of this thread
        self.ending = threading.Event()
        self.asking: Any = None
        self.looking = self.look  # keeps a reference to the bound method, because the library holds none

    def start(self) -> None:
        main = threading.main_thread().ident
        if main in self.watched and (library := asking()) is not None:
            self.watched.remove(main)
            self.asking = library
            library.asked_begin(main, self.looking, self.inside, SHORTEST, LONGEST, GROWTH)
        super().start()

    def look(self, times: int) -> None:
        """Sample the calling thread unless it is running an operator; the sample has the weight `times`."""
        self._see(threading.get_ident(), sys._getframe(1), times)

    def run(self) -> None:
        while not self.ending.wait(self.interval):
            self.interval = min(LONGEST, self.interval * GROWTH)
            self.tick()
            frames = sys._current_frames() if self.watched else {}
            if self.ending.is_set():  # the program is waiting for this thread to end
                return
            for ident in self.watched:
                if (frame := frames.get(ident)) is not None:
                    self._see(ident, frame)
            self.seconds = time.thread_time()

    def _see(self, ident: int, frame: FrameType, times: int = 1) -> None:
        if (span := self.inside(ident)) != INSIDE:
            self.seen.setdefault(span, Samples()).add(frame, times)

    def end(self) -> None:
        """Stop sampling; the sampling thread ends soon after."""
        self.ending.set()
        if self.asking is not None:
            self.asking.asked_end()
