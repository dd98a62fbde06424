"""A ring buffer for a rank's newest differences, with cells of equal size in the host's shared memory.

Each cell holds its step and a checksum. So if the process is killed, only the cell that was being written is damaged.
The ring buffer needs no index, and no differences have to be deleted.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring.checkpoint.format.checksum import crc32
from shoestring.checkpoint.format.history import History
from shoestring.checkpoint.format.manifest import CheckpointId
from shoestring.checkpoint.format.part import mapped
from shoestring.checkpoint.tiers.slots import Slot
from shoestring.storage.guarded import open_regular

MAGIC = b"stepdiff"
_CELL = struct.Struct("<8sIIQ")  # magic number, checksum of the body, lengths of header and body in bytes
_FILE = struct.Struct("<8sIIQ")  # magic number, checksum of these fields, number of cells, size of a cell in bytes
_PAGE = 4096
_SPARE = 64 << 10  # bytes added to a cell beyond the size of the first difference: states may grow
_KEY = "ring"
_ALIGNED = 64
Found = tuple[dict[str, Any], dict[str, Tensor]]
"""The header of a difference, and its tensors."""
_MOST = 1 << 44  # maximum length of a ring buffer's file in bytes


class CellPlan:
    """Layout of a difference as bytes: magic number and checksum, then the header, then the tensors."""

    def __init__(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.tensors, self.places = tensors, dict[str, list[Any]]()
        end = 0
        for name, tensor in tensors.items():
            start = -(-end // _ALIGNED) * _ALIGNED
            end = start + tensor.nbytes
            self.places[name] = [start, end, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        # The header precedes the tensors and contains their offsets, which increase by the header's own length. So the
        # header is padded, because the final offsets may have more digits than the offsets used to measure the header's
        # length.
        length = len(json.dumps({**header, "places": self.places})) + 24 * len(self.places)
        self.first = -(-(_CELL.size + length) // _ALIGNED) * _ALIGNED - _CELL.size
        for place in self.places.values():
            place[:2] = place[0] + self.first, place[1] + self.first
        self.text = json.dumps({**header, "places": self.places}).encode().ljust(self.first)
        self.nbytes = _CELL.size + self.first + end

    def put(self, cell: Tensor) -> None:
        """Write the difference to the beginning of `cell`. The magic number comes last, so that a half-written
        difference is invalid."""
        cell[: _CELL.size] = 0
        body = cell[_CELL.size : self.nbytes]
        body[: self.first] = torch.frombuffer(bytearray(self.text), dtype=torch.uint8)
        for name, tensor in self.tensors.items():
            start, stop, *_ = self.places[name]
            body[start:stop].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        mark = _CELL.pack(MAGIC, crc32(body.numpy().data), self.first, len(body))
        cell[: _CELL.size] = torch.frombuffer(bytearray(mark), dtype=torch.uint8)


class Ring:
    """Reads and writes differences by step in a ring buffer.

    Args:
        slot: the file in shared memory; if shared memory has no room, the slot uses this process's own memory.
        cells: number of differences to store.
        lease: function that reserves a number of bytes of host memory; returns the reason why there is no room, or an
            empty string.
    """

    def __init__(self, slot: Slot, cells: int, lease: Callable[[int], str]) -> None:
        self.slot, self.cells, self.lease = slot, cells, lease
        self.refused = ""
        """Reason why recording has stopped; empty while recording works."""
        self._size, self._count = 0, cells  # size of a cell in bytes, and number of cells in the file
        self._room: Tensor | None = None
        self._leased = False

    @property
    def path(self) -> Path:
        return self.slot.stem.with_name(f"{self.slot.stem.name}.{_KEY}")

    def open(self) -> bool:
        """Open the file that an earlier process of the run left behind; returns whether there is such a file.

        The file is read with its own number of cells; the first write replaces it by a file with `cells` cells.
        """
        try:
            with open_regular(self.path, private=True) as file:
                layout = _layout(file)
        except OSError:
            return False
        if layout is None:
            return False
        self._count, self._size = cells, size = layout
        self._room = self.slot.room(f"{_KEY}-0", _PAGE + cells * size)
        return True

    def read(self, step: int) -> Found | None:
        """Return the difference of a step, with tensors that share the ring buffer's memory; None if it is missing or
        damaged."""
        cell = self._cell(step)
        return None if cell is None else _if_of_step(step, first(cell))

    def copied(self, step: int) -> Found | None:
        """Like `read`, but return a copy of the difference, for a thread that reads while another thread writes."""
        cell = self._cell(step)
        return None if cell is None else _if_of_step(step, first(cell.clone()))

    def write(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> int:
        """Overwrite the oldest difference with a new difference; returns the new difference's size in bytes, or 0 if
        there is no room.

        Args:
            header: values that JSON can represent; `step` is the step of the difference.
        """
        plan = CellPlan(header, tensors)
        cell = self.cell(header["step"], plan.nbytes)
        if cell is None:
            return 0
        plan.put(cell)
        return plan.nbytes

    def cell(self, step: int, nbytes: int) -> Tensor | None:
        """Return the cell of a step, with a size of at least `nbytes`; None if host memory has no room for the ring
        buffer. If larger cells require a new layout of the file, the differences in the file are lost."""
        fits = self._room is not None and nbytes <= self._size and self._count == self.cells
        if self.refused or (fits and self._leased):
            return self._cell(step)
        if not fits:
            self._size, self._count = -(-(nbytes + _SPARE) // _PAGE) * _PAGE, self.cells
        if reason := self.lease(_PAGE + self.cells * self._size):
            self.close(reason)
            return None
        self._leased = True
        if not fits:  # otherwise the file of an earlier process already has the right layout
            self._room = self.slot.room(f"{_KEY}-0", _PAGE + self.cells * self._size)
            self._room[:_PAGE] = 0
            for start in range(_PAGE, _PAGE + self.cells * self._size, self._size):
                self._room[start : start + _CELL.size] = 0
            described = _FILE.pack(MAGIC, 0, self.cells, self._size)
            described = _FILE.pack(MAGIC, crc32(described), self.cells, self._size)
            self._room[: len(described)] = torch.frombuffer(bytearray(described), dtype=torch.uint8)
        return self._cell(step)

    def _cell(self, step: int) -> Tensor | None:
        if self._room is None:
            return None
        start = _PAGE + step % self._count * self._size
        return self._room[start : start + self._size]

    def close(self, reason: str = "") -> None:
        """Remove the ring buffer's file. If `reason` is not empty, recording stops."""
        self._room, self.refused = None, reason
        self.slot.close()


def _layout(file: BinaryIO) -> tuple[int, int] | None:
    """Return (number of cells, size of a cell in bytes) of a ring buffer's file; None if the file is damaged."""
    head = file.read(_FILE.size)
    if len(head) < _FILE.size:
        return None
    magic, mark, cells, size = _FILE.unpack(head)
    described = _FILE.pack(magic, 0, cells, size)
    whole = magic == MAGIC and mark == crc32(described) and _PAGE + cells * size <= file.seek(0, 2) <= _MOST
    return (cells, size) if whole else None


def steps_kept(path: Path, history: History) -> set[int]:
    """Return the steps in a run's history for which a ring buffer's file holds an undamaged difference."""
    steps = set[int]()
    with suppress(OSError, LookupError, TypeError, ValueError), open_regular(path, private=True) as file:
        if (layout := _layout(file)) is not None:
            cells, size = layout
            data = mapped(file, _PAGE + cells * size)
            for start in range(_PAGE, len(data), size):
                if (difference := first(data[start : start + size])) is not None:
                    checkpoint = named(difference[0])
                    if checkpoint.run == history.run and history.holds(checkpoint):
                        steps.add(checkpoint.step)
    return steps


def named(header: Mapping[str, Any]) -> CheckpointId:
    """Return the identity that a checkpoint of the difference's step would have."""
    return CheckpointId(**{name: header[name] for name in ("step", "start", "uid", "ranks", "local", "run")})


def wholes(data: Tensor) -> Iterator[Tensor]:
    """Split bytes into the encoded differences that they consist of, up to the first damaged difference."""
    while len(data) >= _CELL.size:
        magic, mark, length, nbytes = _CELL.unpack(data[: _CELL.size].numpy().tobytes())
        body = data[_CELL.size : _CELL.size + nbytes]
        if magic != MAGIC or not 0 < length <= nbytes == len(body) or crc32(body.numpy().data) != mark:
            return
        end = -(-(_CELL.size + nbytes) // _ALIGNED) * _ALIGNED
        yield data[: _CELL.size + nbytes]
        data = data[end:]


def first(data: Tensor) -> Found | None:
    """Decode the difference at the beginning of some bytes; None if there is no difference or it is damaged."""
    whole = next(wholes(data), None)
    return None if whole is None else parsed(whole)


def _if_of_step(step: int, difference: Found | None) -> Found | None:
    """Return the difference if it belongs to the given step; None if it belongs to another step, which uses the same
    cell."""
    return difference if difference is not None and difference[0]["step"] == step else None


def joined(differences: Iterable[Tensor]) -> Tensor:
    """Concatenate encoded differences; `wholes` splits the result again."""
    return torch.cat([F.pad(difference, (0, -len(difference) % _ALIGNED)) for difference in differences])


def parsed(whole: Tensor) -> Found:
    """Decode a difference into its header and its tensors, which share memory with the bytes."""
    _, _, length, _ = _CELL.unpack(whole[: _CELL.size].numpy().tobytes())
    body = whole[_CELL.size :]
    header = json.loads(body[:length].numpy().tobytes())
    places = header.pop("places")
    return header, {
        name: body[start:stop].view(getattr(torch, dtype)).view(shape)
        for name, (start, stop, dtype, shape) in places.items()
    }
