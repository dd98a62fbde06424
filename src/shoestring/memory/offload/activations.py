"""Activations in host memory: what autograd saves of a block goes down after it, and comes up before it is needed.

Copies are of whole storages, because those are what autograd holds: views of one storage, such as queries, keys and
values, travel once, and come back with the strides that they had. While a block's activations go down, the next block
runs; while the backward pass of a block runs, those of the block before come up. So the device holds those of two
blocks.
"""

from __future__ import annotations

import logging
import weakref
from contextlib import ExitStack
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from shoestring._torch import is_fake, tree_leaves
from shoestring.core.feature import Phase
from shoestring.core.job import Job
from shoestring.memory.offload.buffers import HostBuffer, HostBuffers
from shoestring.memory.offload.copying import CopyStream
from shoestring.memory.zero.placement import Wait
from shoestring.models.blocks import repeated

if TYPE_CHECKING:
    from shoestring.memory.settings.offload_activations import OffloadActivations


log = logging.getLogger("shoestring")


class ActivationBytes:
    """Bytes of what is offloaded: now, and the most so far."""

    def __init__(self) -> None:
        self.live = self.on_device = 0  # saved at present; and of that, what the device holds
        self.most_live = self.most_on_device = self.copied = 0

    def saved(self, nbytes: int) -> None:
        self.live += nbytes
        self.most_live = max(self.most_live, self.live)
        self.arrived(nbytes)

    def arrived(self, nbytes: int) -> None:
        self.on_device += nbytes
        self.most_on_device = max(self.most_on_device, self.on_device)


class SavedStorage:
    """A storage that autograd saved in a block: on the device, then on the host, and on the device again.

    Autograd holds it as long as it would have held the storage.
    """

    def __init__(self, of: BlockPass, source: Tensor) -> None:
        self.of = of
        self.here: Tensor | None = source  # all elements of the storage, while the device holds them
        self.version = source._version
        self.numel, self.nbytes = source.numel(), source.nbytes
        self.dtype, self.device = source.dtype, source.device
        self.buffer: HostBuffer | None = None
        self.there: Tensor | None = None  # in the buffer
        of.offload.bytes.saved(self.nbytes)

    def check_version(self) -> None:
        """Raise as autograd does where what it saved was written over before it had left."""
        if self.here is not None and self.here._version != self.version:
            raise RuntimeError("a tensor that the backward pass needs has been modified by an inplace operation")

    def send(self) -> None:
        """Copy it down; the device holds it until `leave`."""
        assert self.here is not None
        self.buffer = self.of.offload.buffers.take(self.here)
        self.there = self.buffer.like(self.here)
        self.there.copy_(self.here, non_blocking=True)
        self.of.offload.bytes.copied += self.nbytes

    def leave(self) -> None:
        """Let the device forget it."""
        self.here = None
        self.of.offload.bytes.on_device -= self.nbytes

    def allocate(self) -> None:
        """Take memory of the device to fetch it to."""
        self.here = torch.empty(self.numel, dtype=self.dtype, device=self.device)
        self.of.offload.bytes.arrived(self.nbytes)

    def fetch(self) -> None:
        """Copy it up."""
        assert self.here is not None and self.there is not None
        self.here.copy_(self.there, non_blocking=True)
        self.of.offload.bytes.copied += self.nbytes

    def __del__(self) -> None:
        offload = self.of.offload
        offload.bytes.live -= self.nbytes
        if self.here is not None:
            offload.bytes.on_device -= self.nbytes
            self.of.wait()
        if self.buffer is not None:
            offload.buffers.give(self.buffer)


class SavedView(NamedTuple):
    """What autograd holds in the place of a tensor."""

    storage: SavedStorage
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class BlockPass:
    """A forward pass of a block, whose activations travel together."""

    def __init__(self, offload: OffloadedBlocks, block: nn.Module, before: BlockPass | None) -> None:
        self.offload = offload
        self.before = weakref.ref(before) if before is not None else None
        held = chain(block.parameters(), block.buffers())
        self.resident = offload.buffers_of_model | {_key(tensor)[0] for tensor in held if _is_plain(tensor)}
        self.storages: dict[tuple[int, int, torch.dtype], SavedStorage] = {}  # while the block runs
        self.saved: list[weakref.ref[SavedStorage]] = []
        self.wait: Wait = lambda: None

    @torch.no_grad()
    def pack(self, tensor: Tensor) -> Tensor | SavedView:
        """What autograd holds in place of a tensor that it saves."""
        if not _is_plain(tensor) or tensor.device.type != self.offload.device.type or _key(tensor)[0] in self.resident:
            return tensor
        if tensor.untyped_storage().nbytes() < self.offload.least:
            return tensor
        key = *_key(tensor), tensor.dtype
        if (storage := self.storages.get(key)) is None:
            numel = tensor.untyped_storage().nbytes() // tensor.element_size()
            storage = self.storages[key] = SavedStorage(self, tensor.detach().as_strided((numel,), (1,), 0))
            self.saved.append(weakref.ref(storage))
        return SavedView(storage, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    @torch.no_grad()
    def unpack(self, held: Tensor | SavedView) -> Tensor:
        """The tensor that was saved."""
        if isinstance(held, Tensor):
            return held
        if held.storage.here is None:
            self.fetch()
        self.wait()
        assert held.storage.here is not None
        return held.storage.here.as_strided(held.size, held.stride, held.offset)

    def send(self) -> None:
        """Start to copy down all that was saved."""
        for storage in self.storages.values():
            storage.check_version()
        with torch.no_grad(), self.offload.copies.after_compute():
            for storage in self.storages.values():
                storage.send()
        self.wait = self.offload.copies.mark()
        self.storages.clear()

    def leave(self) -> None:
        """Let the device forget what has been copied down."""
        self.wait()
        for storage in self._alive():
            if storage.here is not None:
                storage.check_version()
                storage.leave()

    @torch.no_grad()
    def fetch(self) -> None:
        """Start to copy up what the device has forgotten."""
        gone = [storage for storage in self._alive() if storage.here is None]
        if gone:
            for storage in gone:
                storage.allocate()
            with self.offload.copies.after_compute():
                for storage in gone:
                    storage.fetch()
            self.wait = self.offload.copies.mark()

    def _alive(self) -> list[SavedStorage]:
        return [storage for each in self.saved if (storage := each()) is not None]


class OffloadedBlocks:
    """The blocks whose activations are offloaded; attached until the job is closed."""

    def __init__(self, job: Job, settings: OffloadActivations) -> None:
        self.device = job.world.device
        self.least = settings.min_mb * 1e6
        self.copies = CopyStream(self.device)
        self.bytes = ActivationBytes()
        self.buffers = HostBuffers(job, self.copies)
        self.buffers_of_model = frozenset(_key(each)[0] for each in job.module.buffers() if _is_plain(each))
        self.passes = 0
        self._name, self._warned = settings.name, False
        self._job = job
        self._running: list[tuple[BlockPass, ExitStack] | None] = []  # None for one that is not trained
        self._newest: BlockPass | None = None  # the last one, which the device still holds
        blocks = repeated(job.module)
        for number, block in enumerate(blocks[: settings.number_of(blocks) + 1]):
            self._watch(block, first=number == 0, offloads=number < settings.number_of(blocks))
        job.at(Phase.CAPTURE, self._publish)

    def _watch(self, block: nn.Module, first: bool, offloads: bool) -> None:
        """Surround the block's forward pass, with what other features make of it inside (recomputation)."""

        def enter(module: nn.Module, _: Any) -> None:
            if not (module.training and torch.is_grad_enabled()):
                self._running.append(None)
                return
            if first:
                self._begin()
            this, stack = BlockPass(self, module, self._newest), ExitStack()
            if offloads:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(this.pack, this.unpack))
            self._running.append((this, stack))

        def leave(_: nn.Module, inputs: Any, output: Any) -> None:
            running = self._running.pop() if self._running else None
            if running is None:
                return
            this, stack = running
            stack.close()
            this.send()
            self._settle()
            self._newest = this if offloads else None
            before = this.before() if this.before is not None else None
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(_fetching(*(each for each in (this, before) if each is not None)))
                    break

        hooks: Any = torch.compiler.disable(enter), torch.compiler.disable(leave)
        self._job.exits.callback(block.register_forward_pre_hook(hooks[0]).remove)
        self._job.exits.callback(block.register_forward_hook(hooks[1], always_call=True).remove)

    def _begin(self) -> None:
        """A new forward pass begins."""
        self.passes += 1
        self._settle()
        if not self.bytes.live:
            self.buffers.trim()

    def _settle(self) -> None:
        """Let the device forget the newest block's activations."""
        if self._newest is not None:
            self._newest.leave()
            self._newest = None

    def _publish(self) -> None:
        if not self.passes and not self._warned:
            self._warned = True
            log.warning(
                "%s: nothing is offloaded, because code compiled before this feature was attached lacks its hooks;"
                " call torch.compiler.reset() before the first step",
                self._name,
            )
        self._job.trace.facts |= {
            "activations_offloaded": self.bytes.most_live,
            "activations_on_device": self.bytes.most_on_device,
            "activations_copied": self.bytes.copied / max(self.passes, 1),
        }


def _fetching(*passes: BlockPass) -> Any:
    """A hook for the gradient of a block's output: its backward pass begins, and the block before is next."""
    weak = [weakref.ref(each) for each in passes]

    def begin(_: Tensor) -> None:
        for each in weak:
            if (this := each()) is not None:
                this.fetch()

    return begin


def _is_plain(tensor: Tensor) -> bool:
    """Whether it has one storage of elements, which can be copied."""
    kind = type(tensor)
    return (kind in (Tensor, nn.Parameter) or is_fake(tensor)) and tensor.layout is torch.strided


def _key(tensor: Tensor) -> tuple[int, int]:
    """Its storage, and how often that was written to."""
    return tensor.untyped_storage()._cdata, tensor._version
