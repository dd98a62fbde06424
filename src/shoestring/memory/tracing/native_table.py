"""Reads the records of the native observer of allocations (`native/allocations.cpp`)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from shoestring import native

BLOCK = np.dtype(
    [(name, np.uint64) for name in ("born", "died", "born_at", "died_at", "address", "bytes")]
    + [(name, np.uint32) for name in ("context", "flags", "device", "padding")]
)
CONTEXT = np.dtype([(name, np.uint32) for name in ("phase", "module", "outer", "inner", "place", "part")])

SURVIVED, IN_GRAPH = 1, 2
"""Flags of a block: it outlived the outermost operator that allocated it; this operator is in autograd's graph."""
ALIVE = np.uint64(2**64 - 1)
"""Value of the field `died` for a block that is still alive."""
DEVICES = 17
"""Number of devices that are observed: the CPU and 16 accelerators."""


class Activity(IntEnum):
    """The phase of training in which a thread allocated a block."""

    OUTSIDE = 0
    FORWARD = 1
    RECOMPUTED = 2
    BACKWARD = 3
    OPTIMIZER = 4
    BEFORE = 5


class CodePart(IntEnum):
    """The part of the code that allocated a block, if no module was running."""

    NOWHERE = 0
    OWN = 1
    COMMUNICATION = 2
    CHECKPOINT = 3


@cache
def library() -> Any:
    """Load the native observer's library, once per process. Calls hold the GIL (PyDLL), because no call waits for
    Python.

    Raises:
        CompileError: there is no compiler, or Python's headers are missing.
    """
    library = ctypes.PyDLL(native.load("allocations")._name)
    integer, pointer = ctypes.c_uint64, ctypes.c_void_p
    library.allocations_start.argtypes = [ctypes.c_int, ctypes.c_int, integer]
    library.allocations_adopt.argtypes = [pointer]
    library.allocations_name.argtypes = [ctypes.c_char_p]
    library.allocations_names.restype = integer
    library.allocations_spelling.argtypes, library.allocations_spelling.restype = (
        [
            ctypes.c_uint32,
            ctypes.c_char_p,
            integer,
        ],
        integer,
    )
    library.allocations_device.argtypes = [ctypes.c_uint32, pointer]
    library.allocations_counts.argtypes = [pointer]
    for name in ("blocks", "contexts"):
        function = getattr(library, f"allocations_{name}")
        function.argtypes, function.restype = [pointer, integer], integer
    return library


@dataclass(frozen=True)
class DeviceTotals:
    """Numbers of bytes allocated on a device in the current window."""

    total: int
    """Bytes allocated at the moment."""
    peak: int
    """Largest number of bytes in the window."""
    event: int
    """Number of the event at which the peak was reached."""
    reserved: int
    """Bytes that torch has reserved on an accelerator, in use or not; 0 on a CPU."""


def device(number: int) -> DeviceTotals:
    """Read the totals of the CPU (0) or of accelerator `number` - 1."""
    room = np.zeros(4, np.uint64)
    library().allocations_device(number, room.ctypes.data)
    return DeviceTotals(*map(int, room))


class ObserverCounts(NamedTuple):
    """Counters of the native observer."""

    events: int
    """Number of allocations and releases."""
    forgotten: int
    """Number of the window's freed blocks that were dropped, because there were too many."""
    failed: int
    """Bytes of the allocation that failed; 0 if none failed."""
    context: int
    """Index of the failed allocation's context."""
    begun_at: int
    """Start of the window, in nanoseconds."""


def counts() -> ObserverCounts:
    """Read the counters of the current recording."""
    room = np.zeros(5, np.uint64)
    library().allocations_counts(room.ctypes.data)
    return ObserverCounts(*map(int, room))


def blocks() -> np.ndarray:
    """Read the blocks of the window; blocks that were freed in the window come first."""
    return _read("blocks", BLOCK)


def contexts() -> np.ndarray:
    """Read the table of allocation contexts."""
    return _read("contexts", CONTEXT)


def _read(name: str, dtype: np.dtype) -> np.ndarray:
    function = getattr(library(), f"allocations_{name}")
    size = 0
    while True:  # the table grows while other threads allocate
        room = np.zeros(size, dtype)
        count = function(room.ctypes.data, size)
        if count <= size:
            return room[:count]
        size = count + 256


def spelled(name: int) -> str:
    """Look up the text of an interned name by its number."""
    size = 256
    while True:
        room = ctypes.create_string_buffer(size)
        length = library().allocations_spelling(name, room, size)
        if length <= size:
            return room.raw[:length].decode(errors="replace")
        size = length
