"""Defines profiles and their file format: the compressed columns of the call tree, and facts about the recording.

The file is a numpy .npz without pickled objects. The file contains an array for every column, all names as one UTF-8
text, and a JSON table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shoestring.core.errors import DataError
from shoestring.profile.tree import COLUMNS, FRACTIONS, LARGEST_SUM, CallTree, Integers, columns
from shoestring.storage.arrays import Format, integers, read_json, text
from shoestring.storage.records import record
from shoestring.storage.whole import write_atomic


@dataclass(frozen=True)
class StepTimes:
    """Times of one optimizer step or of several consecutive steps."""

    first: int
    """Number of the first step, from 0."""
    steps: int
    seconds: float
    """Total seconds of these steps, measured from the end of the preceding step."""
    longest: float
    """Seconds of the longest of these steps."""
    resident: int = 0
    """Resident bytes of the process after the last of these steps; 0 if unknown."""


@dataclass(frozen=True)
class WorkAt:
    """Steps done and processor time used by the thread that runs the optimizer steps, at one moment."""

    steps: int
    processor: float
    """Processor seconds that the thread has used since it started."""


@dataclass(frozen=True)
class MemoryAt:
    """Allocated memory of the process at one moment."""

    seconds: float
    """Seconds since the start of the recording."""
    allocated: int
    """Allocated bytes, including bytes on an accelerator."""


@dataclass(frozen=True)
class Events:
    """Number and times of all events with one name."""

    count: int
    seconds: float
    longest: float
    """Seconds of the longest event."""
    where: str = ""
    """`file:line` of the first event; empty if unknown."""


@dataclass(frozen=True)
class Facts:
    """Facts about a recorded program and its recording, apart from the call tree."""

    command: list[str] = field(default_factory=list)
    seconds: float = 0.0
    """Wall-clock seconds from the start to the end of the recording."""
    overhead: float = 0.0
    """Seconds that recording itself took; they are included in `seconds`, but not in the tree."""
    lost: int = 0
    """Number of operators that were not recorded because the tree was full."""
    steps: int = 0
    """Number of optimizer steps; 0 if unknown."""
    clock: list[StepTimes] = field(default_factory=list)
    """Times of all steps in order, in at most 64 entries; in a long run, one entry covers several steps."""
    work: list[WorkAt] = field(default_factory=list)
    """Progress over time of the thread that runs the optimizer steps; at most 32 entries."""
    memory: list[MemoryAt] = field(default_factory=list)
    """Allocated memory over time; at most 32 entries, and none if unknown."""
    waits: dict[str, Events] = field(default_factory=dict)
    """Events that delayed the program, by name; at most 64 names. The names are `garbage collection` and, for
    torch.compile, `compile: FUNCTION`, `recompile: REASON` and `graph break: REASON`."""
    unseen: list[str] = field(default_factory=list)
    """Sentences about work that the profile does not contain."""
    share: float = 1.0
    """Fraction of the time in which operators were recorded; the recorded times are scaled up to the whole run."""
    inside: list[str] = field(default_factory=list)
    """Installed packages whose lines count as the program's own."""
    versions: dict[str, str] = field(default_factory=dict)
    collector: str = "native"
    """The recorder of operators: `native`, or `torch.profiler` if the native recorder could not be compiled."""
    processor: float = 0.0
    """Processor seconds of all threads of the process, including the threads that record; 0 if unknown."""
    beside: float = 0.0
    """Processor seconds that recording took on its own threads or for JAX; they are included in `processor`."""
    cores: int = 0
    """Number of processor cores that the process could use; 0 if unknown."""
    threads: int = 0
    """Largest observed number of threads that a torch operator uses; 0 if unknown."""
    device: str = ""


_SERIES = ("clock", "work", "memory")
"""Names of the fields of `Facts` that are series of measurements."""


@dataclass(frozen=True)
class RankTimes:
    """Own times of each node in each of the merged profiles."""

    labels: list[str]
    """Names of the R merged profiles, such as `rank 0`."""
    own: Integers
    """(R, N): own nanoseconds of each node of the merged tree in each profile; the sum over R is the tree's own
    time."""

    def __post_init__(self) -> None:
        if self.own.ndim != 2 or len(self.own) != len(self.labels):
            raise DataError(f"a merged profile has {len(self.labels)} ranks, but times of shape {self.own.shape}")


@dataclass(frozen=True)
class Profile:
    """A call tree with the facts of its recording."""

    tree: CallTree
    facts: Facts
    sources: Mapping[str, str] = field(default_factory=dict)
    """Texts of the program's own files as they were when the program ran, by their paths in the tree."""
    ranks: RankTimes | None = None
    """Times of each rank; None for a profile that was not merged."""

    def __post_init__(self) -> None:
        if self.ranks is not None and self.ranks.own.shape[1] != len(self.tree):
            raise DataError(
                f"a profile has {len(self.tree)} nodes, but times of ranks for {self.ranks.own.shape[1]} nodes"
            )

    def save(self, path: Path) -> None:
        """Write the file atomically.

        Raises:
            OSError: the file cannot be written.
        """
        write_atomic(path, self.content())

    def content(self) -> bytes:
        """Encode the profile as the content of the file that `save` writes."""
        arrays: dict[str, Any] = {
            name: column if column.dtype == np.float64 else _narrow(column)
            for name, column in columns(self.tree).items()
        }
        facts: dict[str, Any] = dict(asdict(self.facts))
        for name in _SERIES:
            entries = facts[name]  # store columns, so that keys are not repeated
            facts[name] = {key: [entry[key] for entry in entries] for key in (entries[0] if entries else ())}
        table: dict[str, Any] = {"facts": facts}
        if self.ranks is not None:
            table["ranks"] = self.ranks.labels
            arrays["ranks"] = _narrow(self.ranks.own)
        arrays["names"] = text(json.dumps(list(self.tree.names)))
        arrays["sources"] = text(json.dumps(dict(self.sources)))
        return FORMAT.content(table, arrays)


def _profile(table: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> Profile:
    names, sources = (read_json(arrays[name]) for name in ("names", "sources"))
    if not isinstance(names, list) or not all(isinstance(text, str) for text in (*names, *sources.values())):
        raise ValueError("its names are not a list of strings")
    known = [name for name in COLUMNS if table["version"] > 1 or name not in ("idle", "alone")]  # new in version 2
    none = np.zeros(len(arrays["parent"]), np.int64)
    own: dict[str, Any] = {name: none for name in COLUMNS if name not in known}
    own |= {name: integers(arrays[name]) for name in known}
    own |= {name: arrays[name].astype(np.float64) for name in FRACTIONS}
    tree = CallTree(names=names, **own)
    tree.check_values()
    ranks = None
    if "ranks" in table:
        labels = table["ranks"]
        if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
            raise ValueError("its ranks are not a list of strings")
        ranks = RankTimes(labels, integers(arrays["ranks"]))
        if float(np.abs(ranks.own.astype(float)).sum()) > LARGEST_SUM:
            raise ValueError("the times of its ranks are too large")
    for name in _SERIES:
        series = table["facts"].get(name, [])
        if isinstance(series, dict):  # since version 3; earlier versions have a list of tables
            series = [dict(zip(series, values, strict=True)) for values in zip(*series.values(), strict=True)]
        table["facts"][name] = series
    facts = record(Facts, table["facts"])
    if not 0 < facts.share <= 1:
        raise ValueError(f"`share` is {facts.share}")
    return Profile(tree, facts, sources, ranks)


def _narrow(column: np.ndarray) -> np.ndarray:
    """Convert a column to the smallest integer type that holds its values."""
    for dtype in (np.int8, np.int16, np.int32):
        if column.min() >= np.iinfo(dtype).min and column.max() <= np.iinfo(dtype).max:
            return column.astype(dtype)
    return column


FORMAT = Format("a profile", "shoestring-profile", 3, _profile)
