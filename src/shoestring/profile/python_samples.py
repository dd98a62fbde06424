"""Where Python's own time goes, outside of operators: samples of the frames of threads that run none.

The main thread is asked to look at itself (`native/asked.cpp`), because whoever looks from outside sees it where it
lets go of the interpreter's lock, which is at lines that call operators. Other threads cannot be asked.
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
from shoestring.profile.tree import NodeKind, TreeBuilder

log = logging.getLogger("shoestring")

SHORTEST, LONGEST, GROWTH = 0.02, 0.05, 1.01
"""Seconds from one sample to the next, at first and after a while, and what they grow by each time. They only say how
Python's own time is shared out: how much there is, is known exactly."""

DEEPEST = 192
"""Python frames of a sample; of deeper stacks the outermost are kept."""

RARE = 0.01
"""Of all samples; a line of a library with fewer is counted with its caller, so that a tree does not grow with time."""


_BOOTSTRAP = "<frozen importlib."
_IMPORTING = compile("", IMPORTS, "exec").replace(co_qualname="importing packages"), 0

Path = list[tuple[CodeType, int]]


@cache
def asking() -> Any:
    """What asks the main thread; None where it cannot be compiled."""
    try:
        library = native.load("asked")
    except native.CompileError as error:
        log.warning("Python's own time is told less exactly, by lines that call operators: %s", error)
        return None
    numbers = [ctypes.c_double] * 3
    library.asked_begin.argtypes = [ctypes.c_uint64, ctypes.py_object, ctypes.c_void_p, *numbers]
    return library


def path_of(frame: FrameType | None) -> Path:
    """A frame and those that called it, the innermost first."""
    path: Path = []
    while frame is not None:
        path.append((frame.f_code, frame.f_lineno or 0))
        frame = frame.f_back
    return path


def imports_package(path: Path) -> bool:
    """Whether a package is being imported: a program's own modules may do their work while they are imported."""
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
    """Samples of call paths, as a tree: a node is a line below that which called it, and the first is above all."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, CodeType, int], int] = {}
        self.counts = [0]

    def add(self, frame: FrameType | None, times: int = 1) -> None:
        """One more sample, or as many as are given, of this frame and those that called it."""
        path = path_of(frame)
        if imports_package(path):
            path = [_IMPORTING]
        node = 0
        for code, line in path[: -DEEPEST - 1 : -1]:
            node = self.known.setdefault((node, code, line), len(self.counts))
            if node == len(self.counts):
                self.counts.append(0)
        self.counts[node] += times

    def share_out(self, builder: TreeBuilder, nanoseconds: float, span: int = 0) -> None:
        """Give time outside operators to the lines that samples were taken at.

        Args:
            nanoseconds: all of it.
            span: the node below which these samples were taken, and whose own time this is; what called it is above it
                already.
        """
        if not span:
            builder.add(0, own=round(nanoseconds))
        total, counts = sum(self.counts), self._kept()
        wanted = list(map(bool, counts))
        for (parent, _, _), node in reversed(self.known.items()):
            wanted[parent] |= wanted[node]
        above = _lines_above(builder, span)
        places, level = [span] * len(counts), [0] * len(counts)
        for (parent, code, line), node in self.known.items():
            if not wanted[node]:
                continue
            name, at = f"{code.co_filename}\t{code.co_qualname}", level[parent]
            if places[parent] == span and above[at : at + 1] == [(name, line)]:
                level[node] = at + 1
                continue
            level[node] = len(above)
            places[node] = builder.node(places[parent], NodeKind.PYTHON, name, line)
            share = counts[node] / total
            own, variance = int(nanoseconds * share), nanoseconds**2 * share * (1 - share) / total
            builder.add(places[node], own=own, own_variance=variance)
            builder.add(span, own=-own)

    def _kept(self) -> list[int]:
        """Samples by node, those of rare lines of libraries with what called them."""
        counts = list(self.counts)
        imports = sum(counts[node] for (_, *line), node in self.known.items() if (*line,) == _IMPORTING)
        for (parent, code, _), node in reversed(self.known.items()):
            if parent and counts[node] < RARE * (sum(self.counts) - imports) and package_of(code.co_filename):
                counts[parent] += counts[node]
                counts[node] = 0
        return counts


def _lines_above(builder: TreeBuilder, node: int) -> list[tuple[str, int]]:
    """The lines that a node is below, as (file and function, line), the outermost first."""
    names, lines = list(builder.names), []
    while node > 0:
        node, kind, name, line, _ = builder.rows[node]
        if kind == NodeKind.PYTHON:
            lines.append((names[name], line))
    return lines[::-1]


class PythonSampler(threading.Thread):
    """Looks now and then where threads are that run no operator.

    Args:
        threads: Python's identifiers of those that are watched.
        inside: a function of C that says of one of them what it is in: the innermost span, 0 where it is in none;
            `INSIDE` where it runs an operator now, or nobody would know.
        tick: is called before each sample.
    """

    def __init__(self, threads: Sequence[int], inside: Any, tick: Callable[[], None]) -> None:
        super().__init__(name="shoestring-profile", daemon=True)
        self.watched, self.inside, self.tick = list(threads), inside, tick
        self.seen = {0: Samples()}
        self.interval = SHORTEST
        self.seconds = 0.0  # of the processor, for this thread
        self.ending = threading.Event()
        self.asking: Any = None
        self.looking = self.look  # one object, for the library does not hold it

    def start(self) -> None:
        main = threading.main_thread().ident
        if main in self.watched and (library := asking()) is not None:
            self.watched.remove(main)
            self.asking = library
            library.asked_begin(main, self.looking, self.inside, SHORTEST, LONGEST, GROWTH)
        super().start()

    def look(self, times: int) -> None:
        """The thread that calls it looks at itself, where it runs no operator; as so many samples."""
        self._see(threading.get_ident(), sys._getframe(1), times)

    def run(self) -> None:
        while not self.ending.wait(self.interval):
            self.interval = min(LONGEST, self.interval * GROWTH)
            self.tick()
            frames = sys._current_frames() if self.watched else {}
            if self.ending.is_set():  # what is seen is who waits for the end
                return
            for ident in self.watched:
                if (frame := frames.get(ident)) is not None:
                    self._see(ident, frame)
            self.seconds = time.thread_time()

    def _see(self, ident: int, frame: FrameType, times: int = 1) -> None:
        if (span := self.inside(ident)) != INSIDE:
            self.seen.setdefault(span, Samples()).add(frame, times)

    def end(self) -> None:
        """See nothing more; the thread itself ends soon."""
        self.ending.set()
        if self.asking is not None:
            self.asking.asked_end()
