"""What was recorded: the blocks of the window in which a device's memory peaked, each with its name; and as a file.

The format is numpy's .npz without pickled objects: every column an array, and a JSON table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shoestring.core.errors import DataError
from shoestring.storage.arrays import Format
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
"""What memory is of, in the order in which charts stack it."""

COLUMNS = ("born", "died", "born_at", "died_at", "address", "bytes", "name")


class BlockName(NamedTuple):
    """What a block is said to be."""

    kind: str
    name: str
    """Full name of the parameter, or of the module, or else the line of the program."""
    operator: str = ""
    """The outermost operator, and behind it the innermost where that is another."""

    def __str__(self) -> str:
        return " · ".join(part for part in self if part)


class Held(NamedTuple):
    """Blocks of one name and size that were alive at a peak."""

    name: BlockName
    nbytes: int
    """Of all of them."""
    tensors: int


@dataclass(frozen=True, eq=False)
class MemoryWindow:
    """The blocks of one device from the end of one optimizer step to the end of the next, or to the end of recording.

    Args:
        columns: (N,) arrays by their names in `COLUMNS`: numbers of the events at which a block was allocated and freed
            (-1: it was not), the same in nanoseconds since the window began, address, bytes, and index in `names`.
        event: number of the event that reached the peak.
        step: optimizer steps that had been done before it.
        forgotten: blocks that were freed and are not among them, for there were too many.
    """

    columns: Mapping[str, np.ndarray]
    names: Sequence[BlockName]
    event: int
    step: int = 0
    forgotten: int = 0

    def __post_init__(self) -> None:
        sizes = {name: len(self.columns[name]) for name in COLUMNS}
        if len(set(sizes.values())) > 1:
            raise DataError(f"columns of different lengths: {sizes}")

    def alive(self, event: int) -> np.ndarray:
        """(N,) whether each block was alive after an event."""
        born, died = self.columns["born"], self.columns["died"]
        return (born <= event) & ((died > event) | (died < 0))

    @property
    def peak(self) -> int:
        """Bytes at the peak."""
        return self.total(self.event)

    def total(self, event: int) -> int:
        """Bytes after an event."""
        return int(self.columns["bytes"][self.alive(event)].sum())

    def held(self, event: int | None = None) -> list[Held]:
        """What was alive after an event (at the peak), the largest first."""
        alive = self.alive(self.event if event is None else event)
        keys = np.stack([self.columns["name"][alive], self.columns["bytes"][alive]])
        unique, count = np.unique(keys, axis=1, return_counts=True)
        found = [
            Held(self.names[name], int(size * times), int(times))
            for name, size, times in zip(*unique.tolist(), count.tolist(), strict=True)
        ]
        return sorted(found, key=lambda each: (-each.nbytes, each.name))

    def by_kind(self) -> dict[str, int]:
        """Bytes at the peak of each kind that there was any of."""
        sums: dict[str, int] = dict.fromkeys(KINDS, 0)
        for held in self.held():
            sums[held.name.kind] += held.nbytes
        return {kind: nbytes for kind, nbytes in sums.items() if nbytes}

    def timeline(self, most: int = 600) -> Timeline:
        """The bytes of each kind over the window, at `most` moments: of each stretch of it, when it took the most."""
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
        first = max(start - 1, 0)  # what was there when the window began, in one moment
        edges = np.unique(np.linspace(first, len(events), most + 1).astype(int))
        chosen = [low + int(total[low:high].argmax()) for low, high in pairwise(edges)]
        return Timeline(at[chosen] / 1e9, series[:, chosen])


class Timeline(NamedTuple):
    """Bytes over time."""

    seconds: np.ndarray
    """(T,) since the window began."""
    by_kind: np.ndarray
    """(kinds, T) bytes, in the order of `KINDS`."""


@dataclass(frozen=True)
class StepPeak:
    """The most bytes that a device held in optimizer steps that followed each other."""

    first: int
    """Number of the first, from 0."""
    steps: int
    peak: int
    after: int
    """Bytes after the last of them."""


@dataclass(frozen=True)
class MemoryFacts:
    """What a recording is of."""

    steps: Mapping[str, list[StepPeak]] = field(default_factory=dict)
    """By device, in their order; steps that follow each other are put together where there are many."""
    resident: int = 0
    """The most bytes that the process had in memory by the end."""
    reserved: Mapping[str, int] = field(default_factory=dict)
    """What torch held of each accelerator at the end of its peak's window, in use or not."""
    used: Mapping[str, int] = field(default_factory=dict)
    """What each accelerator said that all programs on it used then."""
    host: Mapping[str, int] = field(default_factory=dict)
    """Bytes of host memory that do not come from the CPU's allocator, by name: pinned memory, and leases."""
    ranks: Mapping[str, int] = field(default_factory=dict)
    """Peak of each rank, where this is one of several."""
    events: int = 0
    failed: str = ""
    """Of memory that could not be had: how much, and for what."""


@dataclass(frozen=True, eq=False)
class MemoryProfile:
    """What was recorded: by device ("cpu", "cuda:0"), the window with its peak."""

    windows: Mapping[str, MemoryWindow] = field(default_factory=dict)
    facts: MemoryFacts = field(default_factory=MemoryFacts)

    @property
    def device(self) -> str:
        """The device to look at first: an accelerator, where there is one."""
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
        """Write the file, whole or not at all.

        Raises:
            OSError: the disk.
        """
        write_atomic(path, self.content())

    def content(self) -> bytes:
        """The bytes of the file."""
        table: dict[str, Any] = {"facts": asdict(self.facts), "windows": {}}
        arrays: dict[str, np.ndarray] = {}
        for device, window in self.windows.items():
            facts = {"event": window.event, "step": window.step, "forgotten": window.forgotten}
            table["windows"][device] = facts | {"names": [list(name) for name in window.names]}
            arrays |= {f"{device}/{name}": window.columns[name] for name in COLUMNS}
        return FORMAT.content(table, arrays)

    def with_host(self, host: Mapping[str, int]) -> MemoryProfile:
        """The same with more host memory that does not come from the CPU's allocator."""
        return replace(self, facts=replace(self.facts, host={**self.facts.host, **host}))

    def with_ranks(self, peaks: Mapping[str, int]) -> MemoryProfile:
        """The same with the peaks of all ranks."""
        return replace(self, facts=replace(self.facts, ranks=dict(peaks)))


def _profile(table: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> MemoryProfile:
    windows = {
        device: _window({name: arrays[f"{device}/{name}"].astype(np.int64) for name in COLUMNS}, facts)
        for device, facts in table["windows"].items()
    }
    return MemoryProfile(windows, _facts(table["facts"]))


def _window(columns: dict[str, np.ndarray], facts: dict[str, Any]) -> MemoryWindow:
    names = [BlockName(*map(str, name)) for name in facts.pop("names")]
    if len(columns["name"]) and not 0 <= columns["name"].min() <= columns["name"].max() < len(names):
        raise ValueError("a block has a name that is none")
    if any(name.kind not in KINDS for name in names):
        raise ValueError("a block is of a kind that is none")
    return MemoryWindow(columns, names, **facts)


def _facts(table: dict[str, Any]) -> MemoryFacts:
    steps = {device: [StepPeak(**each) for each in peaks] for device, peaks in table.pop("steps", {}).items()}
    return MemoryFacts(**table, steps=steps)


FORMAT = Format("a recording of memory", "shoestring-memory", 1, _profile)
