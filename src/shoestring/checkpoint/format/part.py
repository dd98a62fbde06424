"""The format of a part: a safetensors file with pieces of tensors, the same in memory and on disk. The checksums of its
chunks are in the checkpoint's record.

The metadata in the header of the file has two entries in JSON. `about` holds the checkpoint, the rank, and the trees of
the states to which the tensors belong. `boxes` holds the tensor and the box of each piece.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from shoestring.checkpoint.format.checksum import CHUNK, crc32
from shoestring.checkpoint.format.layout import Box, Leaf
from shoestring.checkpoint.format.tensor_file import DTYPES, NAMES
from shoestring.core.errors import CheckpointError
from shoestring.storage.guarded import open_regular

HEADER_LIMIT = 100_000_000  # maximum size of a header in bytes, as in safetensors
ROOM = 1 << 10  # headers are padded to multiples of this, so that longer numbers in them do not move the pieces


# -- writing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Form:
    """Layout of the pieces in a part, and their header entries; reused as long as names, data types and shapes do not
    change."""

    entries: str
    """Header entries of all pieces in safetensors' format, as JSON without the outer braces."""
    boxes: str
    """Tensor and box of each piece, as JSON inside a JSON string."""
    places: tuple[tuple[int, int, torch.dtype, tuple[int, ...]], ...]
    """(start, stop, data type, shape) of each piece; start and stop are byte offsets from the end of the header."""
    nbytes: int

    @classmethod
    def of(cls, leaves: Iterable[Leaf]) -> Form:
        """Compute the layout of pieces in the given order; see `aligned`."""
        entries, boxes, places, end = {}, {}, [], 0
        for leaf in leaves:
            cut = leaf.box.shape != leaf.shape
            name = f"{leaf.name}@{','.join(map(str, leaf.box.offset))}" if cut else leaf.name
            while name in entries or name == "__metadata__":  # a tensor may have a piece's name, such as `a@5`
                name += "#"
            kind = NAMES.get(leaf.data.dtype)
            if kind is None:
                raise CheckpointError(f"cannot save `{leaf.name}`: safetensors does not support {leaf.data.dtype}")
            span = [end, end := end + leaf.nbytes]
            entries[name] = {"dtype": kind, "shape": list(leaf.data.shape), "data_offsets": span}
            boxes[name] = [leaf.name, list(leaf.shape), list(leaf.box.offset)]
            places.append((*span, leaf.data.dtype, tuple(leaf.data.shape)))
        return cls(json.dumps(entries)[1:-1], json.dumps(json.dumps(boxes)), tuple(places), end)

    def header(self, about: Mapping[str, Any], least: int = 0) -> bytes:
        """Return the header, preceded by its length and padded: in sum a multiple of `ROOM`, at least `least`."""
        metadata = f'{{"about": {json.dumps(json.dumps(about))}, "boxes": {self.boxes}}}'
        text = f'{{"__metadata__": {metadata}{self.entries and ", "}{self.entries}}}'.encode()
        text = text.ljust(max(least, -(-(8 + len(text)) // ROOM) * ROOM) - 8)
        return len(text).to_bytes(8, "little") + text

    def views(self, data: Tensor) -> list[Tensor]:
        """Return views of the pieces, with their data types, in the bytes that follow a part's header."""
        return [data[start:stop].view(dtype).view(shape) for start, stop, dtype, shape in self.places]


@dataclass(frozen=True, eq=False)
class Draft:
    """A part to be written: its layout, its header, and the tensors to copy into the part."""

    form: Form
    header: bytes
    sources: Sequence[Tensor]
    """The tensors of the pieces, in the order of `form`."""

    @property
    def nbytes(self) -> int:
        return len(self.header) + self.form.nbytes

    @classmethod
    def of(cls, leaves: Iterable[Leaf], about: Mapping[str, Any]) -> Draft:
        """Prepare a part with the given pieces.

        Args:
            about: metadata of the part; see the top of this file.

        Raises:
            CheckpointError: safetensors does not support the data type of a piece.
        """
        ordered = aligned(leaves)
        form = Form.of(ordered)
        return cls(form, form.header(about), [leaf.data for leaf in ordered])

    def begin(self, room: Tensor) -> None:
        """Write the header to the beginning of the part's memory `room`, uint8 with shape (nbytes,)."""
        room[: len(self.header)] = torch.frombuffer(bytearray(self.header), dtype=torch.uint8)

    def fill(self, room: Tensor) -> None:
        """Write the whole part to `room`: the header, then one piece at a time."""
        self.begin(room)
        for target, source in zip(self.form.views(room[len(self.header) :]), self.sources, strict=True):
            target.copy_(source)


def aligned(leaves: Iterable[Leaf]) -> list[Leaf]:
    """Sort pieces by decreasing element size, so that each piece begins at a multiple of its element size."""
    return sorted(leaves, key=lambda leaf: -leaf.data.element_size())


# -- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """Describes one piece of a tensor in a part: the tensor and the box of it that the piece holds, its data type, and
    its range of bytes in the part."""

    tensor: str
    shape: tuple[int, ...]
    box: Box
    dtype: torch.dtype
    start: int
    stop: int


@dataclass(eq=False)
class Part:
    """The bytes of a part, and their expected checksums. Bytes are verified before they are read.

    Args:
        name: name of the part in messages.
        data: the bytes (uint8, 1-d), in this process's memory or memory-mapped from a file.
        expected: expected CRC-32 of each chunk.
    """

    name: str
    data: Tensor
    expected: Sequence[int]
    _good: set[int] = field(default_factory=set)

    @classmethod
    def open(cls, path: Path, nbytes: int, expected: Sequence[int], *, slot: bool = False) -> Part:
        """Memory-map the file of a part.

        Args:
            nbytes: length of the part.
            slot: whether the file belongs to a slot in memory. A slot's file must belong to this user, and may be
                longer than the part.

        Raises:
            CheckpointError: the file is missing, or has another length.
        """
        try:
            with open_regular(path, private=slot) as file:
                size = os.fstat(file.fileno()).st_size
                if size < nbytes or (size > nbytes and not slot) or len(expected) != -(-nbytes // CHUNK):
                    raise CheckpointError(f"`{path}` is damaged: it has {size} bytes instead of {nbytes}")
                return cls(str(path), mapped(file, nbytes), expected)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read `{path}`: {error}") from error

    def verify(self, start: int = 0, stop: int | None = None) -> None:
        """Raise CheckpointError if a chunk in a range of bytes has a wrong checksum; each chunk is checked only
        once."""
        view = self.data.numpy().data
        for index in range(start // CHUNK, -(-(len(view) if stop is None else stop) // CHUNK)):
            if index not in self._good:
                if crc32(view[index * CHUNK : (index + 1) * CHUNK]) != self.expected[index]:
                    raise CheckpointError(f"`{self.name}` is damaged: chunk {index} has a wrong checksum")
                self._good.add(index)

    @cached_property
    def _header(self) -> tuple[dict[str, Any], int]:
        try:
            length = int.from_bytes(self.data[:8].numpy().tobytes(), "little")
            if not 2 <= length <= min(HEADER_LIMIT, len(self.data) - 8):
                raise ValueError(f"its header cannot have {length} bytes")
            self.verify(0, 8 + length)
            header = json.loads(self.data[8 : 8 + length].numpy().tobytes(), object_pairs_hook=_no_twins)
            if not isinstance(header, dict):
                raise ValueError("its header is not a JSON object")
            return header, 8 + length
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"`{self.name}` is not part of a checkpoint, or damaged: {error}") from error

    @cached_property
    def about(self) -> dict[str, Any]:
        """Metadata of the part: its checkpoint, its rank, and the trees of its states."""
        return self._metadata("about")

    def _metadata(self, key: str) -> dict[str, Any]:
        try:
            content = json.loads(self._header[0]["__metadata__"][key], object_pairs_hook=_no_twins)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"`{self.name}` is not part of a checkpoint: it lacks {key}") from error
        if not isinstance(content, dict):
            raise CheckpointError(f"`{self.name}` is not part of a checkpoint: its {key} is not a JSON object")
        return content

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces of the part, in the order of their byte ranges.

        Raises:
            CheckpointError: pieces overlap, leave gaps, or contradict the header.
        """
        (header, start), boxes = self._header, self._metadata("boxes")
        try:
            pieces = [
                _parse_piece(entry, boxes[name], start) for name, entry in header.items() if name != "__metadata__"
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"`{self.name}` is not part of a checkpoint, or damaged: {error}") from error
        pieces.sort(key=lambda piece: (piece.start, piece.stop))
        ends = [start, *(piece.stop for piece in pieces)]
        if any(piece.start != end for piece, end in zip(pieces, ends, strict=False)) or ends[-1] != len(self.data):
            raise CheckpointError(f"`{self.name}` is damaged: its pieces overlap, leave gaps or end elsewhere")
        return tuple(pieces)

    def read(self, piece: Piece, box: Box | None = None) -> Tensor:
        """Verify a piece, and return the whole piece or one box of it, as a view of the part's bytes."""
        self.verify(piece.start, piece.stop)
        whole = self.data[piece.start : piece.stop]
        if whole.data_ptr() % piece.dtype.itemsize:  # in a file by another program; torch needs aligned views
            whole = whole.clone()
        whole = whole.view(piece.dtype).view(piece.box.shape)
        return whole if box is None else whole[box.inside(piece.box)]


def _parse_piece(entry: Mapping[str, Any], place: Sequence[Any], start: int) -> Piece:
    tensor, shape, offset = place
    extent, (first, stop), dtype = entry["shape"], entry["data_offsets"], DTYPES[entry["dtype"]]
    for number in (*shape, *offset, *extent, first, stop):
        if type(number) is not int or not 0 <= number < 1 << 60:
            raise ValueError(f"{number!r} is not a valid size")
    if not isinstance(tensor, str) or not len(shape) == len(offset) == len(extent):
        raise ValueError(f"a piece of {tensor!r} has a different number of dimensions than the tensor")
    if any(at + size > whole for at, size, whole in zip(offset, extent, shape, strict=True)):
        raise ValueError(f"a piece of `{tensor}` lies outside the tensor")
    if (
        prod(max(size, 1) for size in shape) * dtype.itemsize >= 1 << 63
    ):  # torch refuses such a shape, even without elements
        raise ValueError(f"the shape {shape} of `{tensor}` is too large")
    if stop - first != prod(extent) * dtype.itemsize:
        raise ValueError(f"a piece of `{tensor}` has {stop - first} bytes, which does not match its shape")
    return Piece(tensor, tuple(shape), Box(tuple(offset), tuple(extent)), dtype, start + first, start + stop)


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise ValueError("its header contains the same name twice")
    return mapping


def mapped(file: BinaryIO, nbytes: int, *, writable: bool = False) -> Tensor:
    """Memory-map the first `nbytes` bytes of a file as a 1-d uint8 tensor. If `writable`, writes to the tensor change
    the file."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    # If not `writable`, the mapping is copy-on-write, because torch has no read-only tensors. No page is copied unless
    # the tensor is written to.
    return torch.from_numpy(np.memmap(file, np.uint8, mode="r+" if writable else "c", shape=(nbytes,)))
