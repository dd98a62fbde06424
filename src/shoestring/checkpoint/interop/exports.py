"""Checkpoints read by one process, without ranks: whole tensors from their pieces, for files that other programs read;
and checkpoints made of what other programs wrote.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shoestring.checkpoint.format.checksum import sums
from shoestring.checkpoint.format.layout import DTYPES, KINDS, PRIVATE, Box, Leaf, sources
from shoestring.checkpoint.format.manifest import CheckpointId, Entry, Record
from shoestring.checkpoint.format.part import Draft, Part, mapped
from shoestring.checkpoint.format.tree import decode, encode, root
from shoestring.checkpoint.tiers import plain
from shoestring.checkpoint.tiers.disk import MANIFEST, Disk
from shoestring.core.errors import CheckpointError, nearest
from shoestring.storage.guarded import open_regular
from shoestring.storage.whole import write_atomic

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


# -- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor of a checkpoint: its type, and the pieces that it can be read from; the rest of it may be on other
    hosts."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[tuple[Box, Callable[[Box], Tensor]], ...]
    """Boxes of it, each with what reads a box inside of that, verified."""

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
        """Itself: an array is exported as a tensor."""
        return self

    def cover(self) -> list[tuple[Box, Callable[[], Tensor]]]:
        """Disjoint boxes that make up all of it, with what reads each.

        Raises:
            CheckpointError: they are not all there.
        """
        covering = sources(self.whole, self.pieces)
        if covering is None:
            raise CheckpointError(f"`{self.name}` is incomplete", hint="the rest is on the disks of other hosts")
        empty = partial(torch.empty, self.shape, dtype=self.dtype)
        return [(box, partial(read, box)) for box, read in covering] or [(self.whole, empty)]

    def read(self) -> Tensor:
        """All of it: a view of the checkpoint's file where it is one piece there, else a copy.

        Raises:
            CheckpointError: it is damaged or incomplete.
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
    """The content of a checkpoint."""

    step: int
    source: str
    """For messages."""
    shared: Mapping[str, Any]
    """The trees of states that all ranks have in common, by name."""
    own: Mapping[int, Mapping[str, Any]]
    """Those that each has for itself, by rank."""
    homes: Mapping[int, Mapping[str, int]]
    tensors: Mapping[str, Stored]

    def state(self, name: str) -> Any:
        """A state with `Stored` in the place of tensors; of what each rank has for itself, the first one's.

        Raises:
            CheckpointError: there is none of this name.
        """
        if name in self.shared:
            return decode(self.shared[name], self._stored)
        mine = self.own.get(0, {})
        if name not in mine:
            raise CheckpointError(f"{self.source} holds no `{name}`", hint=nearest(name, [*self.shared, *mine]))
        homes = self.homes.get(0, {})
        return decode(mine[name], lambda path: self._stored(f"{homes.get(path, 0)}:{path}"))

    def _stored(self, path: str) -> Stored:
        try:
            return self.tensors[path]
        except KeyError:
            raise CheckpointError(f"{self.source} lacks `{path}`") from None


def opened(places: Sequence[tuple[Path, Record]]) -> Saved:
    """A checkpoint from the records of it that are at hand, each with its folder; those named first are read first.

    Raises:
        CheckpointError: a part that is needed is damaged or missing.
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
                raise CheckpointError(f"`{part.name}` has another `{piece.tensor}` than the parts beside it")
            pieces.setdefault(piece.tensor, []).append((piece.box, partial(part.read, piece)))
    tensors = {name: Stored(name, dtype, shape, tuple(pieces[name])) for name, (dtype, shape) in kinds.items()}
    checkpoint = places[0][1].checkpoint
    abouts = {r: parts[f"{PRIVATE}-{r}"].about for r in range(checkpoint.ranks) if f"{PRIVATE}-{r}" in parts}
    source = f"the checkpoint of step {checkpoint.step}"
    try:
        own = {rank: about["trees"]["own"] for rank, about in abouts.items()}
        homes = {rank: about["homes"] for rank, about in abouts.items()}
        return Saved(checkpoint.step, source, abouts[min(abouts)]["trees"]["shared"], own, homes, tensors)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{source} does not say what is in it") from error


def part_of(folder: Path, record: Record, name: str) -> Part:
    """A part, mapped: of a checkpoint on disk, or in a slot.

    Raises:
        CheckpointError: its file is missing or too short.
    """
    entry = record.parts[name]
    return Part.open(folder / entry.file, entry.nbytes, entry.sums, slot=not (folder / MANIFEST).exists())


def one_file(path: Path) -> Saved:
    """A checkpoint in one file, as `Plain` writes them.

    Raises:
        CheckpointError: it is damaged, or of another format.
    """
    content = plain.read(path)
    leaves: dict[str, Tensor] = {}
    shared = {name: encode(state, root(name), leaves) for name, state in content["shared"].items()}
    own = {}
    for rank, states in enumerate(content["own"]):
        mine: dict[str, Tensor] = {}
        own[rank] = {name: encode(state, root(name), mine) for name, state in states.items()}
        leaves |= {f"{rank}:{name}": tensor for name, tensor in mine.items()}
    tensors = {name: held(name, tensor) for name, tensor in leaves.items()}
    homes = {rank: {} for rank in own}
    progress = content["shared"].get("progress")
    step = progress.get("step", 0) if isinstance(progress, dict) else 0
    return Saved(step, f"`{path}`", shared, own | {0: own.get(0, {})}, homes, tensors)


def held(name: str, tensor: Tensor) -> Stored:
    whole = Box((0,) * tensor.ndim, tuple(tensor.shape))
    return Stored(name, tensor.dtype, tuple(tensor.shape), ((whole, lambda box: tensor[box.inside(whole)]),))


# -- safetensors ------------------------------------------------------------------------------------------------------


def write_safetensors(tensors: Mapping[str, Stored], path: Path) -> None:
    """Write whole tensors to one file: its header, then one tensor after the other, each verified before it is written.

    The file is there whole or not at all; no more than one tensor is in memory.

    Raises:
        CheckpointError: a tensor is damaged, incomplete, or of a type that safetensors lacks.
        OSError: the disk.
    """
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)  # so that all are aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    if "__metadata__" in tensors:
        raise CheckpointError("cannot export `__metadata__`: safetensors has another use for this name")
    for name, stored in ordered:
        if stored.dtype not in _NAMES:
            raise CheckpointError(f"cannot export `{name}`: safetensors has no {stored.dtype}")
        span = [end, end := end + stored.nbytes]
        header[name] = {"dtype": _NAMES[stored.dtype], "shape": list(stored.shape), "data_offsets": span}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    content = (stored.read().contiguous().reshape(-1).view(torch.uint8).numpy().data for _, stored in ordered)
    write_atomic(path, chain([len(text).to_bytes(8, "little") + text], content))


def read_safetensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file, or of all in a folder, by name; they are mapped, not read.

    Raises:
        CheckpointError: there are none, one is damaged, or two hold the same name.
    """
    tensors: dict[str, Tensor] = {}
    for path in [folder] if folder.is_file() else sorted(folder.glob("*.safetensors")):
        try:
            open_regular(path).close()
            with safe_open(path, framework="pt") as file:
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
    """Make a checkpoint of whole states, as if one rank had saved them; any number of ranks can resume from it.

    Raises:
        CheckpointError: a state holds what cannot be saved.
        OSError: the disk; nothing is left then.
    """
    checkpoint = CheckpointId(step, start, secrets.token_hex(4), 1, 1)
    leaves: dict[str, Tensor] = {}
    trees = {name: encode(state, root(name), leaves) for name, state in states.items()}
    about = {"step": step, "start": start, "uid": checkpoint.uid, "homes": {}}
    draft = Draft.of(_whole(leaves), about | {"trees": {"shared": trees, "own": {}}})
    try:
        disk.files.folder(disk.aside(checkpoint))
        entry = _fill(disk, draft, disk.aside(checkpoint) / f"{PRIVATE}-0.safetensors")
        disk.files.sync(disk.aside(checkpoint))
        disk.commit(Record(checkpoint, {f"{PRIVATE}-0": entry}, {"last": True}))  # resuming from it is no failure
    except BaseException:
        disk.abort(checkpoint)
        raise
    return disk.folder / checkpoint.name


def _whole(leaves: Mapping[str, Tensor]) -> Iterator[Leaf]:
    for name, tensor in leaves.items():
        shape = tuple(tensor.shape)
        yield Leaf(name, shape, Box((0,) * len(shape), shape), (0,), tensor)


def _fill(disk: Disk, draft: Draft, path: Path) -> Entry:
    """Write a part through a mapping of its file, so that no more than one tensor is in memory."""
    disk.files.write(path, b"", durable=False)
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, draft.nbytes)
        room = mapped(file, draft.nbytes, writable=True)
        draft.fill(room)
        os.fsync(file.fileno())
    return Entry(path.name, draft.nbytes, tuple(sums(room)))
