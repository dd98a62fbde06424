"""Divides operators' own time among native functions, using stack samples that processor-time timers trigger (SIGPROF).

`native/native_frames.h` takes the samples. This module counts the samples and divides an operator's measured time in
proportion to the counts.
"""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shoestring.core.errors import ConfigError
from shoestring.profile.tree import NodeKind, TreeBuilder

EVERY = 0.01
"""Interval between two samples, in processor seconds of a thread."""
FRAMES = 64
"""Maximum number of frames in a sample; if a stack is deeper, only its innermost frames are recorded."""
MOST = 1 << 16
"""Maximum number of distinct stacks; samples of further stacks are counted without a stack, for their operator."""
_PARAMETERS = re.compile(r"\((?!anonymous namespace)[^()]*\)")
_TEMPLATE = re.compile(r"<[^<>]*>")

Stack = tuple[str, ...]
"""A native call stack: functions as `library<TAB>name`, the outermost function first."""


class NativeFrames:
    """Counts samples of the native call stacks inside operators.

    Raises:
        ConfigError: the system has no processor-time timers, or another profiler uses SIGPROF.
    """

    def __init__(self, library: Any) -> None:
        self.library = library
        self.counts: Counter[tuple[int, int, Stack]] = Counter()
        self.known: dict[int, str] = {}
        """The function at an address as `library<TAB>name`; "" for functions of the recorder itself."""
        self._about = np.zeros(3, np.uint32)
        self._addresses = np.zeros(FRAMES, np.uint64)
        refused = library.callpaths_native(round(EVERY * 1e9))
        if refused:
            why = {1: "only Linux has timers that can sample them", 2: "another profiler has the signal SIGPROF"}
            raise ConfigError(f"native frames cannot be recorded: {why[refused]}")

    def drain(self) -> None:
        """Read and count the samples taken since the last call."""
        while size := self.library.callpaths_native_sample(self._about.ctypes.data, self._addresses.ctypes.data):
            thread, node, whole = self._about.tolist()
            functions = []
            for address in self._addresses[: size - 1].tolist():
                if address not in self.known:
                    room = ctypes.create_string_buffer(4096)
                    length = self.library.callpaths_native_name(address, room, len(room))
                    path, _, name = room.raw[: min(length, len(room))].decode(errors="replace").partition("\t")
                    if len(self.known) >= MOST:
                        self.known.clear()
                    ours = path == self.library._name
                    self.known[address] = "" if ours else f"{path or 'compiled as it ran'}\t{plain(name) or 'unknown'}"
                functions.append(self.known[address])
            if any(function == "" for function in functions):
                continue  # a sample of the recorder itself, whose time does not belong to the operator
            # If unwinding the stack did not reach the operator, only the innermost function can be trusted.
            stack = tuple(functions[::-1] if whole else functions[:1])
            if len(self.counts) >= MOST and (thread, node, stack) not in self.counts:
                stack = ()
            self.counts[thread, node, stack] += 1

    def share_out(self, builder: TreeBuilder, places: Sequence[Mapping[int, int]]) -> None:
        """Divide operators' own time among the functions in their samples.

        Args:
            places: one map per thread, from the nodes of the thread's tree to the nodes of the merged tree.
        """
        self.drain()
        stacks: dict[int, Counter[Stack]] = {}
        for (thread, node, stack), count in self.counts.items():
            if thread < len(places) and (place := places[thread].get(node)) is not None:
                stacks.setdefault(place, Counter())[stack] += count
        for place, counted in stacks.items():
            own, total, assigned = int(builder.numbers[place]["own"]), counted.total(), 0
            for stack, count in counted.items():
                node = place
                for function in stack:
                    node = builder.node(node, NodeKind.NATIVE, function)
                if node == place:
                    continue
                share = count / total
                part = int(own * share)
                builder.add(node, own=part, own_variance=own**2 * share * (1 - share) / total)
                assigned += part
            builder.numbers[place]["own"] = own - assigned


def plain(name: str) -> str:
    """Strip template arguments and parameters from a C++ name."""
    for pattern in (_TEMPLATE, _PARAMETERS):
        while (shorter := pattern.sub("", name)) != name:
            name = shorter
    return name.removesuffix(" const").strip()
