"""A profile as one file: the columns of its call tree, compressed, and what it is of.

The format is numpy's .npz without pickled objects: every column an array, names as one UTF-8 text, and a JSON table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shoestring.core.errors import DataError
from shoestring.profile.tree import COLUMNS, FRACTIONS, CallTree, Integers, columns
from shoestring.storage.arrays import Format, text
from shoestring.storage.whole import write_atomic


@dataclass(frozen=True)
class StepTimes:
    """Optimizer steps that followed each other."""

    first: int
    """Number of the first, from 0."""
    steps: int
    seconds: float
    """Of all of them, from the end of the step before the first."""
    longest: float
    """Seconds of the longest."""
    resident: int = 0
    """Bytes of this process in memory after the last of them; 0 is not known."""


@dataclass(frozen=True)
class WorkAt:
    """How far the thread that steps had come."""

    steps: int
    processor: float
    """Its processor seconds since it began."""


@dataclass(frozen=True)
class MemoryAt:
    """What the process held at a moment."""

    seconds: float
    """Since the beginning of the profile."""
    allocated: int
    """Bytes that it had allocated and not freed, on an accelerator, too."""


@dataclass(frozen=True)
class Events:
    """Things of one name that happened."""

    count: int
    seconds: float
    longest: float
    """Seconds of the longest."""
    where: str = ""
    """`file:line` of the first, where it is known."""


@dataclass(frozen=True)
class Facts:
    """What a profile is of."""

    command: list[str] = field(default_factory=list)
    seconds: float = 0.0
    """Of the thread that was profiled from start to stop."""
    overhead: float = 0.0
    """Seconds of those that recording took; they are not in the tree."""
    lost: int = 0
    """Operators whose call path found no room."""
    steps: int = 0
    """Optimizer steps; 0 is not known."""
    clock: list[StepTimes] = field(default_factory=list)
    """Of all steps in their order, those that follow each other together where there are many: 64 entries at most."""
    work: list[WorkAt] = field(default_factory=list)
    """How far the thread that steps had come now and then, 32 entries at most."""
    memory: list[MemoryAt] = field(default_factory=list)
    """What the process held as time went by, 32 entries at most; empty where that is not known."""
    waits: dict[str, Events] = field(default_factory=dict)
    """What held the program up, by name: `garbage collection`, and `recompile: REASON` or `graph break: REASON` of
    torch.compile; 64 at most."""
    unseen: list[str] = field(default_factory=list)
    """Sentences on what the profile cannot see."""
    share: float = 1.0
    """Of the program's time, the part in which operators were recorded; what they took is scaled up to all of it."""
    inside: list[str] = field(default_factory=list)
    """Installed packages whose lines count as the program's own."""
    versions: dict[str, str] = field(default_factory=dict)
    collector: str = "native"
    """What recorded the operators: `native`, or `torch.profiler` where nothing could be compiled."""
    processor: float = 0.0
    """Processor seconds of all threads of the process, with those that recording took; 0 is not known."""
    beside: float = 0.0
    """Processor seconds of those that recording took beside the program: on threads of its own, and all of JAX's."""
    cores: int = 0
    """Processor cores that the process could use; 0 is not known."""
    threads: int = 0
    """Threads that torch computed an operator with, the most that were seen; 0 is not known."""
    device: str = ""


_SERIES: Mapping[str, Callable[..., Any]] = {"clock": StepTimes, "work": WorkAt, "memory": MemoryAt}
"""Facts that are noted now and then."""


@dataclass(frozen=True)
class RankTimes:
    """What each of several merged profiles took."""

    labels: list[str]
    """Of the R profiles, which are those of ranks or of runs."""
    own: Integers
    """(R, N): own nanoseconds of each node of the merged tree; their sums are the tree's."""

    def __post_init__(self) -> None:
        if self.own.ndim != 2 or len(self.own) != len(self.labels):
            raise DataError(f"a profile with {len(self.labels)} ranks and times of shape {self.own.shape}")


@dataclass(frozen=True)
class Profile:
    """A call tree, and what it is of."""

    tree: CallTree
    facts: Facts
    sources: Mapping[str, str] = field(default_factory=dict)
    """Text of the program's own files as they were when it ran, by the path that the tree has."""
    ranks: RankTimes | None = None
    """The times of each rank; None for a profile that was not merged."""

    def __post_init__(self) -> None:
        if self.ranks is not None and self.ranks.own.shape[1] != len(self.tree):
            raise DataError(f"a profile of {len(self.tree)} nodes with times of ranks for {self.ranks.own.shape[1]}")

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all.

        Raises:
            OSError: the disk.
        """
        write_atomic(path, self.content())

    def content(self) -> bytes:
        """The bytes of the file."""
        arrays: dict[str, Any] = {
            name: column if column.dtype == np.float64 else _narrow(column)
            for name, column in columns(self.tree).items()
        }
        facts: dict[str, Any] = dict(asdict(self.facts))
        for name in _SERIES:
            entries = facts[name]  # by column, as their names would be longer than what they hold
            facts[name] = {key: [each[key] for each in entries] for key in (entries[0] if entries else ())}
        table: dict[str, Any] = {"facts": facts}
        if self.ranks is not None:
            table["ranks"] = self.ranks.labels
            arrays["ranks"] = _narrow(self.ranks.own)
        arrays["names"] = text(json.dumps(list(self.tree.names)))
        arrays["sources"] = text(json.dumps(dict(self.sources)))
        return FORMAT.content(table, arrays)


def _profile(table: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> Profile:
    names, sources = (json.loads(arrays[name].tobytes()) for name in ("names", "sources"))
    if not isinstance(names, list) or not all(isinstance(text, str) for text in (*names, *sources.values())):
        raise ValueError("its names are no list of texts")
    known = [name for name in COLUMNS if table["version"] > 1 or name not in ("idle", "alone")]
    none = np.zeros(len(arrays["parent"]), np.int64)
    own: dict[str, Any] = {name: none for name in COLUMNS if name not in known}
    own |= {name: arrays[name].astype(np.int64) for name in known}
    own |= {name: arrays[name].astype(np.float64) for name in FRACTIONS}
    ranks = RankTimes(table["ranks"], arrays["ranks"].astype(np.int64)) if "ranks" in table else None
    return Profile(CallTree(names=names, **own), _facts(table["facts"]), sources, ranks)


def _facts(table: dict[str, Any]) -> Facts:
    for name, make in _SERIES.items():
        kept = table.get(name, [])
        if isinstance(kept, dict):  # before version 3 it was a list of tables
            kept = [dict(zip(kept, values, strict=True)) for values in zip(*kept.values(), strict=True)]
        table[name] = [make(**each) for each in kept]
    table["waits"] = {name: Events(**each) for name, each in table.pop("waits", {}).items()}
    return Facts(**table)


def _narrow(column: np.ndarray) -> np.ndarray:
    """In the fewest bytes that hold it."""
    for dtype in (np.int8, np.int16, np.int32):
        if column.min() >= np.iinfo(dtype).min and column.max() <= np.iinfo(dtype).max:
            return column.astype(dtype)
    return column


FORMAT = Format("a profile", "shoestring-profile", 3, _profile)
