"""One file form for every level: a safetensors file of pieces of tensors, with a checksum for each chunk of it.

Besides the tensors, the header's metadata holds `about` (JSON: of which checkpoint and rank it is, and the trees whose
leaves the tensors are) and `boxes` (JSON: of which tensor and which box of it each piece is).
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
from shoestring.checkpoint.format.layout import DTYPES, Box, Leaf
from shoestring.core.errors import CheckpointError
from shoestring.storage.guarded import open_regular

HEADER_LIMIT = 100_000_000  # bytes of the longest header, safetensors' own limit
ROOM = 1 << 10  # a header with its length is a multiple of this long: a number more in it does not move the pieces
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


# -- writing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Form:
    """Where pieces lie in a part, and what its header says of them: as long as their names, types and shapes stay."""

    entries: str
    """JSON: what safetensors wants to know of each piece."""
    boxes: str
    """JSON in a JSON string: of which tensor and which box of it each piece is."""
    places: tuple[tuple[int, int, torch.dtype, tuple[int, ...]], ...]
    """(first byte, last, type, shape) of each piece, from the header's end."""
    nbytes: int

    @classmethod
    def of(cls, leaves: Iterable[Leaf]) -> Form:
        """The form of some pieces, in their order; see `aligned`."""
        entries, boxes, places, end = {}, {}, [], 0
        for leaf in leaves:
            name, kind = _entry(leaf, entries), _NAMES.get(leaf.data.dtype)
            if kind is None:
                raise CheckpointError(f"cannot save `{leaf.name}`: safetensors has no {leaf.data.dtype}")
            span = [end, end := end + leaf.nbytes]
            entries[name] = {"dtype": kind, "shape": list(leaf.data.shape), "data_offsets": span}
            boxes[name] = [leaf.name, list(leaf.shape), list(leaf.box.offset)]
            places.append((*span, leaf.data.dtype, tuple(leaf.data.shape)))
        return cls(json.dumps(entries)[1:-1], json.dumps(json.dumps(boxes)), tuple(places), end)

    def header(self, about: Mapping[str, Any], least: int = 0) -> bytes:
        """The header with its length in front, filled up to `least` bytes and a multiple of `ROOM`."""
        metadata = f'{{"about": {json.dumps(json.dumps(about))}, "boxes": {self.boxes}}}'
        text = f'{{"__metadata__": {metadata}{self.entries and ", "}{self.entries}}}'.encode()
        text = text.ljust(max(least, -(-(8 + len(text)) // ROOM) * ROOM) - 8)
        return len(text).to_bytes(8, "little") + text

    def views(self, data: Tensor) -> list[Tensor]:
        """The pieces in a part's bytes from the header's end, as tensors of their types and shapes."""
        return [data[start:stop].view(dtype).view(shape) for start, stop, dtype, shape in self.places]


@dataclass(frozen=True, eq=False)
class Draft:
    """A part that is to be written."""

    form: Form
    header: bytes
    sources: Sequence[Tensor]
    """What its pieces are, in the form's order."""

    @property
    def nbytes(self) -> int:
        return len(self.header) + self.form.nbytes

    @classmethod
    def of(cls, leaves: Iterable[Leaf], about: Mapping[str, Any]) -> Draft:
        """The draft of some pieces.

        Raises:
            CheckpointError: one is of a type that the file has no name for.
        """
        ordered = aligned(leaves)
        form = Form.of(ordered)
        return cls(form, form.header(about), [leaf.data for leaf in ordered])

    def begin(self, room: Tensor) -> None:
        """Write the header to where the part will be: (nbytes,) uint8."""
        room[: len(self.header)] = torch.frombuffer(bytearray(self.header), dtype=torch.uint8)

    def fill(self, room: Tensor) -> None:
        """Write all of it there, a piece at a time."""
        self.begin(room)
        for target, source in zip(self.form.views(room[len(self.header) :]), self.sources, strict=True):
            target.copy_(source)


def aligned(leaves: Iterable[Leaf]) -> list[Leaf]:
    """In the order in which each piece begins at a multiple of its type's size: wide types first."""
    return sorted(leaves, key=lambda leaf: -leaf.data.element_size())


def _entry(leaf: Leaf, taken: Mapping[str, Any]) -> str:
    whole = leaf.box.shape == leaf.shape
    name = leaf.name if whole else f"{leaf.name}@{','.join(map(str, leaf.box.offset))}"
    while name in taken or name == "__metadata__":  # a piece of `a` is named as another tensor, `a@5`, is
        name += "#"
    return name


# -- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """A piece in a part: where its bytes are, and which box of which tensor it is."""

    tensor: str
    shape: tuple[int, ...]
    box: Box
    dtype: torch.dtype
    start: int
    stop: int


@dataclass(eq=False)
class Part:
    """A part's bytes and the checksums they must have; what is read of it is verified first.

    Args:
        name: for messages.
        data: its bytes (uint8, 1-d), of this process or mapped from a file.
        expected: CRC-32 of each chunk.
    """

    name: str
    data: Tensor
    expected: Sequence[int]
    _good: set[int] = field(default_factory=set)

    @classmethod
    def open(cls, path: Path, nbytes: int, expected: Sequence[int], *, slot: bool = False) -> Part:
        """Map a file. A slot's is this user's own, and longer than what is in it.

        Raises:
            CheckpointError: it is not there, or of another length.
        """
        try:
            with open_regular(path, private=slot) as file:
                size = os.fstat(file.fileno()).st_size
                if size < nbytes or (size > nbytes and not slot) or len(expected) != -(-nbytes // CHUNK):
                    raise CheckpointError(f"`{path}` is damaged: {size} bytes in place of {nbytes}")
                return cls(str(path), mapped(file, nbytes), expected)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read `{path}`: {error}") from error

    def verify(self, start: int = 0, stop: int | None = None) -> None:
        """Raise CheckpointError unless the chunks of these bytes have their checksums."""
        view = self.data.numpy().data
        for index in range(start // CHUNK, -(-(len(view) if stop is None else stop) // CHUNK)):
            if index not in self._good:
                if crc32(view[index * CHUNK : (index + 1) * CHUNK]) != self.expected[index]:
                    raise CheckpointError(f"`{self.name}` is damaged: chunk {index} is not what was written")
                self._good.add(index)

    @cached_property
    def _header(self) -> tuple[dict[str, Any], int]:
        try:
            length = int.from_bytes(self.data[:8].numpy().tobytes(), "little")
            if not 2 <= length <= min(HEADER_LIMIT, len(self.data) - 8):
                raise ValueError(f"a header of {length} bytes")
            self.verify(0, 8 + length)
            header = json.loads(self.data[8 : 8 + length].numpy().tobytes(), object_pairs_hook=_no_twins)
            if not isinstance(header, dict):
                raise ValueError("its header is no object")
            return header, 8 + length
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"`{self.name}` is no part of a checkpoint, or damaged: {error}") from error

    @cached_property
    def about(self) -> dict[str, Any]:
        """What was said about it when it was written."""
        return self._metadata("about")

    def _metadata(self, key: str) -> dict[str, Any]:
        try:
            content = json.loads(self._header[0]["__metadata__"][key], object_pairs_hook=_no_twins)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"`{self.name}` is no part of a checkpoint: it lacks {key}") from error
        if not isinstance(content, dict):
            raise CheckpointError(f"`{self.name}` is no part of a checkpoint: its {key} is no object")
        return content

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """Its pieces, in the order of their bytes.

        Raises:
            CheckpointError: they overlap, leave gaps, or are not what the header says of them.
        """
        (header, start), boxes = self._header, self._metadata("boxes")
        try:
            pieces = [_piece(entry, boxes[name], start) for name, entry in header.items() if name != "__metadata__"]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"`{self.name}` is no part of a checkpoint, or damaged: {error}") from error
        pieces.sort(key=lambda piece: (piece.start, piece.stop))
        ends = [start, *(piece.stop for piece in pieces)]
        if any(piece.start != end for piece, end in zip(pieces, ends, strict=False)) or ends[-1] != len(self.data):
            raise CheckpointError(f"`{self.name}` is damaged: its pieces overlap, leave gaps or end elsewhere")
        return tuple(pieces)

    def read(self, piece: Piece, box: Box | None = None) -> Tensor:
        """A box of a piece's tensor, verified; a view of the part's bytes."""
        self.verify(piece.start, piece.stop)
        whole = self.data[piece.start : piece.stop]
        if whole.data_ptr() % piece.dtype.itemsize:  # such a file was not written here
            whole = whole.clone()
        whole = whole.view(piece.dtype).view(piece.box.shape)
        return whole if box is None else whole[box.inside(piece.box)]


def _piece(entry: Mapping[str, Any], place: Sequence[Any], start: int) -> Piece:
    tensor, shape, offset = place
    extent, (first, stop), dtype = entry["shape"], entry["data_offsets"], DTYPES[entry["dtype"]]
    for number in (*shape, *offset, *extent, first, stop):
        if type(number) is not int or not 0 <= number < 1 << 60:
            raise ValueError(f"{number!r} for a size")
    if not isinstance(tensor, str) or not len(shape) == len(offset) == len(extent):
        raise ValueError(f"a piece of {tensor!r} of other dimensions")
    if any(at + size > whole for at, size, whole in zip(offset, extent, shape, strict=True)):
        raise ValueError(f"a piece outside of `{tensor}`")
    if prod(max(size, 1) for size in shape) * dtype.itemsize >= 1 << 63:  # of no elements, yet torch refuses it
        raise ValueError(f"a piece of `{tensor}` of {shape}")
    if stop - first != prod(extent) * dtype.itemsize:
        raise ValueError(f"a piece of `{tensor}` of {stop - first} bytes")
    return Piece(tensor, tuple(shape), Box(tuple(offset), tuple(extent)), dtype, start + first, start + stop)


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise ValueError("a name twice in its header")
    return mapping


def mapped(file: BinaryIO, nbytes: int, *, writable: bool = False) -> Tensor:
    """A file's bytes (uint8, 1-d) without a copy; what is written to them is written to the file if `writable`."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    # Else copy-on-write, for torch has no read-only tensors: nobody writes, so nothing is copied.
    return torch.from_numpy(np.memmap(file, np.uint8, mode="r+" if writable else "c", shape=(nbytes,)))
