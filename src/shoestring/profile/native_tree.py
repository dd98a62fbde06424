"""Reads the call trees, one per thread, that the native collector (`native/callpaths.cpp`) has recorded."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from shoestring import native
from shoestring.profile.tree import NodeKind, TreeBuilder


@cache
def library() -> Any:
    """Load the native collector's library, once per process.

    Raises:
        CompileError: there is no compiler, or Python's headers are missing.
    """
    library = native.load("callpaths")
    library.callpaths_start.argtypes = [ctypes.c_int]
    library.callpaths_nanoseconds.restype = ctypes.c_double
    library.callpaths_inside.argtypes, library.callpaths_inside.restype = [ctypes.c_uint64], ctypes.c_uint32
    library.callpaths_ident.restype = library.callpaths_name.restype = ctypes.c_uint64
    library.callpaths_name.argtypes = [ctypes.c_uint32, ctypes.c_char_p, ctypes.c_uint64]
    library.callpaths_read.argtypes = [ctypes.c_uint32, ctypes.c_uint32, *[ctypes.c_void_p] * 3]
    library.callpaths_cost.argtypes = [ctypes.c_uint32, ctypes.c_void_p]
    library.callpaths_enter.argtypes, library.callpaths_enter.restype = [ctypes.c_char_p], ctypes.c_void_p
    library.callpaths_leave.argtypes = [ctypes.c_void_p]
    library.callpaths_native.argtypes = [ctypes.c_int64]
    library.callpaths_native_sample.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.callpaths_native_dropped.restype = library.callpaths_native_name.restype = ctypes.c_uint64
    library.callpaths_native_name.argtypes = [ctypes.c_uint64, ctypes.c_char_p, ctypes.c_uint64]
    return library


@dataclass
class ThreadData:
    """The call tree of one thread, in the layout of the native collector; N is the number of nodes."""

    places: np.ndarray
    """(N, 6): parent, name, line, kind, arguments, variants."""
    numbers: np.ndarray
    """(N, 6): count, inclusive, within (inclusive ticks of callees), least, most, graphed; times in ticks."""
    means: np.ndarray
    """(N, 3): sum of squared times of all calls; mean bytes and floating-point operations of a call."""
    ident: int
    cost: np.ndarray
    """(3): ticks spent on recording; number of calls not recorded because the tree was full; number of all calls."""
    variances: np.ndarray = field(default_factory=lambda: np.zeros((0, 2)))
    """(N, 2): variances of each node's count and own time if these are estimates; otherwise an array of shape (0,
    2)."""

    @property
    def outermost(self) -> int:
        """Ticks in operators and spans that are not inside another operator or span."""
        return int((self.numbers[:, 1] - self.numbers[:, 2]).sum())

    def subtract(self, earlier: ThreadData) -> None:
        """Subtract the sums of an earlier reading; `least` and `most` stay, as starting a recording resets them."""
        size = len(earlier.numbers)
        self.numbers[:size, _SUMMED] -= earlier.numbers[:, _SUMMED]
        self.means[:size, 0] -= earlier.means[:, 0]
        self.cost = self.cost - earlier.cost

    def replace(self, totals: np.ndarray, variances: np.ndarray) -> None:
        """Replace recorded sums by estimates; columns of `totals` are count, inclusive, within, graphed, squares."""
        size = len(totals)
        self.numbers[:size, _SUMMED] = np.rint(totals[:, :4])
        self.means[:size, 0] = totals[:, 4]
        self.variances = np.zeros((len(self.numbers), 2))
        self.variances[:size] = variances

    def graft(self, builder: TreeBuilder, names: Sequence[str], tick: float) -> dict[int, int]:
        """Add the nodes that were called and are not below a link; return a map from them to the builder's nodes."""
        return self._graft(builder, names, tick, {0: 0}, range(1, len(self.places)))

    def link(
        self,
        builder: TreeBuilder,
        own: dict[int, int],
        all_places: Sequence[dict[int, int]],
        names: Sequence[str],
        tick: float,
    ) -> None:
        """Add links and the nodes below links; the builder must already have all nodes that links may point to."""
        for node in range(1, len(self.places)):
            parent, thread, target, kind = (int(value) for value in self.places[node, :4])
            if kind == NodeKind.LINK and parent in own:
                forward = all_places[thread].get(target, -1) if thread < len(all_places) else -1
                own[node] = builder.node(own[parent], NodeKind.LINK, "", 0, forward)
        self._graft(builder, names, tick, own, [node for node in range(1, len(self.places)) if node not in own])

    def _graft(
        self, builder: TreeBuilder, names: Sequence[str], tick: float, own: dict[int, int], nodes: Sequence[int]
    ) -> dict[int, int]:
        # Nodes that were called themselves or have a called descendant; parents have smaller numbers than their
        # children.
        active = self.numbers[:, 0] > 0
        for node in range(len(active) - 1, 0, -1):
            if active[node]:
                active[self.places[node, 0]] = True
        for node in nodes:
            parent, name, line, kind, arguments, variants = (int(value) for value in self.places[node])
            if kind == NodeKind.LINK or parent not in own or not active[node]:
                continue
            own[node] = builder.node(own[parent], kind, names[name], line)
            count, inclusive, within, least, most, graphed = (int(value) for value in self.numbers[node])
            squares, nbytes, flops = self.means[node].tolist()
            of_count, of_own = self.variances[node].tolist() if len(self.variances) else (0.0, 0.0)
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
                    count_variance=of_count,
                    own_variance=of_own * tick * tick,
                )
        return own


INSIDE = 2**32 - 1
"""Return value of `callpaths_inside` for a thread that is running an operator."""
_SUMMED = [0, 1, 2, 5]
"""Columns of `ThreadData.numbers` that are sums over calls."""


def read(library: Any, thread: int) -> ThreadData:
    """Read the current tree of a thread from the native collector."""
    size = library.callpaths_size(thread)
    places, numbers = np.zeros((size, 6), np.uint32), np.zeros((size, 6), np.uint64)
    means = np.zeros((size, 3))
    library.callpaths_read(thread, size, *(array.ctypes.data for array in (places, numbers, means)))
    ident = library.callpaths_ident(thread)
    return ThreadData(places.astype(np.int64), numbers.astype(np.int64), means, ident, cost(library, thread))


def cost(library: Any, thread: int) -> np.ndarray:
    """Read `ThreadData.cost` of a thread."""
    numbers = np.zeros(3, np.uint64)
    library.callpaths_cost(thread, numbers.ctypes.data)
    return numbers.astype(np.int64)


def spelled(library: Any, number: int) -> str:
    """Look up the text of a name by its number in the native trees."""
    size = library.callpaths_name(number, None, 0)
    room = ctypes.create_string_buffer(size + 1)
    library.callpaths_name(number, room, size)
    return room.raw[:size].decode(errors="replace")
