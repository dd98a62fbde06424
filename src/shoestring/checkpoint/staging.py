"""Copying a job's state into a slot: at once what the next pass may change, and beside that pass what it does not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shoestring.checkpoint.layout import KINDS, PRIVATE, Leaf, divided, leaf_of
from shoestring.checkpoint.part import Draft, piece_view
from shoestring.checkpoint.slots import Slot
from shoestring.checkpoint.tree import encode
from shoestring.core._torch import foreach_copy_
from shoestring.core.job import Kept
from shoestring.core.trace import span
from shoestring.core.world import World

BATCH = 16 << 20  # bytes that are copied between two looks at whether to hurry
Pairs = list[tuple[Tensor, Tensor]]  # (where to, what)


@dataclass(frozen=True)
class Content:
    """What this rank saves of a job's state: the pieces, and what puts them together again."""

    leaves: list[Leaf]
    about: dict[str, Any]


def content(kept: Mapping[str, Kept], world: World) -> Content:
    """The state of everything kept, as it is: nothing is copied.

    Tensors that are a rank's own are named after it; a DTensor's, which several ranks make up, after the first of them.
    """
    everyone = tuple(range(world.size))
    leaves: list[Leaf] = []
    homes: dict[str, int] = {}
    trees: dict[str, dict[str, Any]] = {"shared": {}, "own": {}}
    for name, each in kept.items():
        found: dict[str, Tensor] = {}
        own = each.across == "own"
        trees["own" if own else "shared"][name] = encode(each.state.state_dict(), name, found)
        for path, tensor in found.items():
            leaf = leaf_of(path, tensor, (world.rank,) if own else everyone)
            if own:
                homes[path] = home(tensor, world.rank)
                leaf = replace(leaf, name=f"{homes[path]}:{path}")
            leaves.append(leaf)
    return Content(leaves, {"trees": trees, "homes": homes})


def home(tensor: Tensor, rank: int) -> int:
    """The rank that an own tensor is named after."""
    return int(tensor.device_mesh.mesh.min()) if isinstance(tensor, DTensor) else rank


@dataclass(eq=False)
class Stager:
    """Fills slots. One at a time: `start`, then `finish` before what it copies is changed."""

    world: World
    stable: Callable[[], set[int]]
    """The addresses of tensors that do not change before the next optimizer step."""
    overlap: bool
    pace: float = 0.0
    """Seconds that a copy beside training should take; it hurries once somebody waits."""
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "checkpoint-copy"))
    _copying: Future[None] | None = None
    _hurry: threading.Event = field(default_factory=threading.Event)
    _pinned: dict[int, Tensor] = field(default_factory=dict)
    _stream: Any = None
    _event: Any = None

    def drafts(self, kept: Mapping[str, Kept], about: Mapping[str, Any]) -> dict[str, Draft]:
        """The parts that everything kept makes, by their names.

        Raises:
            CheckpointError: something kept cannot be saved.
        """
        found, rank = content(kept, self.world), self.world.rank
        pieces = divided(found.leaves, rank, self.world.local_size)
        extra = {PRIVATE: found.about}
        return {
            f"{kind}-{rank}": Draft.of(pieces[kind], {**about, **extra.get(kind, {})})
            for kind in KINDS
            if pieces[kind] or kind == PRIVATE
        }

    def start(self, drafts: Mapping[str, Draft], slot: Slot) -> None:
        """Begin to fill a slot."""
        slot.begin()
        now, later = self._pairs(drafts, slot)
        self._copy(now)
        self._hurry.clear()
        if later:
            self._later(later, sum(target.nbytes for target, _ in later))

    def finish(self) -> None:
        """Wait until nothing is copied any more; on a GPU, make its next work wait."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
            self._event = None
        elif self._copying is not None:
            self._hurry.set()
            self._copying.result()
            self._copying = None

    def then(self, work: Callable[[], None]) -> Future[None]:
        """Do some work once the slot is full, on the copying thread."""
        return self._pool.submit(work)

    def close(self) -> None:
        self._hurry.set()
        self._pool.shutdown()
        self.unpin()

    def unpin(self) -> None:
        """Let go of the memory of slots; for when nothing is on its way to them."""
        for room in self._pinned.values():
            _cudart().cudaHostUnregister(room.data_ptr())
        self._pinned.clear()

    def _pairs(self, drafts: Mapping[str, Draft], slot: Slot) -> tuple[Pairs, Pairs]:
        """What to copy at once, and what beside the next pass; headers are written right away."""
        stable = self.stable() if self.overlap else set()
        now: Pairs = []
        later: Pairs = []
        for name, draft in drafts.items():
            room = slot.room(name, draft.nbytes)
            room[: len(draft.header)] = torch.frombuffer(bytearray(draft.header), dtype=torch.uint8)
            for leaf, start in draft.pieces:
                whole = leaf.data.untyped_storage().data_ptr() in stable
                (later if whole else now).append((piece_view(room, start, leaf), leaf.data))
        return now, later

    def _copy(self, pairs: Pairs) -> None:
        if pairs:
            with torch.no_grad():
                foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])

    def _later(self, pairs: Pairs, nbytes: int) -> None:
        if self.world.device.type == "cuda":
            self._from_gpu(pairs, nbytes)
        else:
            self._copying = self._pool.submit(self._in_turn, _batches(pairs), nbytes)

    def _in_turn(self, batches: Sequence[Pairs], nbytes: int) -> None:
        with span("stage", "copy", nbytes):
            for batch in batches:
                began = time.perf_counter()
                self._copy(batch)
                spent = time.perf_counter() - began
                self._hurry.wait(max(0.0, min(self.pace / len(batches) - spent, 1.0)))

    def _from_gpu(self, pairs: Pairs, nbytes: int) -> None:
        """On a side stream, into memory pinned to its exact size: torch's own pinning rounds up to powers of 2."""
        self._stream = self._stream or torch.cuda.Stream()
        for target, _ in pairs:
            self._pin(target)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), torch.no_grad():
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            self._event = self._stream.record_event()
        done = self._event

        def landed() -> None:
            with span("stage", "copy", nbytes):
                done.synchronize()

        self._pool.submit(landed)

    def _pin(self, view: Tensor) -> None:
        room = view.untyped_storage()
        if room.data_ptr() not in self._pinned:
            whole = torch.empty(0, dtype=torch.uint8).set_(room)
            failed = _cudart().cudaHostRegister(room.data_ptr(), room.nbytes(), 0)
            if int(failed) == 0:
                self._pinned[room.data_ptr()] = whole


def _cudart() -> Any:
    """CUDA's runtime, which torch loads when a GPU is first used."""
    return torch.cuda.cudart()


def _batches(pairs: Pairs) -> list[Pairs]:
    """In groups of about BATCH bytes."""
    found: list[Pairs] = []
    room = 0
    for target, source in pairs:
        if room <= 0:
            found.append([])
            room = BATCH
        found[-1].append((target, source))
        room -= target.nbytes
    return found
