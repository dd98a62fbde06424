"""`shoestring checkpoint`: the checkpoints of a run, wherever they are; listed, verified and shown."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shoestring import run as runs
from shoestring.checkpoint import Plain, Tiered
from shoestring.checkpoint.format.history import History
from shoestring.checkpoint.format.layout import PRIVATE
from shoestring.checkpoint.format.manifest import Record
from shoestring.checkpoint.format.tree import root
from shoestring.checkpoint.interop import exports
from shoestring.checkpoint.tiers import peer_copies
from shoestring.checkpoint.tiers.disk import MANIFEST
from shoestring.checkpoint.tiers.plain import continued
from shoestring.checkpoint.tiers.slots import seals, slots_folder
from shoestring.core.errors import CheckpointError
from shoestring.core.world import World

DISK, MEMORY = "disk", "memory"
Places = tuple[tuple[Path, Record], ...]

COMPLETE = "complete, not verified"
"""All ranks' parts are there by their names and lengths; only `verify` reads them."""


@dataclass(frozen=True)
class Archive:
    """Where the checkpoints of a run are."""

    folder: Path
    """On disk."""
    memory: Path
    """In this host's memory."""
    run: Path | None
    """The run folder, where it has a run file."""

    only: Path | None = None
    """The one checkpoint that was named."""

    @classmethod
    def of(cls, path: Path) -> Archive:
        """By a run folder, the folder of its checkpoints, or one checkpoint. It need not be there any more.

        Raises:
            ConfigError: its run file is damaged.
        """
        only = path if (path / MANIFEST).exists() or path.is_file() else None
        path = path.parent if only else path
        for home in (path, path.parent):
            if (home / "run.toml").is_file():
                settings = _settings(home)
                if path in (home, home / settings.folder):
                    return cls(home / settings.folder, slots(settings, home / settings.folder), home, only)
        settings = Tiered()
        there = path.exists() or slots(settings, path).is_dir()
        folder = path if there and not (path / settings.folder).is_dir() else path / settings.folder
        return cls(folder, slots(settings, folder), None, only)

    def found(self) -> list[FoundCheckpoint]:
        """What is there, newest first; nothing, perhaps."""
        there = [
            checkpoint for checkpoint in (*self._on_disk(), *self._in_memory()) if self.only in (None, checkpoint.path)
        ]
        there.sort(key=lambda checkpoint: (checkpoint.step, checkpoint.start, checkpoint.level == DISK), reverse=True)
        continued = self._continued()
        return [replace(checkpoint, abandoned=not continued(checkpoint)) for checkpoint in there]

    def _continued(self) -> Callable[[FoundCheckpoint], bool]:
        """Whether the run would resume from a checkpoint, as far as its history says."""
        history, files = None, {*continued(self.folder)}
        with suppress(CheckpointError):  # a damaged one says nothing
            history = History.read(self.folder)

        def holds(checkpoint: FoundCheckpoint) -> bool:
            if not checkpoint.places:
                return checkpoint.path in files or not checkpoint.path.is_file()
            return history is None or history.holds(checkpoint.places[0][1].checkpoint)

        return holds

    def some(self) -> list[FoundCheckpoint]:
        """What is there, newest first.

        Raises:
            CheckpointError: nothing is.
        """
        if found := self.found():
            return found
        raise CheckpointError(f"`{self.folder}` holds no checkpoint", hint=self._beside())

    def _on_disk(self) -> Iterator[FoundCheckpoint]:
        for path in [*self.folder.glob("step-*"), *self.folder.glob(".step-*.tmp")]:
            with suppress(FileNotFoundError):  # the run is alive, and has renamed or deleted it meanwhile
                if found := _found(path):
                    yield found

    def _in_memory(self) -> Iterator[FoundCheckpoint]:
        sealed: dict[Any, list[tuple[Path, Record]]] = {}
        for folder in sorted(self.memory.glob("host-*")):
            for path, record in seals(folder):
                sealed.setdefault(record.checkpoint, []).append((path, record))
        for checkpoint, of in sealed.items():
            places = tuple((path.parent, record) for path, record in of)
            size = sum(entry.nbytes for _, record in places for entry in record.parts.values())
            newest, state = max(_time(path) for path, _ in of), _state(places)
            step, start, folder = checkpoint.step, checkpoint.start, places[0][0]
            yield FoundCheckpoint(step, start, MEMORY, checkpoint.ranks, size, state, newest, folder, places)

    def pick(self, step: int | None) -> FoundCheckpoint:
        """The checkpoint of a step, else the newest that the run has not gone back from; on disk rather than in
        memory, which may be written at any time.

        Raises:
            CheckpointError: there is none that can be read.
        """
        there = [checkpoint for checkpoint in self.found() if not checkpoint.state.startswith(("not", "damaged"))]
        there.sort(key=lambda checkpoint: (not checkpoint.abandoned, checkpoint.level == DISK), reverse=True)
        chosen = next((checkpoint for checkpoint in there if step in (None, checkpoint.step)), None)
        if chosen is not None:
            return chosen
        known = sorted({checkpoint.step for checkpoint in there})
        if step is None or not known:
            raise CheckpointError(f"`{self.folder}` holds no checkpoint", hint=self._beside())
        near = min(known, key=lambda each: abs(each - step))
        listed = ", ".join(map(str, known))
        raise CheckpointError(
            f"there is no checkpoint of step {step}", hint=f"the nearest is {near}; there are {listed}"
        )

    def _beside(self) -> str:
        around = {path.parent.parent for path in self.folder.parent.parent.glob("*/checkpoints/step-*")}
        listed = ", ".join(f"`{path}`" for path in sorted(around))
        return f"there are checkpoints in {listed}" if listed else "name a run folder, or the folder of its checkpoints"


@dataclass(frozen=True)
class FoundCheckpoint:
    """One checkpoint at one level, or what is left of it."""

    step: int
    start: int
    level: str
    ranks: int
    bytes: int
    state: str
    """`COMPLETE`, "ranks … of …" for what this host has of it, not committed, or damaged."""
    time: float
    """Seconds since 1970."""
    path: Path
    places: Places = field(default=(), repr=False)
    abandoned: bool = False
    """Whether the run has gone back from it, or another start has taken over: it is resumed only if it is named."""

    def row(self) -> dict[str, Any]:
        """For a table."""
        row = {name: getattr(self, name) for name in ("step", "start", "level", "ranks", "bytes", "state")}
        row["state"] += ", abandoned" if self.abandoned and self.state == COMPLETE else ""
        saved = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(self.time))
        return row | {"time": saved, "path": str(self.path)}

    def content(self) -> exports.Saved:
        """What is in it.

        Raises:
            CheckpointError: it is damaged.
        """
        return exports.opened(self.places) if self.places else exports.one_file(self.path)


def _found(path: Path) -> FoundCheckpoint | None:
    """The checkpoint at a path; None where something else is.

    Raises:
        FileNotFoundError: it is gone.
    """
    if path.is_file() and path.suffix == ".safetensors":
        return FoundCheckpoint(_number(path.name), 0, DISK, 1, path.stat().st_size, COMPLETE, _time(path), path)
    if (path / MANIFEST).exists() and not path.name.startswith("."):
        committed = _committed(path)
        path.stat()  # what has gone since looks damaged
        return committed
    if not path.is_dir():
        return None
    size = sum(each.stat().st_size for each in path.iterdir())
    return FoundCheckpoint(_number(path.name), 0, DISK, 0, size, "not committed", _time(path), path)


def _committed(path: Path) -> FoundCheckpoint:
    try:
        record = Record.read(path / MANIFEST)
    except CheckpointError as error:
        return FoundCheckpoint(_number(path.name), 0, DISK, 0, 0, f"damaged: {error.parts()[1]}", _time(path), path)
    places = ((path, record),)
    checkpoint, size = record.checkpoint, sum(entry.nbytes for entry in record.parts.values())
    state, when = _state(places), _time(path / MANIFEST)
    return FoundCheckpoint(checkpoint.step, checkpoint.start, DISK, checkpoint.ranks, size, state, when, path, places)


def _state(places: Places) -> str:
    """As far as names and lengths tell."""
    for folder, record in places:
        for name in record.parts:
            try:
                exports.part_of(folder, record, name)
            except CheckpointError as error:
                return f"damaged: {error.parts()[1]}"
    ranks = places[0][1].checkpoint.ranks
    there = [rank for rank in range(ranks) if any(f"{PRIVATE}-{rank}" in record.parts for _, record in places)]
    return COMPLETE if len(there) == ranks else f"ranks {', '.join(map(str, there)) or 'none'} of {ranks}"


def _number(name: str) -> int:
    digits = name.lstrip(".").removeprefix("step-")[:8]
    return int(digits) if digits.isdecimal() else -1


def _time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def slots(settings: Tiered, folder: Path) -> Path:
    """Where the slots of a run lie in this host's memory, by the folder of its checkpoints."""
    return slots_folder(replace(settings, folder=str(folder)), World(), make=False).parent


def _settings(home: Path) -> Tiered:
    """How a run saves, by its run file."""
    for feature in runs.load(str(home)).features:
        if isinstance(feature, Tiered):
            return feature
        if isinstance(feature, Plain):
            return Tiered(folder=feature.folder)
    return Tiered()


# -- verifying and showing --------------------------------------------------------------------------------------------


def verified(archive: Archive, step: int | None) -> list[dict[str, Any]]:
    """The checkpoints, or those of one step, each with its `damage`; what was never committed is not looked at, and
    what a run that is alive has deleted meanwhile is left out.

    Raises:
        CheckpointError: there are none.
    """
    there = archive.some()
    if step is not None and all(checkpoint.step != step for checkpoint in there):
        archive.pick(step)  # says what there is
    chosen = [
        checkpoint for checkpoint in there if step in (None, checkpoint.step) and checkpoint.state != "not committed"
    ]
    looked_at = [(checkpoint, verify(checkpoint)) for checkpoint in chosen]
    return [_verified_row(checkpoint, wrong) for checkpoint, wrong in looked_at if checkpoint.path.exists()]


def _verified_row(checkpoint: FoundCheckpoint, damage: list[str]) -> dict[str, Any]:
    state = ("damaged" if damage else "verified") if checkpoint.state == COMPLETE else checkpoint.state
    return {**checkpoint.row(), "state": state, "damage": damage}


def verify(checkpoint: FoundCheckpoint) -> list[str]:
    """Read everything; what is wrong with it, a line each."""
    if not checkpoint.places:
        return (
            [checkpoint.state]
            if checkpoint.state.startswith("damaged")
            else _said(checkpoint.content)
            if checkpoint.path.is_file()
            else []
        )
    wrong = []
    for folder, record in checkpoint.places:
        for name in record.parts:
            wrong += _said(lambda folder=folder, record=record, name=name: _verify_part(folder, record, name))
    if wrong:
        return wrong
    content = checkpoint.content()
    lacking = [name for name, stored in content.tensors.items() if not stored.complete]
    return [f"`{name}` is incomplete" for name in lacking] if checkpoint.state == COMPLETE else []


def _said(work: Any) -> list[str]:
    try:
        work()
    except CheckpointError as error:
        return [error.parts()[1]]
    return []


def _verify_part(folder: Path, record: Record, name: str) -> None:
    part = exports.part_of(folder, record, name)
    part.verify()
    if not name.startswith(peer_copies.PARITY):
        _ = part.about, part.pieces


def shown(checkpoint: FoundCheckpoint) -> dict[str, Any]:
    """What is in a checkpoint: the states with their bytes, the tensors, and what else there is."""
    content = checkpoint.content()
    owned = {name: f"{len(content.own)} ranks' own" for states in content.own.values() for name in states}
    states: list[dict[str, Any]] = []
    for name, across in [*dict.fromkeys(content.shared, "of all ranks").items(), *owned.items()]:
        mine = [stored for stored in content.tensors.values() if _of(stored.name) in (name, root(name))]
        values = [] if across != "of all ranks" else _values(content.state(name))
        states.append({"name": name, "across": across, "tensors": len(mine), "bytes": sum(s.nbytes for s in mine)})
        states[-1]["values"] = dict(values[:20])
    tensors = [
        {
            "name": stored.name,
            "dtype": str(stored.dtype).removeprefix("torch."),
            "shape": list(stored.shape),
            "pieces": [[list(box.offset), list(box.shape)] for box, _ in stored.pieces],
            "bytes": stored.nbytes,
        }
        for stored in sorted(content.tensors.values(), key=lambda stored: stored.name)
    ]
    return {"checkpoint": checkpoint.row(), "states": states, "tensors": tensors}


def _of(name: str) -> str:
    """The state that a tensor belongs to."""
    rank, colon, path = name.partition(":")
    return (path if colon and rank.isdecimal() else name).strip("/").partition("/")[0]


def _values(state: Any, path: str = "") -> list[tuple[str, Any]]:
    """What of a state is no tensor, by its path."""
    if isinstance(state, exports.Stored):
        return []
    if isinstance(state, Mapping):
        return [pair for key, each in state.items() for pair in _values(each, f"{path}/{key}")]
    if isinstance(state, list | tuple) and any(isinstance(each, Mapping | list | tuple) for each in state):
        return [pair for at, each in enumerate(state) for pair in _values(each, f"{path}/{at}")]
    return [(path.strip("/"), state)]
