"""Offloads activations: tensors that autograd saves in a block are copied to host memory after the block's forward
pass, and copied back before the block's backward pass.

Whole storages are copied, because saved tensors may be views of the same storage. Views of one storage, such as
queries, keys and values, are copied once, and keep their strides. A block's activations are copied to the host while
the next block's forward pass runs, and copied back while the next block's backward pass runs. The device therefore
holds the activations of two blocks at a time.
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
from shoestring.core.attachments import Attachments
from shoestring.core.feature import Phase
from shoestring.memory.offload.buffers import HostBuffer, HostBuffers
from shoestring.memory.offload.copying import CopyStream
from shoestring.memory.zero.placement import Wait
from shoestring.models.blocks import repeated

if TYPE_CHECKING:
    from shoestring.memory.settings.offload_activations import OffloadActivations


log = logging.getLogger("shoestring")


class ActivationBytes:
    """Counts the bytes of offloaded activations: the current number and its maximum."""

    def __init__(self) -> None:
        self.live = self.on_device = 0  # bytes held by autograd; the part of these bytes on the device
        self.most_live = self.most_on_device = self.copied = 0

    def saved(self, nbytes: int) -> None:
        """Count a storage that autograd has saved."""
        self.live += nbytes
        self.most_live = max(self.most_live, self.live)
        self.arrived(nbytes)

    def arrived(self, nbytes: int) -> None:
        """Count a storage that was allocated on the device again."""
        self.on_device += nbytes
        self.most_on_device = max(self.most_on_device, self.on_device)


class SavedStorage:
    """A storage that autograd saved in a block; it moves from the device to the host, and back to the device.

    A `SavedStorage` lives as long as autograd would hold the storage.
    """

    def __init__(self, block_pass: BlockPass, source: Tensor) -> None:
        self.block_pass = block_pass
        self.on_device: Tensor | None = source  # all elements of the storage
        self.version = source._version
        self.numel, self.nbytes = source.numel(), source.nbytes
        self.dtype, self.device = source.dtype, source.device
        self.buffer: HostBuffer | None = None
        self.on_host: Tensor | None = None  # copy of the storage in the host buffer
        block_pass.offload.bytes.saved(self.nbytes)

    def check_version(self) -> None:
        """Raise an error, as autograd would, if the storage was written to before it was released from the device."""
        if self.on_device is not None and self.on_device._version != self.version:
            raise RuntimeError("a tensor that the backward pass needs has been modified by an inplace operation")

    def send(self) -> None:
        """Start to copy the storage to the host; the device memory stays allocated until `leave`."""
        assert self.on_device is not None
        self.buffer = self.block_pass.offload.buffers.take(self.on_device)
        self.on_host = self.buffer.like(self.on_device)
        self.on_host.copy_(self.on_device, non_blocking=True)
        self.block_pass.offload.bytes.copied += self.nbytes

    def leave(self) -> None:
        """Release the storage's device memory."""
        self.on_device = None
        self.block_pass.offload.bytes.on_device -= self.nbytes

    def allocate(self) -> None:
        """Allocate the device memory that `fetch` copies into."""
        self.on_device = torch.empty(self.numel, dtype=self.dtype, device=self.device)
        self.block_pass.offload.bytes.arrived(self.nbytes)

    def fetch(self) -> None:
        """Start to copy the storage back to the device."""
        assert self.on_device is not None and self.on_host is not None
        self.on_device.copy_(self.on_host, non_blocking=True)
        self.block_pass.offload.bytes.copied += self.nbytes

    def __del__(self) -> None:
        offload = self.block_pass.offload
        offload.bytes.live -= self.nbytes
        if self.on_device is not None:
            offload.bytes.on_device -= self.nbytes
            # The compute stream may reuse the memory as soon as it is freed, so copies must finish first.
            self.block_pass.wait()
        if self.buffer is not None:
            offload.buffers.give(self.buffer)


class SavedView(NamedTuple):
    """A view of a `SavedStorage`, which autograd holds instead of a saved tensor."""

    storage: SavedStorage
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class BlockPass:
    """One forward pass of a block; its activations are copied together."""

    def __init__(self, offload: OffloadedBlocks, block: nn.Module, before: BlockPass | None) -> None:
        self.offload = offload
        self.before = weakref.ref(before) if before is not None else None
        # Parameters and buffers stay on the device anyway, so copying their storages would release nothing.
        held = chain(block.parameters(), block.buffers())
        self.resident = offload.buffers_of_model | {_key(tensor)[0] for tensor in held if _is_plain(tensor)}
        self.storages: dict[tuple[int, int, torch.dtype], SavedStorage] = {}  # filled during the block's forward pass
        self.saved: list[weakref.ref[SavedStorage]] = []
        self.wait: Wait = lambda: None

    @torch.no_grad()
    def pack(self, tensor: Tensor) -> Tensor | SavedView:
        """Return the object that autograd holds instead of a saved tensor (pack hook)."""
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
        """Return the saved tensor, after fetching its storage if necessary (unpack hook)."""
        if isinstance(held, Tensor):
            return held
        if held.storage.on_device is None:  # not prefetched
            self.fetch()
        self.wait()
        assert held.storage.on_device is not None
        return held.storage.on_device.as_strided(held.size, held.stride, held.offset)

    def send(self) -> None:
        """Start to copy all saved storages to the host."""
        for storage in self.storages.values():
            storage.check_version()
        with torch.no_grad(), self.offload.copies.after_compute():
            for storage in self.storages.values():
                storage.send()
        self.wait = self.offload.copies.mark()
        self.storages.clear()

    def leave(self) -> None:
        """Wait until the storages are copied to the host, then release their memory on the device."""
        self.wait()
        for storage in self._alive():
            if storage.on_device is not None:
                storage.check_version()
                storage.leave()

    @torch.no_grad()
    def fetch(self) -> None:
        """Start to copy all storages that are only on the host back to the device."""
        absent = [storage for storage in self._alive() if storage.on_device is None]
        if absent:
            for storage in absent:  # on the compute stream, because this stream uses and frees the memory
                storage.allocate()
            with self.offload.copies.after_compute():
                for storage in absent:
                    storage.fetch()
            self.wait = self.offload.copies.mark()

    def _alive(self) -> list[SavedStorage]:
        return [storage for reference in self.saved if (storage := reference()) is not None]


class OffloadedBlocks:
    """Offloads the activations of a model's blocks until the job is closed."""

    def __init__(self, attachments: Attachments, settings: OffloadActivations) -> None:
        self.device = attachments.world.device
        self.least = settings.min_mb * 1e6
        self.copies = CopyStream(self.device)
        self.bytes = ActivationBytes()
        self.buffers = HostBuffers(attachments, self.copies)
        self.buffers_of_model = frozenset(
            _key(buffer)[0] for buffer in attachments.module.buffers() if _is_plain(buffer)
        )
        self.passes = 0
        self._name, self._warned = settings.name, False
        self._job = attachments
        self._running: list[tuple[BlockPass, ExitStack] | None] = []  # an entry is None for a pass without gradients
        self._newest: BlockPass | None = None  # latest pass, whose activations are still on the device
        blocks = repeated(attachments.module)
        # One additional block gets hooks, because a block's backward pass prefetches the activations of the preceding
        # block.
        for number, block in enumerate(blocks[: settings.number_of(blocks) + 1]):
            self._watch(block, first=number == 0, offloads=number < settings.number_of(blocks))
        attachments.at(Phase.CAPTURE, self._publish)

    def _watch(self, block: nn.Module, first: bool, offloads: bool) -> None:
        """Register hooks around a block's forward pass, including what other features (recomputation) have changed in
        it."""

        def enter(module: nn.Module, _: Any) -> None:
            if not (module.training and torch.is_grad_enabled()):
                self._running.append(None)
                return
            if first:  # a new forward pass of the model begins
                self.passes += 1
                self._settle()
                if not self.bytes.live:
                    self.buffers.trim()
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
            passes = [this] if before is None else [this, before]
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(_fetching(*passes))
                    break

        hooks: Any = torch.compiler.disable(enter), torch.compiler.disable(leave)
        self._job.exits.callback(block.register_forward_pre_hook(hooks[0]).remove)
        self._job.exits.callback(block.register_forward_hook(hooks[1], always_call=True).remove)

    def _settle(self) -> None:
        """Release the device memory of the latest block's activations."""
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
    """Make a hook for the gradient of a block's output: when the block's backward pass begins, the hook fetches the
    activations of the block and of the preceding block.

    References are weak, because autograd's graph holds the hook.
    """
    weak = [weakref.ref(block_pass) for block_pass in passes]

    def begin(_: Tensor) -> None:
        for reference in weak:
            if (block_pass := reference()) is not None:
                block_pass.fetch()

    return begin


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has a single strided storage, so that it can be copied."""
    kind = type(tensor)
    return (kind in (Tensor, nn.Parameter) or is_fake(tensor)) and tensor.layout is torch.strided


def _key(tensor: Tensor) -> tuple[int, int]:
    """Identity and version of a tensor's storage; after a write, the storage counts as a different storage."""
    return tensor.untyped_storage()._cdata, tensor._version
