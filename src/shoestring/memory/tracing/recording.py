"""Defines memory recordings and their file format: the named blocks of the window in which a device's memory peaked.

The file is a NumPy .npz without pickled objects, with an array for every column and a JSON table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shoestring.core.errors import DataError
from shoestring.storage.arrays import Format, integers
from shoestring.storage.records import record
from shoestring.storage.whole import write_atomic

KINDS = (
    "parameter",
    "buffer",
    "gradient",
    "optimizer state",
    "activation",
    "temporary",
    "communication buffer",
    "checkpoint",
    "input",
    "other",
    "unnamed",
)
"""Kinds of memory, in the order in which charts stack them."""

COLUMNS = ("born", "died", "born_at", "died_at", "address", "bytes", "name")


class BlockName(NamedTuple):
    """Describes the content of a block of memory."""

    kind: str
    """Kind of memory, one of `KINDS`."""
    name: str
    """Full name of the parameter or module; if there is none, the source line that allocated the block."""
    operator: str = ""
    """The outermost operator that was running, followed by the innermost operator in parentheses if the two differ."""

    def __str__(self) -> str:
        return " · ".join(part for part in self if part)


class Held(NamedTuple):
    """Blocks with the same name and size that were alive at one moment."""

    name: BlockName
    nbytes: int
    """Total bytes of these blocks."""
    tensors: int
    """Number of these blocks."""


@dataclass(frozen=True, eq=False)
class MemoryWindow:
    """The blocks of one device from the end of one optimizer step to the end of the next step or of the recording.

    Args:
        columns: (N,) arrays by their names in `COLUMNS`: numbers of the events at which a block was allocated and freed
            (-1: never), times of these events in nanoseconds since the start of the window, address, bytes, and index
            in `names`.
        event: number of the event at which the peak was reached.
        step: number of optimizer steps before the window.
        forgotten: number of freed blocks that were dropped, because there were too many.
    """

    columns: Mapping[str, np.ndarray]
    names: Sequence[BlockName]
    event: int
    step: int = 0
    forgotten: int = 0

    def __post_init__(self) -> None:
        sizes = {name: len(self.columns[name]) for name in COLUMNS}
        if len(set(sizes.values())) > 1:
            raise DataError(f"columns have different lengths: {sizes}")

    def alive(self, event: int) -> np.ndarray:
        """Mask, (N,), of the blocks that were alive after an event."""
        born, died = self.columns["born"], self.columns["died"]
        return (born <= event) & ((died > event) | (died < 0))

    @property
    def peak(self) -> int:
        """Bytes alive at the peak."""
        return self.total(self.event)

    def total(self, event: int) -> int:
        """Bytes that were alive after an event."""
        return int(self.columns["bytes"][self.alive(event)].sum())

    def held(self, event: int | None = None) -> list[Held]:
        """Group the blocks that were alive after an event (the peak if None), the largest group first."""
        alive = self.alive(self.event if event is None else event)
        keys = np.stack([self.columns["name"][alive], self.columns["bytes"][alive]])
        unique, count = np.unique(keys, axis=1, return_counts=True)
        groups = [
            Held(self.names[name], int(size * times), int(times))
            for name, size, times in zip(*unique.tolist(), count.tolist(), strict=True)
        ]
        return sorted(groups, key=lambda held: (-held.nbytes, held.name))

    def by_kind(self) -> dict[str, int]:
        """Bytes at the peak by kind; kinds without bytes are left out."""
        sums: dict[str, int] = dict.fromkeys(KINDS, 0)
        for held in self.held():
            sums[held.name.kind] += held.nbytes
        return {kind: nbytes for kind, nbytes in sums.items() if nbytes}

    def timeline(self, most: int = 600) -> Timeline:
        """Bytes of each kind over the window, sampled at the highest total of each of up to `most` intervals."""
        columns, kinds = self.columns, np.array([KINDS.index(name.kind) for name in self.names] or [0])
        freed = columns["died"] >= 0
        events = np.concatenate([columns["born"], columns["died"][freed]])
        at = np.concatenate([columns["born_at"], columns["died_at"][freed]])
        change = np.concatenate([columns["bytes"], -columns["bytes"][freed]])
        kind = kinds[np.concatenate([columns["name"], columns["name"][freed]])]
        order = np.argsort(events, kind="stable")
        events, at, change, kind = events[order], np.maximum(at[order], 0), change[order], kind[order]
        series = np.zeros((len(KINDS), len(events)), np.int64)
        series[kind, np.arange(len(events))] = change
        series = series.cumsum(axis=1)
        total, start = series.sum(axis=0), int((at <= 0).sum())
        first = max(start - 1, 0)  # the blocks that existed at the start of the window count as one moment
        edges = np.unique(np.linspace(first, len(events), most + 1).astype(int))
        chosen = [low + int(total[low:high].argmax()) for low, high in pairwise(edges)]
        return Timeline(at[chosen] / 1e9, series[:, chosen])


class Timeline(NamedTuple):
    """Allocated bytes over time, by kind."""

    seconds: np.ndarray
    """(T,) time since the start of the window."""
    by_kind: np.ndarray
    """(kinds, T) bytes, in the order of `KINDS`."""


@dataclass(frozen=True)
class StepPeak:
    """The peak of a device over one optimizer step or several consecutive steps."""

    first: int
    """Number of the first step, from 0."""
    steps: int
    """Number of consecutive steps that this entry covers."""
    peak: int
    """Largest number of bytes during the steps."""
    after: int
    """Bytes after the last step."""


@dataclass(frozen=True)
class MemoryFacts:
    """The values that a recording contains in addition to its windows, such as the peak of each step."""

    steps: Mapping[str, list[StepPeak]] = field(default_factory=dict)
    """Peaks of the steps in order, by device; if there are many steps, consecutive steps are merged."""
    resident: int = 0
    """Peak of the process's resident bytes."""
    reserved: Mapping[str, int] = field(default_factory=dict)
    """Bytes that torch had reserved (in use or not) on each accelerator, at the end of the window with the highest
    peak."""
    used: Mapping[str, int] = field(default_factory=dict)
    """Bytes that all programs together used on each accelerator, at the end of the window with the highest peak."""
    host: Mapping[str, int] = field(default_factory=dict)
    """Bytes of host memory outside torch's CPU allocator (pinned memory and leases), by name."""
    ranks: Mapping[str, int] = field(default_factory=dict)
    """Peak bytes of each rank, by name; empty if there is only one rank."""
    events: int = 0
    """Number of allocations and releases."""
    failed: str = ""
    """Description of a failed allocation (its bytes and purpose); empty if no allocation failed."""


@dataclass(frozen=True, eq=False)
class MemoryProfile:
    """A recording of memory: for each device ("cpu", "cuda:0") the window with the highest peak, and further values."""

    windows: Mapping[str, MemoryWindow] = field(default_factory=dict)
    facts: MemoryFacts = field(default_factory=MemoryFacts)

    @property
    def device(self) -> str:
        """The main device: the accelerator with the highest peak, or the CPU if there is none."""
        return max(self.windows, key=lambda name: (name != "cpu", self.windows[name].peak), default="")

    @property
    def main(self) -> MemoryWindow:
        """The window of `device`.

        Raises:
            DataError: nothing was recorded.
        """
        if not self.windows:
            raise DataError("no allocation was recorded")
        return self.windows[self.device]

    def save(self, path: Path) -> None:
        """Write the file atomically.

        Raises:
            OSError: the file cannot be written.
        """
        write_atomic(path, self.content())

    def content(self) -> bytes:
        """Encode the recording as the content of the file that `save` writes."""
        table: dict[str, Any] = {"facts": asdict(self.facts), "windows": {}}
        arrays: dict[str, np.ndarray] = {}
        for device, window in self.windows.items():
            facts = {"event": window.event, "step": window.step, "forgotten": window.forgotten}
            table["windows"][device] = facts | {"names": [list(name) for name in window.names]}
            arrays |= {f"{device}/{name}": window.columns[name] for name in COLUMNS}
        return FORMAT.content(table, arrays)

    def with_host(self, host: Mapping[str, int]) -> MemoryProfile:
        """A copy with additional entries of host memory outside the CPU's allocator."""
        return replace(self, facts=replace(self.facts, host={**self.facts.host, **host}))

    def with_ranks(self, peaks: Mapping[str, int]) -> MemoryProfile:
        """A copy with the peaks of all ranks."""
        return replace(self, facts=replace(self.facts, ranks=dict(peaks)))


def _profile(table: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> MemoryProfile:
    """Build a recording from the content of a file; raise ValueError if the content is damaged."""
    windows = {
        device: _window({name: integers(arrays[f"{device}/{name}"]) for name in COLUMNS}, facts)
        for device, facts in table["windows"].items()
    }
    facts = record(MemoryFacts, table["facts"])
    if facts.reserved.keys() - windows.keys():
        raise ValueError("it contains facts about a device without a window")
    return MemoryProfile(windows, facts)


def _window(columns: dict[str, np.ndarray], facts: dict[str, Any]) -> MemoryWindow:
    """Build a window from the content of a file; all values are checked, because the file may not be trustworthy."""
    listed = facts.pop("names")
    if not all(isinstance(name, list) and all(isinstance(part, str) for part in name) for name in listed):
        raise ValueError("the name of a block is not a list of strings")
    names = [BlockName(*name) for name in listed]
    if any(column.ndim != 1 for column in columns.values()) or len({len(column) for column in columns.values()}) > 1:
        raise ValueError("its columns have different lengths")
    if len(columns["name"]) and not 0 <= columns["name"].min() <= columns["name"].max() < len(names):
        raise ValueError("a block has a name index out of range")
    if any(name.kind not in KINDS for name in names):
        raise ValueError("a block has an unknown kind")
    if (columns["bytes"] < 0).any() or columns["bytes"].astype(float).sum() > _LARGEST_SUM:
        raise ValueError("a block has an invalid size")
    if (columns["died"] >= 0).any() and (columns["died"] < columns["born"])[columns["died"] >= 0].any():
        raise ValueError("a block is freed before it is allocated")
    numbers = record(_WindowNumbers, facts)
    return MemoryWindow(columns, names, numbers.event, numbers.step, numbers.forgotten)


@dataclass(frozen=True)
class _WindowNumbers:
    """The scalar fields of a window in the JSON table; see `MemoryWindow`."""

    event: int
    step: int = 0
    forgotten: int = 0


_LARGEST_SUM = float(1 << 60)
"""Maximum accepted sum of sizes, so that sums in int64 cannot overflow."""


FORMAT = Format("a recording of memory", "shoestring-memory", 1, _profile)
