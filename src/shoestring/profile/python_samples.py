"""Where Python's own time goes, outside of operators: samples of the frames of threads that run none."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from types import FrameType

from shoestring.profile.tree import NodeKind, TreeBuilder

SAMPLES_A_SECOND = 100
"""They only say how Python's own time is shared out: how much there is, is known exactly."""

DEEPEST = 192
"""Python frames of a sample; of deeper stacks the outermost are kept."""

Path = tuple[tuple[str, int], ...]
"""From the outside in: file<TAB>function, and line."""


class PythonSampler(threading.Thread):
    """Looks now and then where threads are that run no operator.

    Args:
        threads: Python's identifiers of those that are watched.
        inside: whether a thread runs an operator now, or nobody would know.
        tick: is called before each sample.
    """

    def __init__(self, threads: Sequence[int], inside: Callable[[int], bool], tick: Callable[[], None]) -> None:
        super().__init__(name="shoestring-profile", daemon=True)
        self.watched, self.inside, self.tick = list(threads), inside, tick
        self.seen: Counter[Path] = Counter()
        self.ending = threading.Event()

    def run(self) -> None:
        while not self.ending.wait(1 / SAMPLES_A_SECOND):
            self.tick()
            watched = [ident for ident in self.watched if not self.inside(ident)]
            frames = sys._current_frames() if watched else {}
            for ident in watched:
                if (frame := frames.get(ident)) is not None:
                    self.seen[path_of(frame)] += 1

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


def share_out(builder: TreeBuilder, seen: Counter[Path], nanoseconds: float) -> None:
    """Give the time outside operators to the lines that samples were taken at."""
    total = sum(seen.values())
    if not total:
        builder.add(0, own=round(nanoseconds))
    for path, samples in seen.items():
        node = 0
        for name, line in path:
            node = builder.node(node, NodeKind.PYTHON, name, line)
        variance = (nanoseconds / total) ** 2 * samples * (1 - samples / total)
        builder.add(node, own=round(nanoseconds * samples / total), own_variance=variance)
