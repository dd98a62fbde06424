"""Reads whole tensors of a checkpoint in one process for export, and writes checkpoints of imported tensors."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from shoestring.checkpoint.format.checksum import sums
from shoestring.checkpoint.format.layout import KINDS, PRIVATE, Box, leaves_of, sources
from shoestring.checkpoint.format.manifest import CheckpointId, Entry, Record
from shoestring.checkpoint.format.part import Draft, Part, mapped
from shoestring.checkpoint.format.tensor_file import bytes_of, header_of, in_order
from shoestring.checkpoint.format.tree import decode, encode, merged_states, root
from shoestring.checkpoint.tiers import plain
from shoestring.checkpoint.tiers.disk import MANIFEST, Disk
from shoestring.core.errors import CheckpointError, nearest
from shoestring.storage import foreign
from shoestring.storage.whole import write_atomic

# -- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor of a checkpoint; its pieces on this host are read only when needed."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[tuple[Box, Callable[[Box], Tensor]], ...]
    """Boxes of the tensor, each with a function that verifies and reads a smaller box inside this box."""

    @property
    def nbytes(self) -> int:
        return self.whole.numel * self.dtype.itemsize

    @property
    def whole(self) -> Box:
        return Box((0,) * len(self.shape), self.shape)

    @property
    def complete(self) -> bool:
        return sources(self.whole, self.pieces) is not None

    def numpy(self) -> Stored:
        """Return this object; `decode` calls the method for arrays, which are exported as tensors."""
        return self

    def cover(self) -> list[tuple[Box, Callable[[], Tensor]]]:
        """Return disjoint boxes that make up the whole tensor, each with the function that reads the box.

        Raises:
            CheckpointError: pieces are missing on this host.
        """
        covering = sources(self.whole, self.pieces)
        if covering is None:
            raise CheckpointError(
                f"`{self.name}` is incomplete", hint="the missing pieces are on the disks of other hosts"
            )
        empty = partial(torch.empty, self.shape, dtype=self.dtype)
        return [(box, partial(read, box)) for box, read in covering] or [(self.whole, empty)]

    def read(self) -> Tensor:
        """Return the whole tensor: a view of the checkpoint's file if the tensor is stored as one piece, otherwise a
        copy.

        Raises:
            CheckpointError: the tensor is damaged or incomplete.
        """
        cover = self.cover()
        if len(cover) == 1:
            return cover[0][1]()
        tensor = torch.empty(self.shape, dtype=self.dtype)
        for box, read in cover:
            tensor[box.inside(self.whole)].copy_(read())
        return tensor


@dataclass(frozen=True, eq=False)
class Saved:
    """The content of a checkpoint: the trees of its states, and its tensors, which are read when needed."""

    step: int
    source: str
    """Name of the checkpoint in messages."""
    shared: Mapping[str, Any]
    """Maps the name of a state that all ranks share to the state's tree."""
    own: Mapping[int, Mapping[str, Any]]
    """Maps a rank, then the name of a state that differs between ranks, to the state's tree."""
    homes: Mapping[int, Mapping[str, int]]
    """Maps a rank, then the path of a tensor in one of the rank's own states, to the rank with which the tensor's name
    begins."""
    tensors: Mapping[str, Stored]

    def state(self, name: str) -> Any:
        """Return a state with `Stored` objects in place of tensors; if each rank has its own state, the first rank's.

        Raises:
            CheckpointError: the checkpoint has no state with this name.
        """
        if name in self.shared:
            return decode(self.shared[name], self._stored)
        own = self.own.get(0, {})
        if name not in own:
            raise CheckpointError(f"{self.source} holds no `{name}`", hint=nearest(name, [*self.shared, *own]))
        homes = self.homes.get(0, {})
        return decode(own[name], lambda path: self._stored(f"{homes.get(path, 0)}:{path}"))

    def _stored(self, path: str) -> Stored:
        try:
            return self.tensors[path]
        except KeyError:
            raise CheckpointError(f"{self.source} lacks `{path}`") from None


def opened(places: Sequence[tuple[Path, Record]]) -> Saved:
    """Open a checkpoint from (folder, record) pairs; a part that is in several folders is read from the first of these.

    Raises:
        CheckpointError: a part is damaged or missing.
    """
    parts: dict[str, Part] = {}
    for folder, record in places:
        for name in record.parts:
            if name.partition("-")[0] in KINDS and name not in parts:
                parts[name] = part_of(folder, record, name)
    pieces: dict[str, list[tuple[Box, Callable[[Box], Tensor]]]] = {}
    kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for part in parts.values():
        for piece in part.pieces:
            if kinds.setdefault(piece.tensor, (piece.dtype, piece.shape)) != (piece.dtype, piece.shape):
                raise CheckpointError(
                    f"`{part.name}` has `{piece.tensor}` with a different data type or shape than other parts"
                )
            pieces.setdefault(piece.tensor, []).append((piece.box, partial(part.read, piece)))
    tensors = {name: Stored(name, dtype, shape, tuple(pieces[name])) for name, (dtype, shape) in kinds.items()}
    checkpoint = places[0][1].checkpoint
    names = {rank: f"{PRIVATE}-{rank}" for rank in range(checkpoint.ranks)}
    abouts = {rank: parts[name].about for rank, name in names.items() if name in parts}
    source = f"the checkpoint of step {checkpoint.step}"
    try:
        own = {rank: about["trees"]["own"] for rank, about in abouts.items()}
        homes = {rank: about["homes"] for rank, about in abouts.items()}
        shared = merged_states([abouts[rank]["trees"]["shared"] for rank in sorted(abouts)])
        return Saved(checkpoint.step, source, shared, own, homes, tensors)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{source} lacks the trees of its states") from error


def part_of(folder: Path, record: Record, name: str) -> Part:
    """Memory-map a part of a checkpoint on disk or in a slot.

    Raises:
        CheckpointError: the part's file is missing or too short.
    """
    entry = record.parts[name]
    return Part.open(folder / entry.file, entry.nbytes, entry.sums, slot=not (folder / MANIFEST).exists())


def one_file(path: Path) -> Saved:
    """Open a checkpoint in the format of `Plain`, which is a single file.

    Raises:
        CheckpointError: the file is damaged, or has another format.
    """
    content = plain.read(path)
    leaves: dict[str, Tensor] = {}
    shared = {name: encode(state, root(name), leaves) for name, state in content["shared"].items()}
    own = {}
    for rank, states in enumerate(content["own"]):
        own_leaves: dict[str, Tensor] = {}
        own[rank] = {name: encode(state, root(name), own_leaves) for name, state in states.items()}
        leaves |= {f"{rank}:{name}": tensor for name, tensor in own_leaves.items()}
    tensors = {name: held(name, tensor) for name, tensor in leaves.items()}
    homes = {rank: {} for rank in own}
    progress = content["shared"].get("progress")
    step = progress.get("step", 0) if isinstance(progress, dict) else 0
    return Saved(step, f"`{path}`", shared, own | {0: own.get(0, {})}, homes, tensors)


def held(name: str, tensor: Tensor) -> Stored:
    """Wrap a tensor in memory as a `Stored`, to use the tensor like a tensor in a checkpoint."""
    whole = Box((0,) * tensor.ndim, tuple(tensor.shape))
    return Stored(name, tensor.dtype, tuple(tensor.shape), ((whole, lambda box: tensor[box.inside(whole)]),))


# -- safetensors ------------------------------------------------------------------------------------------------------


def write_safetensors(tensors: Mapping[str, Stored], path: Path) -> None:
    """Write whole tensors to one safetensors file, one after the other; each tensor is verified first. The file is
    written completely or not at all, and at most one tensor is in memory at a time.

    Raises:
        CheckpointError: a tensor is damaged or incomplete, or safetensors does not support its data type.
        OSError: the file cannot be written.
    """
    ordered = in_order(tensors)
    content = (bytes_of(stored.read().contiguous()) for stored in ordered.values())
    write_atomic(path, chain([header_of(ordered, {"format": "pt"})], content))


def read_safetensors(folder: Path) -> dict[str, Tensor]:
    """Memory-map the tensors of one safetensors file, or of all safetensors files in a folder, by name.

    Raises:
        CheckpointError: there is no safetensors file, a file is damaged, or two files contain a tensor with the same
            name.
    """
    tensors: dict[str, Tensor] = {}
    for path in [folder] if folder.is_file() else sorted(folder.glob("*.safetensors")):
        try:
            with foreign.open_safetensors(path) as file:
                more = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read `{path}`: {error}") from error
        if twice := more.keys() & tensors.keys():
            raise CheckpointError(f"`{folder}` holds `{min(twice)}` in two files")
        tensors |= more
    if not tensors:
        raise CheckpointError(f"`{folder}` holds no .safetensors file")
    return tensors


# -- a checkpoint from outside ----------------------------------------------------------------------------------------


def commit(states: Mapping[str, Any], step: int, start: int, disk: Disk) -> Path:
    """Write a checkpoint of whole states, as a run with one rank would; any number of ranks can resume from this
    checkpoint.

    Args:
        start: number of the start of the run, which the checkpoint records as its origin.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: a state cannot be saved.
        OSError: writing failed; the unfinished checkpoint is removed.
    """
    checkpoint = CheckpointId(step, start, secrets.token_hex(4), 1, 1)
    leaves: dict[str, Tensor] = {}
    trees = {name: encode(state, root(name), leaves) for name, state in states.items()}
    about = {"step": step, "start": start, "uid": checkpoint.uid, "homes": {}}
    pieces = [leaf for name, tensor in leaves.items() for leaf in leaves_of(name, tensor, (0,))]
    draft = Draft.of(pieces, about | {"trees": {"shared": trees, "own": {}}})
    try:
        disk.files.folder(disk.aside(checkpoint))
        path = disk.aside(checkpoint) / f"{PRIVATE}-0.safetensors"
        disk.files.write(path, b"", durable=False)
        with path.open("r+b") as file:  # memory-mapped, so that at most one tensor is in memory at a time
            os.posix_fallocate(file.fileno(), 0, draft.nbytes)
            room = mapped(file, draft.nbytes, writable=True)
            draft.fill(room)
            os.fsync(file.fileno())
        entry = Entry(path.name, draft.nbytes, tuple(sums(room)))
        disk.files.sync(disk.aside(checkpoint))
        # With `last`, resuming does not count as a failure.
        disk.commit(Record(checkpoint, {f"{PRIVATE}-0": entry}, {"last": True}))
    except BaseException:
        disk.abort(checkpoint)
        raise
    return disk.folder / checkpoint.name
