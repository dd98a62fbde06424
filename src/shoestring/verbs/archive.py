"""`shoestring checkpoint ls`, `verify`, `show` and `explain`: the checkpoints of a run, on disk and in memory."""

from __future__ import annotations

import time
from collections.abc import Mapping
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
from shoestring.checkpoint.recovery import explain as recovery
from shoestring.checkpoint.tiers import peer_copies
from shoestring.checkpoint.tiers.disk import MANIFEST
from shoestring.checkpoint.tiers.plain import continued
from shoestring.checkpoint.tiers.slots import seals, slots_folder
from shoestring.core.errors import CheckpointError
from shoestring.core.world import World

DISK, MEMORY = "disk", "memory"
Places = tuple[tuple[Path, Record], ...]

COMPLETE = "complete, not verified"
"""State of a checkpoint whose files have the right names and lengths; only `verify` reads their content."""


@dataclass(frozen=True)
class Archive:
    """The places where the checkpoints of a run are stored: on disk, and in this host's shared memory."""

    folder: Path
    """Folder of the checkpoints on disk."""
    memory: Path
    """Folder of the checkpoints in this host's shared memory."""
    run: Path | None
    """The run folder; None if no run file was found."""
    only: Path | None = None
    """Path of a single checkpoint; if set, all other checkpoints are ignored."""

    @classmethod
    def of(cls, path: Path) -> Archive:
        """Locate the checkpoints of a run. `path` names the run folder, the folder of its checkpoints, or one
        checkpoint, and need not exist.

        Raises:
            ConfigError: the run file is damaged.
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
        """All checkpoints, newest first; an empty list if there are none."""
        checkpoints: list[FoundCheckpoint] = []
        for path in [*self.folder.glob("step-*"), *self.folder.glob(".step-*.tmp")]:
            with suppress(FileNotFoundError):  # a live run has just renamed or deleted the checkpoint
                if (on_disk := _found(path)) is not None:
                    checkpoints.append(on_disk)
        sealed: dict[Any, list[tuple[Path, Record]]] = {}
        for folder in sorted(self.memory.glob("host-*")):
            for path, record in seals(folder):
                sealed.setdefault(record.checkpoint, []).append((path, record))
        for checkpoint, parts in sealed.items():
            places = tuple((path.parent, record) for path, record in parts)
            size = sum(entry.nbytes for _, record in places for entry in record.parts.values())
            newest, state = max(_time(path) for path, _ in parts), _state(places)
            step, start, folder = checkpoint.step, checkpoint.start, places[0][0]
            checkpoints.append(
                FoundCheckpoint(step, start, MEMORY, checkpoint.ranks, size, state, newest, folder, places)
            )
        checkpoints = [checkpoint for checkpoint in checkpoints if self.only in (None, checkpoint.path)]
        checkpoints.sort(key=lambda saved: (saved.step, saved.start, saved.level == DISK), reverse=True)
        history, files = None, {*continued(self.folder)}
        with suppress(CheckpointError):  # if the history is damaged, no checkpoint counts as abandoned
            history = History.read(self.folder)

        def holds(checkpoint: FoundCheckpoint) -> bool:  # whether the run's history includes the checkpoint
            if not checkpoint.places:
                return checkpoint.path in files or not checkpoint.path.is_file()
            return history is None or history.holds(checkpoint.places[0][1].checkpoint)

        return [replace(checkpoint, abandoned=not holds(checkpoint)) for checkpoint in checkpoints]

    def some(self) -> list[FoundCheckpoint]:
        """All checkpoints, newest first; there is at least one.

        Raises:
            CheckpointError: there are no checkpoints.
        """
        if checkpoints := self.found():
            return checkpoints
        raise CheckpointError(f"`{self.folder}` holds no checkpoint", hint=self._beside())

    def pick(self, step: int | None) -> FoundCheckpoint:
        """The readable checkpoint of step `step`; by default the newest one that is not abandoned.

        A checkpoint on disk is preferred to one in memory, which may be overwritten at any time.

        Raises:
            CheckpointError: there is no readable checkpoint of this step.
        """
        there = [checkpoint for checkpoint in self.found() if not checkpoint.state.startswith(("not", "damaged"))]
        there.sort(key=lambda checkpoint: (not checkpoint.abandoned, checkpoint.level == DISK), reverse=True)
        chosen = next((checkpoint for checkpoint in there if step in (None, checkpoint.step)), None)
        if chosen is not None:
            return chosen
        known = sorted({checkpoint.step for checkpoint in there})
        if step is None or not known:
            raise CheckpointError(f"`{self.folder}` holds no checkpoint", hint=self._beside())
        near = min(known, key=lambda other: abs(other - step))
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
    """A checkpoint at one level (disk or memory), complete or not."""

    step: int
    start: int
    level: str
    ranks: int
    bytes: int
    state: str
    """`COMPLETE`, "ranks … of …" if this host lacks the parts of other ranks, "not committed", or "damaged: …"."""
    time: float
    """Time of writing, in seconds since 1970."""
    path: Path
    places: Places = field(default=(), repr=False)
    abandoned: bool = False
    """Whether the run has since resumed from an earlier step, so that its history no longer includes this checkpoint. A
    run resumes from an abandoned checkpoint only if its path is named."""

    def row(self) -> dict[str, Any]:
        """The checkpoint as a row of a table: names of the columns -> values."""
        row = {name: getattr(self, name) for name in ("step", "start", "level", "ranks", "bytes", "state")}
        row["state"] += ", abandoned" if self.abandoned and self.state == COMPLETE else ""
        saved = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(self.time))
        return row | {"time": saved, "path": str(self.path)}

    def content(self) -> exports.Saved:
        """Open the checkpoint to read its states and tensors.

        Raises:
            CheckpointError: the checkpoint is damaged.
        """
        return exports.opened(self.places) if self.places else exports.one_file(self.path)


def _found(path: Path) -> FoundCheckpoint | None:
    """The checkpoint at a path; None if the path is not a checkpoint.

    Raises:
        FileNotFoundError: the checkpoint was deleted while it was read.
    """
    if path.is_file() and path.suffix == ".safetensors":
        return FoundCheckpoint(_number(path.name), 0, DISK, 1, path.stat().st_size, COMPLETE, _time(path), path)
    if (path / MANIFEST).exists() and not path.name.startswith("."):
        try:
            record = Record.read(path / MANIFEST)
        except CheckpointError as error:
            state = f"damaged: {error.parts()[1]}"
            committed = FoundCheckpoint(_number(path.name), 0, DISK, 0, 0, state, _time(path), path)
        else:
            places, checkpoint = ((path, record),), record.checkpoint
            step, start, ranks = checkpoint.step, checkpoint.start, checkpoint.ranks
            size, when = sum(entry.nbytes for entry in record.parts.values()), _time(path / MANIFEST)
            committed = FoundCheckpoint(step, start, DISK, ranks, size, _state(places), when, path, places)
        path.stat()  # raises if the checkpoint was deleted in the meantime, which would look like damage
        return committed
    if not path.is_dir():
        return None
    size = sum(file.stat().st_size for file in path.iterdir())
    return FoundCheckpoint(_number(path.name), 0, DISK, 0, size, "not committed", _time(path), path)


def _state(places: Places) -> str:
    """The state of a checkpoint, judged by the names and lengths of its files; see `FoundCheckpoint.state`."""
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
    """Folder of the run's checkpoint slots in this host's shared memory.

    Args:
        folder: folder of the run's checkpoints.
    """
    return slots_folder(replace(settings, folder=str(folder)), World(), make=False).parent


def _settings(home: Path) -> Tiered:
    """The checkpoint settings in the run file of a folder."""
    for feature in runs.look(str(home)).features:
        if isinstance(feature, Tiered):
            return feature
        if isinstance(feature, Plain):
            return Tiered(folder=feature.folder)
    return Tiered()


# -- the verbs --------------------------------------------------------------------------------------------------------


def list_checkpoints(run: Path) -> list[FoundCheckpoint]:
    """The checkpoints of a run on disk and in this host's memory, newest first.

    Args:
        run: a run folder, the folder of its checkpoints, or one checkpoint.

    Raises:
        CheckpointError: there are no checkpoints.
    """
    return Archive.of(run).some()


def verify(run: Path, step: int | None = None) -> list[dict[str, Any]]:
    """Read and verify the checkpoints of a run, or only the checkpoints of one step.

    Checkpoints that were never committed are skipped, and so are checkpoints that a live run deletes meanwhile.

    Returns:
        A row for each checkpoint, with an entry `damage` that lists the faults.

    Raises:
        CheckpointError: there are no checkpoints.
    """
    archive = Archive.of(run)
    there = archive.some()
    if step is not None and all(checkpoint.step != step for checkpoint in there):
        archive.pick(step)  # raises an error that lists the existing steps
    chosen = [
        checkpoint for checkpoint in there if step in (None, checkpoint.step) and checkpoint.state != "not committed"
    ]
    rows = []
    for checkpoint in chosen:
        damage = find_damage(checkpoint)
        if checkpoint.path.exists():
            state = ("damaged" if damage else "verified") if checkpoint.state == COMPLETE else checkpoint.state
            rows.append({**checkpoint.row(), "state": state, "damage": damage})
    return rows


def find_damage(checkpoint: FoundCheckpoint) -> list[str]:
    """Read a whole checkpoint, and return a line for each fault."""
    if not checkpoint.places:
        if checkpoint.state.startswith("damaged"):
            return [checkpoint.state]
        try:
            if checkpoint.path.is_file():
                checkpoint.content()
        except CheckpointError as error:
            return [error.parts()[1]]
        return []
    faults = []
    for folder, record in checkpoint.places:
        for name in record.parts:
            try:
                part = exports.part_of(folder, record, name)
                part.verify()
                if not name.startswith(peer_copies.PARITY):
                    _ = part.about, part.pieces  # parsing the header finds further faults
            except CheckpointError as error:
                faults.append(error.parts()[1])
    if faults:
        return faults
    content = checkpoint.content()
    lacking = [name for name, stored in content.tensors.items() if not stored.complete]
    return [f"`{name}` is incomplete" for name in lacking] if checkpoint.state == COMPLETE else []


def explain(run: Path) -> recovery.Explanation:
    """Explain which checkpoint `run.resume = "auto"` would resume from. The decision is made by the same function as in
    training; nothing is written."""
    archive = Archive.of(run)
    return recovery.explain(archive.folder, archive.memory)


def show(run: Path, step: int | None = None) -> dict[str, Any]:
    """Describe the checkpoint of a step, by default the newest one: the bytes and values of states, and its tensors.

    Raises:
        CheckpointError: there is no checkpoint of this step, or it is damaged.
    """
    checkpoint = Archive.of(run).pick(step)
    content = checkpoint.content()
    owned = {name: f"{len(content.own)} ranks' own" for states in content.own.values() for name in states}

    def state_of(tensor: str) -> str:
        rank, colon, path = tensor.partition(":")
        return (path if colon and rank.isdecimal() else tensor).strip("/").partition("/")[0]

    states: list[dict[str, Any]] = []
    for name, across in [*dict.fromkeys(content.shared, "of all ranks").items(), *owned.items()]:
        own = [stored for stored in content.tensors.values() if state_of(stored.name) in (name, root(name))]
        values = [] if across != "of all ranks" else _values(content.state(name))
        states.append({"name": name, "across": across, "tensors": len(own), "bytes": sum(s.nbytes for s in own)})
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


def _values(state: Any, path: str = "") -> list[tuple[str, Any]]:
    """(path, value) of each item in a state that is not a tensor."""
    if isinstance(state, exports.Stored):
        return []
    if isinstance(state, Mapping):
        return [pair for key, value in state.items() for pair in _values(value, f"{path}/{key}")]
    if isinstance(state, list | tuple) and any(isinstance(value, Mapping | list | tuple) for value in state):
        return [pair for at, value in enumerate(state) for pair in _values(value, f"{path}/{at}")]
    return [(path.strip("/"), state)]
