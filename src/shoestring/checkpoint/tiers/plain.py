"""Checkpoints as single files: the state is gathered on the first rank, written to a temporary file, synced, and
renamed."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoestring import figures
from shoestring.checkpoint.format.state import PackedState, misfit, pack, reason_of, tell_missing, unpack, unreadable
from shoestring.checkpoint.tiers.staging import buffer_names
from shoestring.core.attachments import Attachments, Kept
from shoestring.core.errors import CheckpointError
from shoestring.core.trace import span
from shoestring.core.world import World
from shoestring.storage.guarded import open_regular, read_regular
from shoestring.storage.whole import put_aside, sync_above, write_atomic

if TYPE_CHECKING:
    from shoestring.checkpoint import Plain

log = logging.getLogger(__name__)

FORMAT = 1
NEWEST = "newest-step"
"""Name of the file that records the run's newest step; exists if the folder also contains abandoned checkpoints of
later steps."""
_NAME = re.compile(r"step-(\d{8})\.safetensors")
_LEFT = re.compile(rf"\.{_NAME.pattern}\.[0-9a-f]+\.tmp")


class Saver:
    """Writes a job's checkpoints between steps, each as a single file."""

    def __init__(self, attachments: Attachments, settings: Plain) -> None:
        self.attachments = attachments
        self.every, self.keep = settings.every, settings.keep
        self.folder = Path(settings.folder)
        self._rooted = False
        self._restored = False

    def capture(self) -> None:
        """Write a checkpoint if one is due after this step; runs in Phase.CAPTURE."""
        if (self.every and self.attachments.progress.step % self.every == 0) or self.attachments.done:
            self.attachments.world.agree(self.attachments.verify)
            self.save()

    def save(self) -> Path:
        """Write a checkpoint; a collective.

        Raises:
            CheckpointError: the first rank cannot write; raised on all ranks. Earlier checkpoints are intact.
        """
        path = self.folder / f"step-{self.attachments.progress.step:08d}.safetensors"
        with span("save", "disk"):
            packed = self._gather()
            self.attachments.world.agree(lambda: self._write(path, packed) if self.attachments.world.first else None)
        return path

    def restored(self, step: int | None) -> int | None:
        """Record whether a checkpoint was restored; returns `step` unchanged."""
        self._restored = step is not None
        return step

    # -- saving ------------------------------------------------------------------------------------------------------

    def _gather(self) -> PackedState:
        """Gather the content of the file: shards, separate states of all ranks, and buffers that differ from the first
        rank's buffers."""
        world, shared = self.attachments.world, {}
        own_part: dict[str, dict[str, Any]] = {"own": {}, "buffers": {}}
        for name, entry in self.attachments.kept.items():
            state = entry.state.state_dict()
            if entry.across == "own":
                own_part["own"][name] = state
                continue
            if entry.across == "shard" or world.first:  # all ranks must call `pack`, which gathers shards
                shared[name] = state
            names = buffer_names(entry.state)
            if buffers := {key: state[key] for key in names if isinstance(state.get(key), Tensor)}:
                own_part["buffers"][name] = buffers
        gathered = [unpack(data) for data in world.gather(pack(own_part))] if world.size > 1 else [own_part]
        head: dict[str, Any] = {"format": FORMAT, "ranks": world.size, "mesh": [world.hosts, world.local_size]}
        first = gathered[0]["buffers"]
        differing = []  # for each rank: name of a state -> name of a buffer -> buffer
        for part in gathered:
            changed = {
                name: {key: value for key, value in of_state.items() if not torch.equal(value, first[name][key])}
                for name, of_state in part["buffers"].items()
            }
            differing.append({name: of_state for name, of_state in changed.items() if of_state})
        if any(differing):
            head["buffers"] = differing
        own = [part["own"] for part in gathered] if own_part["own"] else []
        return PackedState.of({**head, "shared": shared, "own": own})

    def _write(self, path: Path, packed: PackedState) -> None:
        try:
            with put_aside(path) as file:
                packed.write(file)
            if not self._rooted:
                sync_above(self.folder)
                self._rooted = True
        except OSError as error:
            raise CheckpointError(
                f"cannot save `{path}` ({figures.size(packed.nbytes)}): {error.strerror or error}",
                hint="earlier checkpoints are intact; free space, then resume",
            ) from error
        # Delete all but the newest `keep` checkpoints. Checkpoints of steps after this one are damaged or abandoned, so
        # "auto" does not resume from them. They are deleted only if this start of the run has restored a checkpoint;
        # otherwise they may belong to another run.
        with suppress(OSError):
            present, newest_on_line = saves(self.folder), _newest(self.folder)
            later = [saved for saved in present if _step(saved) > min(_step(path), newest_on_line) and saved != path]
            if later and not self._restored:
                write_atomic(self.folder / NEWEST, str(_step(path)).encode())
                later = []
            earlier = [saved for saved in present if saved.name < path.name and saved not in later]
            left = [aside for aside in self.folder.glob(".step-*.tmp") if _LEFT.fullmatch(aside.name)]
            for old in (*later, *earlier[self.keep - 1 :], *left):
                old.unlink(missing_ok=True)
            if self._restored:
                (self.folder / NEWEST).unlink(missing_ok=True)


@dataclass(frozen=True)
class Restorer:
    """Restores states from checkpoints that are single files."""

    states: Mapping[str, Kept]
    """The states of this run, by name."""
    world: World
    folder: Path

    def restore(self, where: str) -> bool:
        """Resume from the newest undamaged checkpoint in the folder ("auto"), or from the file or run folder at the
        path `where`.

        Returns:
            Whether a checkpoint was loaded; False is possible only for "auto".
        """
        world = self.world
        owner = 0
        if where == "auto":
            # The host with the newest checkpoint need not be the first host: each host may have its own disk, and a
            # restart may change the order of hosts.
            newest_here = continued(self.folder)[:1] if world.local_rank == 0 else []
            newest = world.gather("".join(path.name for path in newest_here).encode())
            owner = newest.index(max(newest))
        path, data = world.agree(lambda: self._read(where) if world.rank == owner else (None, b""))
        source = os.fsdecode(world.broadcast(os.fsencode(path or ""), owner))
        if not source:
            return False
        content = _checked(unpack(world.broadcast(data, owner)), source)
        if self.world.first:
            tell_missing(
                f"`{source}`", self.states, {*content["shared"], *(name for own in content["own"] for name in own)}
            )
        # Random number generators come last, because loading the other states may draw random numbers.
        for name in sorted(self.states, key=lambda name: name == "random"):
            state = self._part(name, content)
            if state is not None:
                try:
                    self.states[name].state.load_state_dict(state)
                except Exception as error:  # a user's `load_state_dict` may raise any error
                    raise misfit(f"`{source}`", name, reason_of(error)) from error
        return True

    def _read(self, where: str) -> tuple[Path | None, bytes]:
        """Read the newest undamaged checkpoint; returns its path and content. If there is no such checkpoint, the
        result is (None, b"") for "auto", and CheckpointError is raised for a path.
        """
        path = Path(where)
        if where == "auto":
            candidates = continued(self.folder)
        else:
            candidates = [path] if path.is_file() else saves(path) or saves(path / "checkpoints")
        if (newest := next(_undamaged(candidates), None)) is not None:
            return newest
        if candidates:
            raise unreadable(candidates[0].parent, f"all {len(candidates)} are damaged")
        if where != "auto":
            raise none_in(where)
        return None, b""

    def _part(self, name: str, content: dict[str, Any]) -> dict[str, Any] | None:
        """Return the state for this rank; None if the checkpoint lacks the state, or if it cannot be adapted to another
        number of ranks. A state that was saved once for all ranks, but is now separate on each rank, begins equal on
        all ranks. If each rank saved its own state, but all ranks now share one state, the ranks resume from the result
        of `merge`, or from the first rank's state if there is no `merge`.
        """
        entry, world = self.states[name], self.world
        if name in content["shared"]:
            differing = content.get("buffers", [])
            buffers = differing[world.rank].get(name, {}) if len(differing) == world.size else {}
            return {**content["shared"][name], **buffers}
        states = [own[name] for own in content["own"] if name in own]
        if states and entry.across != "own":
            return entry.merge(states, world.rank, world.size) if entry.merge else states[0]
        if len(states) == world.size and (not entry.merge or content.get("mesh") == [world.hosts, world.local_size]):
            return states[world.rank]
        return entry.merge(states, world.rank, world.size) if states and entry.merge else None


@dataclass(frozen=True)
class OneFiles:
    """Summary of the checkpoints of `Plain` in one host's folder; abandoned checkpoints are left out."""

    newest: str = ""
    """File name of the newest checkpoint; empty if there is none."""
    count: int = 0
    undamaged: int = 0
    """Step of the newest undamaged checkpoint; 0 if all are damaged."""


def one_files(folder: Path) -> OneFiles:
    """Read the checkpoints of `Plain` in a folder, from the newest back to the first undamaged checkpoint, and
    summarise them."""
    candidates = continued(folder)
    undamaged = next((_step(path) for path, _ in _undamaged(candidates)), 0)
    return OneFiles(candidates[0].name if candidates else "", len(candidates), undamaged)


def _undamaged(paths: Iterable[Path]) -> Iterator[tuple[Path, bytes]]:
    """Read checkpoint files; yields the path and the content of each undamaged file."""
    for path in paths:
        try:
            with open_regular(path) as file:
                data = file.read()
            unpack(data)
        except (CheckpointError, OSError) as error:
            log.warning("skipping `%s`: %s", path, error)
            continue
        yield path, data


def abandon_after(folder: Path, step: int) -> None:
    """Record that checkpoints of later steps than `step` are abandoned, so that "auto" does not resume from them.

    Raises:
        CheckpointError: the record cannot be written.
    """
    try:
        if any(_step(path) > step for path in saves(folder)):
            write_atomic(folder / NEWEST, str(step).encode())
    except OSError as error:
        raise CheckpointError(f"cannot write `{folder / NEWEST}`: {error.strerror}") from error


def none_in(where: str) -> CheckpointError:
    """Build the error for a path from which the user wants to resume, but which has no checkpoint."""
    hint = "name the folder of a run's checkpoints, or one of them"
    return CheckpointError(f"`{where}` holds no checkpoint", hint=hint)


def _checked(content: dict[str, Any], path: Path | str) -> dict[str, Any]:
    """Check the structure of a file's content, and return it.

    Raises:
        CheckpointError: the file has another format, or is not a checkpoint.
    """
    if content.get("format") != FORMAT:
        raise CheckpointError(f"`{path}` has format {content.get('format')}, this version reads {FORMAT}")
    shared, own = content.get("shared"), content.get("own")
    buffers = content.get("buffers", [])
    listed = [*own, *buffers] if isinstance(own, list) and isinstance(buffers, list) else [None]
    if not isinstance(shared, dict) or not all(isinstance(of_rank, dict) for of_rank in listed):
        raise CheckpointError(f"`{path}` is not a checkpoint: it lacks its states")
    return content


def read(path: Path) -> dict[str, Any]:
    """Read the content of a checkpoint that is a single file.

    Raises:
        CheckpointError: the file is damaged, has another format, or is not a checkpoint.
    """
    try:
        with open_regular(path) as file:
            return _checked(unpack(file.read()), path)
    except OSError as error:
        raise CheckpointError(f"cannot read `{path}`: {error.strerror}") from error
    except CheckpointError as error:
        raise CheckpointError(f"`{path}` is damaged: {error}") from error


def saves(folder: Path) -> list[Path]:
    """List the paths of `Plain`'s checkpoints in a folder, with the newest first; warns and returns an empty list if
    the folder cannot be read."""
    try:
        return sorted((path for path in folder.glob("step-*.safetensors") if _NAME.fullmatch(path.name)), reverse=True)
    except OSError as error:
        log.warning("cannot look for checkpoints in `%s`: %s", folder, error.strerror or error)
        return []


def continued(folder: Path) -> list[Path]:
    """List the paths of the checkpoints from which "auto" may resume, with the newest first; omits abandoned
    checkpoints."""
    newest = _newest(folder)
    return [path for path in saves(folder) if _step(path) <= newest]


def _newest(folder: Path) -> float:
    """Return the newest step that is not abandoned, from the file `NEWEST`; infinity if there is no such file."""
    try:
        return int(read_regular(folder / NEWEST, 100))
    except (OSError, ValueError):
        return math.inf


def _step(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])
