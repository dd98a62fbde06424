"""One file a checkpoint: gathered to the first rank, written aside, flushed, synced, renamed."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoestring.checkpoint.format.state import misfit, pack, reason_of, tell_missing, unpack, unreadable
from shoestring.checkpoint.tiers.staging import buffer_names
from shoestring.core.errors import CheckpointError
from shoestring.core.job import Job, Kept
from shoestring.core.trace import span
from shoestring.core.world import World
from shoestring.storage.guarded import open_regular, read_regular
from shoestring.storage.whole import sync_above, write_atomic

if TYPE_CHECKING:
    from shoestring.checkpoint import Plain

log = logging.getLogger(__name__)

FORMAT = 1
NEWEST = "newest-step"
"""File with the newest step of the run where later ones are there, too: it went back from those."""
_NAME = re.compile(r"step-(\d{8})\.safetensors")
_LEFT = re.compile(rf"\.{_NAME.pattern}\.[0-9a-f]+\.tmp")


class Saver:
    """Saves a job's kept state at the step's boundary, and restores it."""

    def __init__(self, job: Job, settings: Plain) -> None:
        self.job = job
        self.every, self.keep = settings.every, settings.keep
        self.folder = Path(settings.folder)
        self._rooted = False
        self._restored = False

    def capture(self) -> None:
        """Work for Phase.CAPTURE: save where it is due."""
        if (self.every and self.job.progress.step % self.every == 0) or self.job.done:
            self.job.world.agree(self.job.verify)
            self.save()

    def save(self) -> Path:
        """Write everything kept; a collective of all ranks.

        Raises:
            CheckpointError: on all ranks, when the first cannot write; earlier checkpoints are intact.
        """
        path = self.folder / f"step-{self.job.progress.step:08d}.safetensors"
        with span("save", "disk"):
            data = self._gather()
            self.job.world.agree(lambda: self._write(path, data) if self.job.world.first else None)
        return path

    def restored(self, step: int | None) -> int | None:
        """Note whether there was something to restore."""
        self._restored = step is not None
        return step

    # -- saving ------------------------------------------------------------------------------------------------------

    def _gather(self) -> bytes:
        """The file's content on the first rank; other ranks contribute shards, their own state and their buffers."""
        world, shared = self.job.world, {}
        own_part: dict[str, dict[str, Any]] = {"own": {}, "buffers": {}}
        for name, kept in self.job.kept.items():
            state = kept.state.state_dict()
            if kept.across == "own":
                own_part["own"][name] = state
                continue
            if kept.across == "shard" or world.first:
                shared[name] = state
            if buffers := {key: state[key] for key in buffer_names(kept.state) if isinstance(state.get(key), Tensor)}:
                own_part["buffers"][name] = buffers
        gathered = [unpack(one) for one in world.gather(pack(own_part))]
        head: dict[str, Any] = {"format": FORMAT, "ranks": world.size, "mesh": [world.hosts, world.local_size]}
        apart = [_other_than(gathered[0]["buffers"], part["buffers"]) for part in gathered]
        if any(apart):
            head["buffers"] = apart
        return pack({**head, "shared": shared, "own": [part["own"] for part in gathered] if own_part["own"] else []})

    def _write(self, path: Path, data: bytes) -> None:
        try:
            write_atomic(path, data)
            if not self._rooted:
                sync_above(self.folder)
                self._rooted = True
        except OSError as error:
            raise CheckpointError(
                f"cannot save `{path}` ({len(data) / 1e6:.1f} MB): {error.strerror or error}",
                hint="earlier checkpoints are intact; free space, then resume",
            ) from error
        with suppress(OSError):
            self._delete(path)

    def _delete(self, newest: Path) -> None:
        """Keep the newest few. Checkpoints of later steps are damaged, or of a future that this run went back from:
        those go, unless this start has not restored anything, and so knows nothing of them; "auto" takes neither."""
        there, abandoned = saves(self.folder), _newest(self.folder)
        later = [path for path in there if _step(path) > min(_step(newest), abandoned) and path != newest]
        if later and not self._restored:
            write_atomic(self.folder / NEWEST, str(_step(newest)).encode())
            later = []
        earlier = [path for path in there if path.name < newest.name and path not in later]
        left = [path for path in self.folder.glob(".step-*.tmp") if _LEFT.fullmatch(path.name)]
        for path in (*later, *earlier[self.keep - 1 :], *left):
            path.unlink(missing_ok=True)
        if self._restored:
            (self.folder / NEWEST).unlink(missing_ok=True)


@dataclass(frozen=True)
class Restorer:
    """Restores what is kept from such files."""

    kept: Mapping[str, Kept]
    world: World
    folder: Path

    def restore(self, where: str) -> bool:
        """Resume from the newest good checkpoint in the folder ("auto"), or from the file or run folder named.

        Returns:
            Whether there was one; "auto" may find none.
        """
        world = self.world
        owner = self._owner() if where == "auto" else 0
        path, data = world.agree(lambda: self._read(where) if world.rank == owner else (None, b""))
        source = world.broadcast(str(path or "").encode(), owner).decode()
        if not source:
            return False
        self._load(_checked(unpack(world.broadcast(data, owner)), source), source)
        return True

    def go_back(self, step: int) -> None:
        """Note that checkpoints of later steps are abandoned, so that "auto" takes none of them."""
        try:
            if any(_step(path) > step for path in saves(self.folder)):
                write_atomic(self.folder / NEWEST, str(step).encode())
        except OSError as error:
            raise CheckpointError(f"cannot write `{self.folder / NEWEST}`: {error.strerror}") from error

    def newest(self) -> int:
        """The step of the newest good checkpoint in the folder of any host that "auto" may take; 0 without one."""
        path = None
        with suppress(CheckpointError):
            path = self._read("auto")[0] if self.world.local_rank == 0 else None
        return max(int(each) for each in self.world.gather(str(_step(path) if path else 0).encode()))

    def _owner(self) -> int:
        """The rank whose host has the newest checkpoint: it is not the first one's where folders are on the hosts' own
        disks and the hosts came back in another order."""
        world = self.world
        newest_here = continued(self.folder)[:1] if world.local_rank == 0 else []
        newest = world.gather("".join(path.name for path in newest_here).encode())
        return newest.index(max(newest))

    def _read(self, where: str) -> tuple[Path | None, bytes]:
        """The first readable checkpoint, newest first. A named one that is missing is an error; "auto" may find
        none."""
        candidates = continued(self.folder) if where == "auto" else _named(Path(where))
        for path in candidates:
            try:
                with open_regular(path) as file:
                    data = file.read()
                unpack(data)
            except (CheckpointError, OSError) as error:
                log.warning("skipping `%s`: %s", path, error)
                continue
            return path, data
        if candidates:
            raise unreadable(candidates[0].parent, f"all {len(candidates)} are damaged")
        if where != "auto":
            raise CheckpointError(
                f"`{where}` holds no checkpoint", hint="name the folder of a run's checkpoints, or one of them"
            )
        return None, b""

    def _load(self, content: dict[str, Any], source: str) -> None:
        if self.world.first:
            tell_missing(
                f"`{source}`", self.kept, {*content["shared"], *(name for own in content["own"] for name in own)}
            )
        # Random numbers last: loading the rest may draw some.
        for name in sorted(self.kept, key=lambda name: name == "random"):
            state = self._part(name, content)
            if state is not None:
                try:
                    self.kept[name].state.load_state_dict(state)
                except Exception as error:  # whatever a state of the user's own raises
                    raise misfit(f"`{source}`", name, reason_of(error)) from error

    def _part(self, name: str, content: dict[str, Any]) -> dict[str, Any] | None:
        """The state for this rank; None for what the checkpoint lacks, or what cannot survive a change of ranks.

        What was one state for all is where each rank begins, should they hold their own now; the other way round, all
        resume from the first one's.
        """
        kept, world = self.kept[name], self.world
        if name in content["shared"]:
            apart = content.get("buffers", [])
            buffers = apart[world.rank].get(name, {}) if len(apart) == world.size else {}
            return {**content["shared"][name], **buffers}
        states = [own[name] for own in content["own"] if name in own]
        if states and kept.across != "own":
            return states[0]
        if len(states) == world.size and (not kept.merge or content.get("mesh") == [world.hosts, world.local_size]):
            return states[world.rank]
        return kept.merge(states, world.rank, world.size) if states and kept.merge else None


def _other_than(
    first: Mapping[str, Mapping[str, Tensor]], buffers: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, dict[str, Tensor]]:
    """The buffers of a rank, by state and name, that are not those of the first rank."""
    differ = {
        name: {key: value for key, value in of_rank.items() if not torch.equal(value, first[name][key])}
        for name, of_rank in buffers.items()
    }
    return {name: each for name, each in differ.items() if each}


def _checked(content: dict[str, Any], path: Path | str) -> dict[str, Any]:
    """The content of a checkpoint in one file.

    Raises:
        CheckpointError: it is of another format, or no checkpoint.
    """
    if content.get("format") != FORMAT:
        raise CheckpointError(f"`{path}` has format {content.get('format')}, this version reads {FORMAT}")
    shared, own = content.get("shared"), content.get("own")
    buffers = content.get("buffers", [])
    listed = [*own, *buffers] if isinstance(own, list) and isinstance(buffers, list) else [None]
    if not isinstance(shared, dict) or not all(isinstance(each, dict) for each in listed):
        raise CheckpointError(f"`{path}` does not say what is in it")
    return content


def read(path: Path) -> dict[str, Any]:
    """The content of a checkpoint in one file.

    Raises:
        CheckpointError: it is damaged, of another format, or no checkpoint.
    """
    try:
        with open_regular(path) as file:
            return _checked(unpack(file.read()), path)
    except OSError as error:
        raise CheckpointError(f"cannot read `{path}`: {error.strerror}") from error
    except CheckpointError as error:
        raise CheckpointError(f"`{path}` is damaged: {error}") from error


def saves(folder: Path) -> list[Path]:
    """The checkpoints in a folder, newest first; none, and a warning, where it cannot be read."""
    try:
        return sorted((path for path in folder.glob("step-*.safetensors") if _NAME.fullmatch(path.name)), reverse=True)
    except OSError as error:
        log.warning("cannot look for checkpoints in `%s`: %s", folder, error.strerror or error)
        return []


def continued(folder: Path) -> list[Path]:
    """The checkpoints that "auto" may take, newest first: without those that the run went back from."""
    newest = _newest(folder)
    return [path for path in saves(folder) if _step(path) <= newest]


def _newest(folder: Path) -> float:
    """The newest step of the run where there are later ones that are not its own."""
    try:
        return int(read_regular(folder / NEWEST, 100))
    except (OSError, ValueError):
        return math.inf


def _step(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def _named(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return saves(path) or saves(path / "checkpoints")
