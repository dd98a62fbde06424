"""Copying a job's state into a slot: at once what the next pass may change, and beside that pass what it does not."""

from __future__ import annotations

import gc
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from operator import is_
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoestring._torch import foreach_copy_, own_name
from shoestring.checkpoint.format.layout import KINDS, PRIVATE, Leaf, divided, leaf_of
from shoestring.checkpoint.format.part import Draft, Form, aligned
from shoestring.checkpoint.format.tree import encode, root, step
from shoestring.checkpoint.tiers.gpu_copies import copy_from_gpu
from shoestring.checkpoint.tiers.slots import Slot
from shoestring.checkpoint.tiers.waits import BackgroundThread, result_of
from shoestring.core.job import Kept
from shoestring.core.kept import ModelState
from shoestring.core.leases import Priority
from shoestring.core.trace import span
from shoestring.core.world import World

T = TypeVar("T")
BATCH = 16 << 20  # bytes that are copied between two looks at whether to hurry
PATIENCE = 0.05  # seconds that a batch waits for what is copied for training


@dataclass
class Copies:
    """What is to be copied, and to where."""

    targets: list[Tensor] = field(default_factory=list)
    sources: list[Tensor] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(target.nbytes for target in self.targets)

    def do(self) -> None:
        """Copy, and wait for it."""
        if self.targets:
            with torch.no_grad():
                foreach_copy_(self.targets, self.sources)

    def batches(self, nbytes: int) -> Iterator[Copies]:
        """In groups of about so many bytes."""
        first = size = 0
        for index, target in enumerate(self.targets, 1):
            size += target.nbytes
            if size >= nbytes or index == len(self.targets):
                yield Copies(self.targets[first:index], self.sources[first:index])
                first, size = index, 0


class CopyOrder:
    """Where in a slot everything goes, and when: the same for its next checkpoint as long as what is copied beside the
    next pass lies where it lay.

    Args:
        places: where the sources go, a list for each part.
        stable: the addresses of storages that may be copied beside the next pass.
    """

    def __init__(self, places: Sequence[Sequence[Tensor]], sources: Sequence[Tensor], stable: Collection[int]) -> None:
        self._places, targets = places, [target for each in places for target in each]
        beside = [source.untyped_storage().data_ptr() in stable for source in sources]
        self._now, self._later = (
            [index for index, each in enumerate(beside) if each is when] for when in (False, True)
        )
        self._to_now, self._to_later = ([targets[index] for index in indices] for indices in (self._now, self._later))
        self._addresses = [sources[index].data_ptr() for index in self._later]

    def holds(self, places: Sequence[Sequence[Tensor]], sources: Sequence[Tensor]) -> bool:
        """For sources of the same names and shapes, as those of the same places are."""
        return (
            len(places) == len(self._places)
            and all(map(is_, places, self._places))
            and [sources[index].data_ptr() for index in self._later] == self._addresses
        )

    def copies(self, sources: Sequence[Tensor]) -> tuple[Copies, Copies]:
        """At once, and beside the next pass."""
        now, later = ([sources[index] for index in indices] for indices in (self._now, self._later))
        return Copies(self._to_now, now), Copies(self._to_later, later)


class Content:
    """The state of everything kept, as it is: nothing is copied.

    Raises:
        CheckpointError: something kept cannot be saved.
    """

    def __init__(self, kept: Mapping[str, Kept]) -> None:
        self.trees: dict[str, dict[str, Any]] = {"shared": {}, "own": {}}
        self.tensors: list[Tensor] = []
        self.kept = kept
        self.outline: list[tuple[Any, ...]] = []
        """Of each tensor: whether it is this rank's own, its path, and all of its form and place but the values."""
        for name, of in kept.items():
            found: dict[str, Tensor] = {}
            own = of.across == "own"
            self.trees["own" if own else "shared"][name] = encode(of.state.state_dict(), root(name), found)
            self.tensors += found.values()
            self.outline += [
                (own, path, each.dtype, each.shape, each.device_mesh, each.placements)
                if isinstance(each, DTensor)
                else (own, path, each.dtype, each.shape)
                for path, each in found.items()
            ]


class Frame:
    """What the parts of this rank look like: the same from one checkpoint to the next as long as the content's outline
    is."""

    def __init__(self, content: Content, world: World) -> None:
        self.outline = content.outline
        self._buffers = {
            f"{root(name)}/{step(each)}" for name, kept in content.kept.items() for each in buffer_names(kept.state)
        }
        self.homes: dict[str, int] = {}
        """The ranks that own tensors are named after; of a DTensor, which several ranks make up, the first of them."""
        leaves = [
            self._leaf(each[0], each[1], tensor, world)
            for each, tensor in zip(self.outline, content.tensors, strict=True)
        ]
        whole = {leaf.name: (index, leaf) for index, leaf in enumerate(leaves)}
        pieces = divided(leaves, world.rank, world.local_size)
        ordered = {kind: aligned(pieces[kind]) for kind in KINDS if pieces[kind] or kind == PRIVATE}
        self.forms = {kind: Form.of(each) for kind, each in ordered.items()}
        self._cuts = {kind: [_cut(piece, *whole[piece.name]) for piece in each] for kind, each in ordered.items()}
        self._rank, self._headers = world.rank, dict.fromkeys(ordered, 0)

    def _leaf(self, own: bool, path: str, tensor: Tensor, world: World) -> Leaf:
        apart = own or (path in self._buffers and not isinstance(tensor, DTensor))
        leaf = leaf_of(path, tensor, (world.rank,) if apart else range(world.size))
        if not own:
            return replace(leaf, name=apart_name(path, world.rank)) if apart else leaf
        self.homes[path] = home(tensor, world.rank)
        return replace(leaf, name=f"{self.homes[path]}:{path}")

    def drafts(self, content: Content, about: Mapping[str, Any]) -> dict[str, Draft]:
        """The parts of content with this outline, by their names."""
        with torch.no_grad():
            data = [each.to_local() if isinstance(each, DTensor) else each for each in content.tensors]
            drafts = {}
            for kind, form in self.forms.items():
                extra = {"trees": content.trees, "homes": self.homes} if kind == PRIVATE else {}
                header = form.header({**about, **extra}, self._headers[kind])
                self._headers[kind] = len(header)
                sources = [data[index] if rows is None else data[index][rows] for index, rows in self._cuts[kind]]
                drafts[f"{kind}-{self._rank}"] = Draft(form, header, sources)
        return drafts


def _cut(piece: Leaf, index: int, whole: Leaf) -> tuple[int, slice | None]:
    """Of which tensor a piece is, and which of its rows; None where it is all of them."""
    if piece is whole:
        return index, None
    first = piece.box.offset[0] - whole.box.offset[0]
    return index, slice(first, first + piece.row_count)


def buffer_names(state: object) -> list[str]:
    """The names of a module's buffers in its state: replicas do not keep them equal (BatchNorm's statistics)."""
    if isinstance(state, ModelState):  # which names them whatever wraps the model
        return [own_name(state.model, name) for name in _buffers(state.model)]
    return list(_buffers(state)) if isinstance(state, nn.Module) else []


def _buffers(model: nn.Module) -> Iterator[str]:
    yield from (name for name, _ in model.named_buffers(remove_duplicate=False))


def apart_name(path: str, rank: int) -> str:
    """What a tensor is saved as that each rank has its own of, in a state that is otherwise the same on all of them.

    The first rank's has the plain name: it is what other numbers of ranks resume from, and what is exported.
    """
    return f"{rank}:{path}" if rank else path


def home(tensor: Tensor, rank: int) -> int:
    """The rank that an own tensor is named after."""
    return int(tensor.device_mesh.mesh.min()) if isinstance(tensor, DTensor) else rank


@dataclass(eq=False)
class Stager:
    """Fills slots. One at a time: `start`, then `finish` before what it copies is changed.

    One thread copies; another one does what follows a copy, for which the next copy need not wait.
    """

    world: World
    stable: Callable[[], set[int]]
    """The addresses of tensors that do not change before the next optimizer step."""
    overlap: bool
    _frame: Frame | None = None
    _began: float = 0.0
    _times: deque[float] = field(default_factory=lambda: deque(maxlen=4))
    """Seconds from the start of each of the newest copies to where its end was waited for."""
    _copier: BackgroundThread = field(default_factory=lambda: BackgroundThread("checkpoint-copy"))
    _follower: BackgroundThread = field(default_factory=lambda: BackgroundThread("checkpoint-seal"))
    _copying: Future[None] | None = None
    """Until the training thread may continue; on a GPU, once the copies are issued."""
    _copied: Future[None] | None = None
    """Until the newest slot is full."""
    nbytes: int = 0
    """Of the newest copy."""
    _hurry: threading.Event = field(default_factory=threading.Event)
    _pinned: dict[int, Tensor | None] = field(default_factory=dict)
    """By address, memory of slots; None where it cannot be pinned."""
    _stream: Any = None
    _reading: Any = None
    """The stream of what follows a copy."""
    _event: Any = None
    _waits: deque[tuple[Any, Any]] = field(default_factory=deque)
    """Events before and after each of the GPU's newest waits for copies."""

    def drafts(self, kept: Mapping[str, Kept], about: Mapping[str, Any]) -> dict[str, Draft]:
        """The parts that everything kept makes, by their names.

        Raises:
            CheckpointError: something kept cannot be saved.
        """
        with _no_collecting():
            content = Content(kept)
            if self._frame is None or self._frame.outline != content.outline:
                self._frame = Frame(content, self.world)
            made = self._frame.drafts(content, about)
            del content  # or it would be among what has survived a collection, which makes the next one thorough
        return made

    def start(self, drafts: Mapping[str, Draft], slot: Slot) -> None:
        """Begin to fill a slot: at once with what the next pass may change, and beside it with the rest."""
        self._began = time.perf_counter()
        slot.begin()
        places = [slot.begin_part(name, draft) for name, draft in drafts.items()]
        sources = [source for draft in drafts.values() for source in draft.sources]
        if not (isinstance(slot.order, CopyOrder) and slot.order.holds(places, sources)):
            slot.order = CopyOrder(places, sources, self.stable() if self.overlap else ())
        now, later = slot.order.copies(sources)
        self.nbytes = now.nbytes + later.nbytes
        now.do()
        self._hurry.clear()
        self._copied = None
        if later.targets and self.world.device.type == "cuda":
            self._from_gpu(later, slot)
        elif later.targets:
            pace = min(self._times, default=0.0) / 2
            self._copying = self._copied = self._copier.submit(self._in_turn, later, pace)

    def finish(self) -> None:
        """Wait until nothing is copied any more; on a GPU, make its next work wait."""
        if self._copying is not None:
            self._times.append(time.perf_counter() - self._began)
            self._hurry.set()
            result_of(self._copying, "copying state to this host's memory", self.nbytes)
            self._copying = None
        if self._event is not None:
            training, before, after = torch.cuda.current_stream(), _mark(), _mark()
            training.record_event(before)
            training.wait_event(self._event)
            training.record_event(after)
            self._waits.append((before, after))
            self._event = None

    def waited(self) -> float:
        """Seconds for which the GPU has waited for copies, as far as it is over and was not told before."""
        seconds = 0.0
        while self._waits and self._waits[0][1].query():
            before, after = self._waits.popleft()
            seconds += before.elapsed_time(after) / 1e3
        return seconds

    def then(self, work: Callable[[], T]) -> Future[T]:
        """Do some work once the slot is full, beside the next copy; on a GPU, on a stream of its own."""
        copied, nbytes = self._copied, self.nbytes

        def following() -> T:
            if copied is not None:
                result_of(copied, "copying state to this host's memory", nbytes)
            with torch.cuda.stream(self._reading):
                return work()

        return self._follower.submit(following)

    def close(self) -> None:
        self._hurry.set()
        self._copier.stop("copying state to this host's memory", self.nbytes)
        self._follower.stop("sealing a checkpoint in this host's memory", self.nbytes)
        self.unpin()

    def unpin(self) -> None:
        """Let go of the memory of slots; for when nothing is on its way to them."""
        for address, room in self._pinned.items():
            if room is not None:
                _cudart().cudaHostUnregister(address)
        self._pinned.clear()

    def _in_turn(self, copies: Copies, pace: float) -> None:
        """At a bounded rate: in batches spread over `pace` seconds, half of what there was, until somebody waits."""
        with span("stage", "copy", copies.nbytes):
            batches = list(copies.batches(BATCH))
            for number, batch in enumerate(batches):
                self._hurry.wait(max(0.0, self._began + pace * number / len(batches) - time.perf_counter()))
                with self.world.memory.turn(Priority.CHECKPOINT, 0.0 if self._hurry.is_set() else PATIENCE):
                    batch.do()

    def _from_gpu(self, copies: Copies, slot: Slot) -> None:
        """On a side stream, into memory pinned to its exact size: torch's own pinning rounds up to powers of 2."""
        if self._stream is None:
            self._stream, self._reading = torch.cuda.Stream(), torch.cuda.Stream()
        for room in slot.parts(KINDS).values():
            self._pin(room)
        stepped = torch.cuda.current_stream().record_event()

        def issue() -> None:  # of thousands of copies: not on the training thread
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(stepped)
                copy_from_gpu(copies.targets, copies.sources, self._stream)
                self._event = self._stream.record_event()

        def landed() -> None:
            with span("stage", "copy", copies.nbytes):
                self._stream.synchronize()

        self._copying = self._copier.submit(issue)
        self._copied = self._copier.submit(landed)

    def _pin(self, view: Tensor) -> None:
        room = view.untyped_storage()
        if room.data_ptr() in self._pinned:
            return
        if not int(_cudart().cudaHostRegister(room.data_ptr(), room.nbytes(), 0)):
            self._pinned[room.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(room)
            return
        self._pinned[room.data_ptr()] = None  # a file on a disk, say: copies to it are slower
        with suppress(RuntimeError):  # which otherwise some later kernel would raise
            torch.ones(1, device=self.world.device)


@contextmanager
def _no_collecting() -> Iterator[None]:
    """Thousands of small objects are made and soon gone: enough to have garbage looked for, which takes 0.1 s."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _mark() -> Any:
    return torch.cuda.Event(enable_timing=True)


def _cudart() -> Any:
    """CUDA's runtime, which torch loads when a GPU is first used."""
    return torch.cuda.cudart()
