"""Copies a job's state into a slot.

Weights and optimizer state are copied during the next forward and backward pass ("the next pass"), which does not
change them. All other tensors are copied immediately.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from operator import is_
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shoestring._torch import foreach_copy_, own_name
from shoestring.checkpoint.format.layout import KINDS, PRIVATE, Leaf, divided, leaves_of, order_at, whole
from shoestring.checkpoint.format.part import Draft, Form, aligned
from shoestring.checkpoint.format.tree import encode, root, step
from shoestring.checkpoint.tiers.gpu_copies import copy_from_gpu
from shoestring.checkpoint.tiers.slots import Slot
from shoestring.checkpoint.tiers.waits import BackgroundThread, result_of
from shoestring.core.attachments import Kept
from shoestring.core.kept import ModelState, OptimizerState
from shoestring.core.leases import Priority
from shoestring.core.shard_order import ShardOrder
from shoestring.core.trace import span
from shoestring.core.world import World
from shoestring.sharded import is_sharded, local_part

T = TypeVar("T")
BATCH = 16 << 20  # bytes to copy between checks whether training waits for the copy
PATIENCE = 0.05  # maximum seconds that a batch waits for more urgent copies


@dataclass
class Copies:
    """Pending copies: each source tensor is copied to the target at the same index."""

    targets: list[Tensor] = field(default_factory=list)
    sources: list[Tensor] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(target.nbytes for target in self.targets)

    def do(self) -> None:
        """Do all copies, and wait until they are complete."""
        if self.targets:
            with torch.no_grad():
                foreach_copy_(self.targets, self.sources)

    def batches(self, nbytes: int) -> Iterator[Copies]:
        """Split the copies into groups of about `nbytes` bytes."""
        first = size = 0
        for index, target in enumerate(self.targets, 1):
            size += target.nbytes
            if size >= nbytes or index == len(self.targets):
                yield Copies(self.targets[first:index], self.sources[first:index])
                first, size = index, 0


class CopyOrder:
    """The targets of all source tensors in a slot, and which sources are copied immediately.

    The order is reused for the slot's next checkpoint, unless a source that is copied during the next pass has moved to
    another address.

    Args:
        places: targets of the sources, as one list for each part.
        stable: addresses of storages that do not change during the next pass, so that they can be copied during that
            pass.
    """

    def __init__(self, places: Sequence[Sequence[Tensor]], sources: Sequence[Tensor], stable: Collection[int]) -> None:
        self._places, targets = places, [target for part in places for target in part]
        is_stable = [source.untyped_storage().data_ptr() in stable for source in sources]
        self._now = [index for index, later in enumerate(is_stable) if not later]
        self._later = [index for index, later in enumerate(is_stable) if later]
        self._to_now, self._to_later = ([targets[index] for index in indices] for indices in (self._now, self._later))
        self._addresses = [sources[index].data_ptr() for index in self._later]

    def holds(self, places: Sequence[Sequence[Tensor]], sources: Sequence[Tensor]) -> bool:
        """Whether this order is still valid for these targets and sources.

        If the lists of targets are the same objects, then names and shapes of the sources have not changed either.
        """
        return (
            len(places) == len(self._places)
            and all(map(is_, places, self._places))
            and [sources[index].data_ptr() for index in self._later] == self._addresses
        )

    def copies(self, sources: Sequence[Tensor]) -> tuple[Copies, Copies]:
        """Return the copies to do immediately, and the copies to do during the next pass."""
        now, later = ([sources[index] for index in indices] for indices in (self._now, self._later))
        return Copies(self._to_now, now), Copies(self._to_later, later)


class Content:
    """The trees and tensors of all states of a job; no tensor is copied.

    Raises:
        CheckpointError: a state cannot be saved.
    """

    def __init__(self, states: Mapping[str, Kept]) -> None:
        self.trees: dict[str, dict[str, Any]] = {"shared": {}, "own": {}}
        self.tensors: list[Tensor] = []
        self.kept = states
        self.trainers: dict[str, tuple[int, ...]] = {}
        """Maps the path of a tensor, or of the mapping that contains it, to the ranks that train the tensor; only for
        tensors that not all ranks train."""
        self.orders: dict[str, ShardOrder] = {}
        """Maps a parameter's name, escaped as a step of a path, to the shard order of its DTensors; only for parameters
        with an unusual order."""
        self.outline: list[tuple[Any, ...]] = []
        """For each tensor: whether the tensor belongs to an "own" state, its path, data type and shape, and, for a
        DTensor, its mesh and placement.
        """
        for name, entry in states.items():
            leaves: dict[str, Tensor] = {}
            own = entry.across == "own"
            self.trainers |= holders_of(name, entry.state)
            self.orders |= orders_of(entry.state)
            self.trees["own" if own else "shared"][name] = encode(entry.state.state_dict(), root(name), leaves)
            self.tensors += leaves.values()
            self.outline += [
                (own, path, leaf.dtype, leaf.shape, leaf.device_mesh, leaf.placements)
                if is_sharded(leaf)
                else (own, path, leaf.dtype, leaf.shape)
                for path, leaf in leaves.items()
            ]


class Frame:
    """Layout of this rank's parts; reused for the next checkpoint if the outline of the content is the same."""

    def __init__(self, content: Content, world: World) -> None:
        self.outline = content.outline
        self._buffers = {
            f"{root(name)}/{step(buffer)}"
            for name, entry in content.kept.items()
            for buffer in buffer_names(entry.state)
        }
        self.homes: dict[str, int] = {}
        """Maps the path of a tensor in an "own" state to the rank in the tensor's name; for a DTensor, this is the
        first rank of its mesh."""
        leaves, indices = list[Leaf](), dict[str, int]()
        for index, ((own, path, *_), tensor) in enumerate(zip(self.outline, content.tensors, strict=True)):
            holders = content.trainers.get(path) or content.trainers.get(path.rpartition("/")[0]) or range(world.size)
            order = order_at(path, tensor, content.orders)
            apart = own or (path in self._buffers and not is_sharded(tensor))
            name = apart_name(path, world.rank) if apart else path
            if own:
                self.homes[path] = home(tensor, world.rank)
                name = f"{self.homes[path]}:{path}"
            of_tensor = leaves_of(name, tensor, (world.rank,) if apart else holders, order)
            leaves += of_tensor
            indices[of_tensor[0].name] = index
        pieces = divided(leaves, world.rank, world.local_size)
        ordered = {kind: aligned(pieces[kind]) for kind in KINDS if pieces[kind] or kind == PRIVATE}
        self.forms = {kind: Form.of(part) for kind, part in ordered.items()}
        self._cuts = {kind: [(indices[piece.name], piece.place) for piece in part] for kind, part in ordered.items()}
        self._rank, self._headers = world.rank, dict.fromkeys(ordered, 0)

    def drafts(self, content: Content, about: Mapping[str, Any]) -> dict[str, Draft]:
        """Return the drafts of this rank's parts, by name, for content with this outline."""
        with torch.no_grad():
            data = [local_part(tensor) for tensor in content.tensors]
            drafts = {}
            for kind, form in self.forms.items():
                extra = {"trees": content.trees, "homes": self.homes} if kind == PRIVATE else {}
                header = form.header({**about, **extra}, self._headers[kind])
                self._headers[kind] = len(header)
                sources = [
                    data[index] if place is None else data[index][place.inside(whole(data[index].shape))]
                    for index, place in self._cuts[kind]
                ]
                drafts[f"{kind}-{self._rank}"] = Draft(form, header, sources)
        return drafts


def orders_of(state: object) -> dict[str, ShardOrder]:
    """Map each parameter's name, escaped as a step of a path, to the shard order of its DTensors in all states."""
    return {step(name): order for name, order in state.orders.items()} if isinstance(state, ModelState) else {}


def holders_of(name: str, state: object) -> dict[str, tuple[int, ...]]:
    """Map the path of a parameter, or of the mapping with its optimizer state, to the ranks that have it; only for
    parameters that not all ranks have."""
    match state:
        case ModelState():
            return {f"{root(name)}/{step(parameter)}": ranks for parameter, ranks in state.holders.items()}
        case OptimizerState():
            return {f"{root(name)}/state/{step(parameter)}": ranks for parameter, ranks in state.trainers.items()}
    return {}


def buffer_names(state: object) -> list[str]:
    """Return the names of a module's buffers in its state. Buffers, such as the statistics of batch norms, may differ
    between replicas."""
    if isinstance(state, ModelState):  # names in this state do not depend on wrappers of the model
        return [own_name(state.model, name) for name in _buffers(state.model)]
    return list(_buffers(state)) if isinstance(state, nn.Module) else []


def _buffers(model: nn.Module) -> Iterator[str]:
    yield from (name for name, _ in model.named_buffers(remove_duplicate=False))


def apart_name(path: str, rank: int) -> str:
    """Return the name of a rank's version of a tensor that may differ between ranks, although its state is otherwise
    equal on all ranks. The first rank's version has the plain name, because this version is exported, and is used if
    the number of ranks has changed.
    """
    return f"{rank}:{path}" if rank else path


def home(tensor: Tensor, rank: int) -> int:
    """Return the rank that is part of the name of a tensor in an "own" state."""
    return int(tensor.device_mesh.mesh.min()) if is_sharded(tensor) else rank


@dataclass(eq=False)
class Stager:
    """Fills one slot at a time: `start` begins the copy, and `finish` waits for it before training changes a tensor.

    One thread copies. A second thread does the work that follows a copy, so that the next copy need not wait for this
    work.
    """

    world: World
    stable: Callable[[], set[int]]
    """Returns the storage addresses of tensors that stay unchanged until the next optimizer step."""
    overlap: bool
    """Whether to copy unchanged tensors during the next pass instead of immediately."""
    _frame: Frame | None = None
    _began: float = 0.0
    _times: deque[float] = field(default_factory=lambda: deque(maxlen=4))
    """Seconds from the start of each of the newest copies until the training thread waited for the copy."""
    _copier: BackgroundThread = field(default_factory=lambda: BackgroundThread("checkpoint-copy"))
    _follower: BackgroundThread = field(default_factory=lambda: BackgroundThread("checkpoint-seal"))
    _copying: Future[None] | None = None
    """Resolved when training may change the tensors; on a GPU, as soon as the copies are issued."""
    _copied: Future[None] | None = None
    """Resolved when all data is in the newest slot."""
    nbytes: int = 0
    """Size of the newest copy in bytes."""
    _hurry: threading.Event = field(default_factory=threading.Event)
    """Set when the training thread waits for the copy."""
    _pinned: dict[int, Tensor | None] = field(default_factory=dict)
    """Maps the address of a slot's memory to the pinned memory, or to None if the memory cannot be pinned."""
    _stream: Any = None
    """CUDA stream for copies."""
    _reading: Any = None
    """CUDA stream for the work that follows a copy."""
    _event: Any = None
    """CUDA event after the newest copies; None once the training stream has been told to wait for the event."""
    _waits: deque[tuple[Any, Any]] = field(default_factory=deque)
    """CUDA events before and after each of the newest waits of the training stream for copies."""

    def drafts(self, states: Mapping[str, Kept], about: Mapping[str, Any]) -> dict[str, Draft]:
        """Return the drafts of this rank's parts of a checkpoint, by name.

        Args:
            about: metadata for the headers of the parts.

        Raises:
            CheckpointError: a state cannot be saved.
        """
        enabled = gc.isenabled()
        gc.disable()  # a collection takes 0.1 s, and the thousands of short-lived objects made here would trigger some
        try:
            content = Content(states)
            if self._frame is None or self._frame.outline != content.outline:
                self._frame = Frame(content, self.world)
            drafts = self._frame.drafts(content, about)
            # Free these objects before garbage collection is enabled again. Objects that survive a garbage collection
            # move to an older generation, which makes a full collection happen sooner.
            del content
        finally:
            if enabled:
                gc.enable()
        return drafts

    def start(self, drafts: Mapping[str, Draft], slot: Slot) -> None:
        """Start to fill a slot: copy some tensors immediately, and let a thread copy the other tensors during the next
        pass."""
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
            pace = min(self._times, default=0.0) / 2  # half of the shortest recent time until training waited
            self._copying = self._copied = self._copier.submit(self._in_turn, later, pace)

    def finish(self) -> None:
        """Wait until all data is copied; on a GPU, only make the training stream wait for the copies, and not this
        thread."""
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
        """Return the seconds for which the GPU has waited for copies, summed over the waits that have ended since the
        last call."""
        seconds = 0.0
        while self._waits and self._waits[0][1].query():
            before, after = self._waits.popleft()
            seconds += before.elapsed_time(after) / 1e3
        return seconds

    def then(self, work: Callable[[], T]) -> Future[T]:
        """Call `work` on the second thread once all data is in the slot; on a GPU, `work` runs on a separate CUDA
        stream."""
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
        """Unpin the memory of slots; no copy may be running."""
        for address, room in self._pinned.items():
            if room is not None:
                _cudart().cudaHostUnregister(address)
        self._pinned.clear()

    def _in_turn(self, copies: Copies, pace: float) -> None:
        """Copy in batches that are spread over `pace` seconds, to leave memory bandwidth to training.

        Once the training thread waits for the copy, there are no more pauses.
        """
        with span("stage", "copy", copies.nbytes):
            batches = list(copies.batches(BATCH))
            for number, batch in enumerate(batches):
                self._hurry.wait(max(0.0, self._began + pace * number / len(batches) - time.perf_counter()))
                with self.world.memory.turn(Priority.CHECKPOINT, 0.0 if self._hurry.is_set() else PATIENCE):
                    batch.do()

    def _from_gpu(self, copies: Copies, slot: Slot) -> None:
        """Copy on a separate CUDA stream, into pinned memory of the slot.

        The memory is pinned here and not by torch, because torch rounds sizes up to a power of 2.
        """
        if self._stream is None:
            self._stream, self._reading = torch.cuda.Stream(), torch.cuda.Stream()
        for view in slot.parts(KINDS).values():
            room = view.untyped_storage()
            if room.data_ptr() in self._pinned:
                continue
            if not int(_cudart().cudaHostRegister(room.data_ptr(), room.nbytes(), 0)):
                self._pinned[room.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(room)
                continue
            self._pinned[room.data_ptr()] = None  # for example, a file on a disk; copies to it are slower
            with suppress(RuntimeError):  # clears the CUDA error, which a later kernel would otherwise raise
                torch.ones(1, device=self.world.device)
        stepped = torch.cuda.current_stream().record_event()

        def issue() -> None:  # not on the training thread, because there may be thousands of copies
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(stepped)
                copy_from_gpu(copies.targets, copies.sources, self._stream)
                self._event = self._stream.record_event()

        def landed() -> None:
            with span("stage", "copy", copies.nbytes):
                self._stream.synchronize()

        self._copying = self._copier.submit(issue)
        self._copied = self._copier.submit(landed)


def _mark() -> Any:
    return torch.cuda.Event(enable_timing=True)


def _cudart() -> Any:
    """Return the CUDA runtime, which torch loads when a GPU is first used."""
    return torch.cuda.cudart()
