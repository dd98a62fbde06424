"""The newest few differences of a rank, in its host's shared memory: cells of one size, each overwritten in turn.

A cell says by itself of which step it is, and has a checksum, so a process may end at any moment: what it was writing
is damaged, and all others are whole. No index, and nothing to delete.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring.checkpoint.format.checksum import crc32
from shoestring.checkpoint.tiers.slots import Slot
from shoestring.storage.guarded import open_regular

MAGIC = b"stepdiff"
_CELL = struct.Struct("<8sIIQ")  # magic, checksum of what follows, bytes of the header, bytes of all that follows
_FILE = struct.Struct("<8sIIQ")  # magic, checksum of the rest, number of cells, bytes of each
_PAGE = 4096
_SPARE = 64 << 10  # bytes by which a cell is larger than the first difference: states that grow a little
_KEY = "ring"
_ALIGNED = 64
Found = tuple[dict[str, Any], dict[str, Tensor]]
"""The header of a difference, and its tensors."""
_MOST = 1 << 44  # bytes of the largest file that is believed


class CellPlan:
    """Where the header and the tensors of a difference go in its bytes."""

    def __init__(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.tensors, self.places = tensors, dict[str, list[Any]]()
        end = 0
        for name, tensor in tensors.items():
            start = -(-end // _ALIGNED) * _ALIGNED
            end = start + tensor.nbytes
            self.places[name] = [start, end, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        # The header comes first, and says where tensors lie: it has room for larger numbers than it was measured with.
        length = len(json.dumps({**header, "places": self.places})) + 24 * len(self.places)
        self.first = -(-(_CELL.size + length) // _ALIGNED) * _ALIGNED - _CELL.size
        for place in self.places.values():
            place[:2] = place[0] + self.first, place[1] + self.first
        self.text = json.dumps({**header, "places": self.places}).encode().ljust(self.first)
        self.nbytes = _CELL.size + self.first + end

    def put(self, cell: Tensor) -> None:
        """Write it to the beginning of some bytes, and its mark last."""
        cell[: _CELL.size] = 0
        body = cell[_CELL.size : self.nbytes]
        body[: self.first] = torch.frombuffer(bytearray(self.text), dtype=torch.uint8)
        for name, tensor in self.tensors.items():
            start, stop, *_ = self.places[name]
            body[start:stop].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        mark = _CELL.pack(MAGIC, crc32(body.numpy().data), self.first, len(body))
        cell[: _CELL.size] = torch.frombuffer(bytearray(mark), dtype=torch.uint8)


class Ring:
    """Differences by their steps.

    Args:
        slot: names the file, and maps it; in memory of this process alone where the host's has no room.
        cells: number of differences to keep.
        lease: (bytes) -> why the host's memory has no room for so many; empty where it has.
    """

    def __init__(self, slot: Slot, cells: int, lease: Callable[[int], str]) -> None:
        self.slot, self.cells, self.lease = slot, cells, lease
        self.refused = ""
        """Why nothing is kept any more."""
        self._size, self._found = 0, cells  # bytes of a cell, and number of cells, as the file has them
        self._room: Tensor | None = None
        self._leased = False

    @property
    def path(self) -> Path:
        return self.slot.stem.with_name(f"{self.slot.stem.name}.{_KEY}")

    def open(self) -> bool:
        """Find what an earlier process of the run has left; whether there is anything.

        A number of cells that has changed since then counts once something is written.
        """
        try:
            with open_regular(self.path, private=True) as file:
                magic, mark, cells, size = _FILE.unpack(file.read(_FILE.size))
                length = file.seek(0, 2)
        except (OSError, struct.error):
            return False
        described = _FILE.pack(magic, 0, cells, size)
        if magic != MAGIC or mark != crc32(described) or not _PAGE + cells * size <= length <= _MOST:
            return False
        self._size, self._found = size, cells
        self._room = self.slot.room(f"{_KEY}-0", _PAGE + cells * size)
        return True

    def read(self, step: int) -> Found | None:
        """The header of a step's difference, and its tensors, in the ring's memory; None if it is not whole."""
        cell = self._cell(step)
        return None if cell is None else _of(step, first(cell))

    def copied(self, step: int) -> Found | None:
        """As `read`, but copied first, on a thread beside which the ring is written to."""
        cell = self._cell(step)
        return None if cell is None else _of(step, first(cell.clone()))

    def write(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> int:
        """Put a difference in the place of the oldest one; its bytes, 0 if there is no room.

        Args:
            header: JSON; its `step` is the difference's.
        """
        plan = CellPlan(header, tensors)
        cell = self.cell(header["step"], plan.nbytes)
        if cell is None:
            return 0
        plan.put(cell)
        return plan.nbytes

    def cell(self, step: int, nbytes: int) -> Tensor | None:
        """Where a step's difference of so many bytes, or fewer, goes; None if there is no room."""
        self._lay_out(nbytes)
        return self._cell(step)

    def _cell(self, step: int) -> Tensor | None:
        if self._room is None:
            return None
        start = _PAGE + step % self._found * self._size
        return self._room[start : start + self._size]

    def _lay_out(self, nbytes: int) -> None:
        """Make cells of at least so many bytes; what was in smaller ones, or in another number of them, is gone."""
        fits = self._room is not None and nbytes <= self._size and self._found == self.cells
        if self.refused or (fits and self._leased):
            return
        if not fits:
            self._size, self._found = -(-(nbytes + _SPARE) // _PAGE) * _PAGE, self.cells
        if reason := self.lease(_PAGE + self.cells * self._size):
            self.close(reason)
            return
        self._leased = True
        if fits:  # an earlier process has made it
            return
        self._room = self.slot.room(f"{_KEY}-0", _PAGE + self.cells * self._size)
        self._room[:_PAGE] = 0
        for step in range(self.cells):
            cell = self._cell(step)
            assert cell is not None
            cell[: _CELL.size] = 0
        described = _FILE.pack(MAGIC, 0, self.cells, self._size)
        described = _FILE.pack(MAGIC, crc32(described), self.cells, self._size)
        self._room[: len(described)] = torch.frombuffer(bytearray(described), dtype=torch.uint8)

    def close(self, reason: str = "") -> None:
        """Remove it; with a reason, nothing is kept from now on."""
        self._room, self.refused = None, reason
        self.slot.close()


def wholes(data: Tensor) -> Iterator[Tensor]:
    """The differences at the beginning of some bytes, one after the other, up to the first that is not whole."""
    while len(data) >= _CELL.size:
        magic, mark, length, nbytes = _CELL.unpack(data[: _CELL.size].numpy().tobytes())
        body = data[_CELL.size : _CELL.size + nbytes]
        if magic != MAGIC or not 0 < length <= nbytes == len(body) or crc32(body.numpy().data) != mark:
            return
        end = -(-(_CELL.size + nbytes) // _ALIGNED) * _ALIGNED
        yield data[: _CELL.size + nbytes]
        data = data[end:]


def first(data: Tensor) -> Found | None:
    """The difference at the beginning of some bytes, if it is whole."""
    whole = next(wholes(data), None)
    return None if whole is None else parsed(whole)


def _of(step: int, found: Found | None) -> Found | None:
    """What was found, if it is of that step."""
    return found if found is not None and found[0]["step"] == step else None


def joined(differences: Iterable[Tensor]) -> Tensor:
    """Differences one after the other, as `wholes` takes them apart."""
    return torch.cat([F.pad(each, (0, -len(each) % _ALIGNED)) for each in differences])


def parsed(whole: Tensor) -> Found:
    """The header of a difference, and its tensors, which share its memory."""
    _, _, length, _ = _CELL.unpack(whole[: _CELL.size].numpy().tobytes())
    body = whole[_CELL.size :]
    header = json.loads(body[:length].numpy().tobytes())
    places = header.pop("places")
    return header, {
        name: body[start:stop].view(getattr(torch, dtype)).view(shape)
        for name, (start, stop, dtype, shape) in places.items()
    }
