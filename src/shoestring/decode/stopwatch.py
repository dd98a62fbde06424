"""Measures run time without one-off work, such as compiling a pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

_left_out = 0.0


def seconds() -> float:
    """Like `time.perf_counter`, but leaves out the time spent inside of `once`."""
    return perf_counter() - _left_out


@contextmanager
def once() -> Iterator[None]:
    """Leave the time of the block out of `seconds`, so that one-off work does not count as the cost of a pass."""
    global _left_out
    began = perf_counter()
    try:
        yield
    finally:
        _left_out += perf_counter() - began
