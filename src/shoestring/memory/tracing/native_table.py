"""Reads what the native observer of allocations (`native/allocations.cpp`) has recorded."""

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
"""Flags of a block: it outlived the outermost operator that made it; that made a part of autograd's graph."""
ALIVE = np.uint64(2**64 - 1)
"""When a block died that has not."""
DEVICES = 17
"""The CPU, and 16 accelerators."""


class Activity(IntEnum):
    """What a thread did when it allocated."""

    OUTSIDE = 0
    FORWARD = 1
    RECOMPUTED = 2
    BACKWARD = 3
    OPTIMIZER = 4
    BEFORE = 5


class CodePart(IntEnum):
    """Whose line it was, where no module ran."""

    NOWHERE = 0
    OWN = 1
    COMMUNICATION = 2
    CHECKPOINT = 3


@cache
def library() -> Any:
    """The native observer; it is one a process. Calls keep the GIL: none of them waits for Python.

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
    """Bytes of a device, in the window that runs."""

    total: int
    peak: int
    event: int
    """Number of the event that reached the peak."""
    reserved: int
    """What torch holds of an accelerator, in use or not; 0 on a CPU."""


def device(number: int) -> DeviceTotals:
    """The totals of the CPU (0) or of accelerator `number` - 1."""
    room = np.zeros(4, np.uint64)
    library().allocations_device(number, room.ctypes.data)
    return DeviceTotals(*map(int, room))


class ObserverCounts(NamedTuple):
    """What the observer has counted."""

    events: int
    forgotten: int
    """Blocks of the window that were freed and found no room."""
    failed: int
    """Bytes that could not be had."""
    context: int
    """What those were for."""
    begun_at: int
    """Nanoseconds at the beginning of the window."""


def counts() -> ObserverCounts:
    """Of the recording that runs."""
    room = np.zeros(5, np.uint64)
    library().allocations_counts(room.ctypes.data)
    return ObserverCounts(*map(int, room))


def blocks() -> np.ndarray:
    """The blocks of the window, those that were freed in it first."""
    return _read("blocks", BLOCK)


def contexts() -> np.ndarray:
    """Where blocks were allocated, by their number."""
    return _read("contexts", CONTEXT)


def _read(name: str, dtype: np.dtype) -> np.ndarray:
    function = getattr(library(), f"allocations_{name}")
    size = 0
    while True:  # other threads allocate meanwhile
        room = np.zeros(size, dtype)
        count = function(room.ctypes.data, size)
        if count <= size:
            return room[:count]
        size = count + 256


def spelled(name: int) -> str:
    """The text of a name."""
    size = 256
    while True:
        room = ctypes.create_string_buffer(size)
        length = library().allocations_spelling(name, room, size)
        if length <= size:
            return room.raw[:length].decode(errors="replace")
        size = length
