"""Seconds of what is done again and again: what is done once, such as compiling a pass, is left out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

_left_out = 0.0


def seconds() -> float:
    """As `time.perf_counter`, without the time within `once`."""
    return perf_counter() - _left_out


@contextmanager
def once() -> Iterator[None]:
    """Within, `seconds` stands still: what passes cost is learnt from it, and this does not happen again."""
    global _left_out
    began = perf_counter()
    try:
        yield
    finally:
        _left_out += perf_counter() - began
