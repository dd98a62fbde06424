"""Converts the values in a run's log: from JSON rows to packed arrays per segment, and from these to whole columns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from shoestring.report.reading import ArrayColumn, Columns, add_row
from shoestring_hub.server.models import NAME

KEYS_LIMIT = 1000
"""Maximum number of metrics that are read from a segment; a run usually logs tens."""
_LARGEST = 2**63


def parse(data: bytes) -> dict[str, bytes]:
    """Parse the rows in part of a log as reports do; lines that are not rows are skipped.

    Returns:
        The packed points of each metric: its steps as 64-bit integers, then its values as 64-bit floats.
    """
    columns: Columns = {}
    for line in data.split(b"\n"):
        add_row(columns, line)
    named = {key: column for key, column in columns.items() if len(key) <= NAME and key.isprintable()}
    packed: dict[str, bytes] = {}
    for key, column in list(named.items())[:KEYS_LIMIT]:
        fitting = {step: value for step, value in column.items() if -_LARGEST <= step < _LARGEST}
        steps = np.fromiter(fitting.keys(), np.int64, len(fitting))
        packed[key] = steps.tobytes() + np.fromiter(fitting.values(), np.float64, len(fitting)).tobytes()
    return packed


def unpack(data: bytes) -> tuple[np.ndarray, np.ndarray]:
    """The steps and the values of packed points."""
    half = len(data) // 2
    return np.frombuffer(data, np.int64, half // 8), np.frombuffer(data, np.float64, half // 8, half)


def columns_of(points: Iterable[tuple[str, bytes]]) -> dict[str, ArrayColumn]:
    """Assemble a run's columns from packed points in the order of the log; the last value for a step counts."""
    parts: dict[str, list[tuple[np.ndarray, np.ndarray]]] = defaultdict(list)
    for key, data in points:
        parts[key].append(unpack(bytes(data)))
    return {key: _column(pieces) for key, pieces in sorted(parts.items())}


def _column(pieces: list[tuple[np.ndarray, np.ndarray]]) -> ArrayColumn:
    steps, values = (np.concatenate(arrays) for arrays in zip(*pieces, strict=True))
    if not (steps[1:] > steps[:-1]).all():
        order = np.argsort(steps, kind="stable")
        steps, values = steps[order], values[order]
        last = np.append(steps[1:] != steps[:-1], True)
        steps, values = steps[last], values[last]
    return ArrayColumn(steps, values)
