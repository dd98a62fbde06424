"""Records the call sites of jitted JAX functions, and the time that JAX spends on tracing and compiling them."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from shoestring.profile.jax_programs import Frames
from shoestring.profile.lines import package_of
from shoestring.profile.recording import Events

ANNOTATION = "shoestring call"
"""Name of the spans around calls in JAX's profiler; their argument `site` is the number of the call site."""

_HAS_VECTORCALL, _FLAGS_WORD = 1 << 11, 21  # Py_TPFLAGS_HAVE_VECTORCALL; index of tp_flags in PyTypeObject (64 bit)

_DURATIONS = {
    "/jax/core/compile/jaxpr_trace_duration": "jax trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "jax lower",
    "/jax/core/compile/backend_compile_duration": "jax compile",
}

_INTERNAL = frozenset({"jax", "jaxlib", "shoestring", "python"})


def _frames_of(frame: FrameType | None) -> Frames:
    """Return the call path of a frame, without the innermost frames that belong to JAX."""
    path: list[tuple[str, int]] = []
    while frame is not None:
        code = frame.f_code
        path.append((f"{code.co_filename}\t{code.co_qualname}", frame.f_lineno or 0))
        frame = frame.f_back
    inner = next((n for n, (name, _) in enumerate(path) if package_of(name.partition("\t")[0]) not in _INTERNAL), 0)
    return tuple(path[inner:][::-1])


@dataclass
class CallSites:
    """Assigns numbers to the call sites of jitted functions while the context `recorded` is active."""

    paths: list[Frames] = field(default_factory=list)
    numbers: dict[tuple[Any, ...], int] = field(default_factory=dict)

    def number(self, frame: FrameType | None) -> int:
        """Return the number of a frame's call path; -1 if the path is new and 4096 call paths have numbers already."""
        key: list[Any] = []
        innermost = frame
        while frame is not None:
            key += (frame.f_code, frame.f_lasti)
            frame = frame.f_back
        exact = tuple(key)
        if exact not in self.numbers:
            if len(self.numbers) >= 4096:  # the program generates code at run time
                return -1
            self.numbers[exact] = len(self.paths)
            self.paths.append(_frames_of(innermost))
        return self.numbers[exact]

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Context that puts each call of a jitted function in a profiler span with the number of its call site.

        Replaces `__call__` of the type of jitted functions and disables the type's vectorcall. If types do not have the
        memory layout of CPython 3.11 to 3.14, nothing is replaced, and call sites stay unknown.
        """
        import jax

        kind = type(jax.jit(len))
        original = kind.__dict__.get("__call__")
        flags = ctypes.cast(id(kind), ctypes.POINTER(ctypes.c_ulong))
        if original is None or sys.implementation.name != "cpython" or flags[_FLAGS_WORD] != kind.__flags__:
            yield
            return
        before = kind.__flags__
        annotation, number, inside = jax.profiler.TraceAnnotation, self.number, threading.local()

        def __call__(jitted: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
            if getattr(inside, "call", False):  # a nested call, for example while JAX traces the outer function
                return original(jitted, *args, **kwargs)
            inside.call = True
            try:
                with annotation(ANNOTATION, site=number(sys._getframe(1))):
                    return original(jitted, *args, **kwargs)
            finally:
                inside.call = False

        try:
            kind.__call__ = __call__
        except TypeError:
            yield
            return
        flags[_FLAGS_WORD] &= ~_HAS_VECTORCALL
        try:
            yield
        finally:
            kind.__call__ = original
            flags[_FLAGS_WORD] |= before & _HAS_VECTORCALL


@dataclass
class Compilations:
    """Counts JAX's traces and compilations by function, and sums their times."""

    events: dict[str, Events] = field(default_factory=dict)

    def start(self) -> None:
        """Start counting JAX's monitoring events."""
        import jax.monitoring

        jax.monitoring.register_event_duration_secs_listener(self._add)

    def stop(self) -> None:
        """Stop counting JAX's monitoring events."""
        import jax.monitoring

        with suppress(AttributeError, ValueError):  # the program may have cleared all listeners
            forget: Callable[[Any], None] = jax.monitoring.unregister_event_duration_listener
            forget(self._add)

    def _add(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event not in _DURATIONS:
            return
        name = f"{_DURATIONS[event]}: {kwargs.get('fun_name', '')}"
        earlier = self.events.get(name)
        if earlier is not None:
            longest = max(earlier.longest, duration_secs)
            self.events[name] = Events(earlier.count + 1, earlier.seconds + duration_secs, longest, earlier.where)
        elif len(self.events) < 4096:
            path = _frames_of(sys._getframe(1))
            own = [place for place in path if package_of(place[0].partition("\t")[0]) == ""] or path
            where = f"{own[-1][0].partition(chr(9))[0]}:{own[-1][1]}" if own else ""
            self.events[name] = Events(1, duration_secs, duration_secs, where)

    def largest(self, most: int = 32) -> dict[str, Events]:
        """Return the `most` events with the longest total times."""
        return dict(sorted(self.events.items(), key=lambda item: -item[1].seconds)[:most])
