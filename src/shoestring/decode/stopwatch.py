"""Measures run time without one-off work, such as the compilation of a pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

_left_out = 0.0


def seconds() -> float:
    """Like `time.perf_counter`, but without the time spent in `once`."""
    return perf_counter() - _left_out


@contextmanager
def once() -> Iterator[None]:
    """Context whose run time `seconds` leaves out, so that one-off work does not count as the cost of a pass."""
    global _left_out
    began = perf_counter()
    try:
        yield
    finally:
        _left_out += perf_counter() - began
