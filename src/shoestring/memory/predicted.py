"""Predicts the peak memory of a training step before anything is allocated.

The step runs on fake tensors, whose operators compute shapes but no values. Autograd and Python hold fake tensors as
long as real tensors, so live tensors have the same total size as in a real step. The prediction excludes the workspaces
of kernels.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer

from shoestring._torch import (
    TorchDispatchMode,
    fake_ranks,
    fake_tensors,
    modules_stay,
    resizes_heard,
    tree_leaves,
    tree_map_only,
)
from shoestring.core.attachments import Attachments
from shoestring.core.compose import compose
from shoestring.core.feature import Divided, Feature, Inexact, Seam
from shoestring.core.job import Job, attachments_of
from shoestring.core.task import Batch, Forward, Loss, call_model, sum_and_count
from shoestring.core.world import World
from shoestring.memory.tracing.labels import optimizer_state, plain
from shoestring.memory.tracing.recording import BlockName, MemoryWindow
from shoestring.models.without_data import with_fake_tensors
from shoestring.sharded import is_sharded

ROUNDING = {"cuda": 512}
"""Maps a device type to the number of bytes to whose multiples the device's allocator rounds sizes up."""

_INDEXED = (
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
)


class LiveTensors(TorchDispatchMode):
    """Tracks the storages of tensors, from the operator that returns a tensor until nothing references its storage.

    Args:
        rounding: number of bytes to whose multiples sizes are rounded up.
    """

    def __init__(self, rounding: int = 1) -> None:
        super().__init__()
        self.rounding = rounding
        self.events = 0
        self.blocks: list[list[int]] = []  # (bytes, event of the allocation, event of the release or -1)
        self.names: list[BlockName] = []  # names of the blocks, in the order of `blocks`
        self.where: dict[int, int] = {}  # storage -> index of its block
        self.modules: list[str] = []  # modules whose forward pass is running, the outermost first
        self.paths: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self.backward = False  # whether a backward pass is running
        self.watching: list[Any] = []  # weak references whose callbacks run when a storage is freed
        self.total = self.peak = self.peak_event = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _INDEXED:
            # How many elements of a mask are true is unknown, so all elements count, with an index for each dimension.
            indices: list[Tensor | None] = []
            for index in args[1]:
                if index is None or index.dtype not in (torch.bool, torch.uint8):
                    indices.append(index)
                else:
                    indices += [index.new_empty(index.numel(), dtype=torch.int64) for _ in range(index.ndim)]
            args = (args[0], indices, *args[2:])
        returned = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(returned):
            if isinstance(tensor, Tensor):
                self.add(tensor, func)
        return returned

    def add(self, tensor: Tensor, func: Any = None) -> None:
        """Count a tensor's storage as live, unless the storage is already counted."""
        if is_sharded(tensor):
            tensor = tensor._local_tensor
        storage = tensor.untyped_storage()
        if tensor.device.type == "meta" or not storage.nbytes():
            return
        if storage._cdata not in self.where:
            self._count(storage, func)

    def _count(self, storage: torch.UntypedStorage, func: Any) -> None:
        key = storage._cdata
        nbytes = -(-storage.nbytes() // self.rounding) * self.rounding
        self.events += 1
        index = self.where[key] = len(self.blocks)
        self.blocks.append([nbytes, self.events, -1])
        self.names.append(self._name(func))
        self.total += nbytes
        if self.total > self.peak:
            self.peak, self.peak_event = self.total, self.events
        self.watching.append(weakref.ref(storage, lambda _: self._release(key, index)))

    def _release(self, key: int, index: int) -> None:
        if self.blocks[index][2] >= 0:  # already released by `resized`
            return
        self.events += 1
        if self.where.get(key) == index:
            del self.where[key]
        self.blocks[index][2] = self.events
        self.total -= self.blocks[index][0]

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count a resized storage as a new block."""
        if (index := self.where.get(storage._cdata)) is not None:
            self._release(storage._cdata, index)
        self._count(storage, None)

    def begin(self) -> None:
        """Reset the peak to the current total, to exclude the peak while setting up the job."""
        self.peak, self.peak_event = self.total, self.events

    def _name(self, func: Any) -> BlockName:
        operator = str(getattr(func, "_overloadpacket", func)).replace(".", "::", 1) if func is not None else ""
        path = self.modules[-1] if self.modules else ""
        if self.backward and not self.modules:
            return BlockName("temporary", "backward", operator)
        return BlockName("activation", path or "loss", operator)

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """Context that tracks tensors, and names each tensor after the module that is running when it is created."""
        for path, module in model.named_modules():
            self.paths[module] = plain(path) or type(module).__name__

        def enter(module: nn.Module, _: Any) -> None:
            self.modules.append(self.paths.get(module, type(module).__name__))

        def leave(*_: Any) -> None:
            if self.modules:
                self.modules.pop()

        with ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(enter).remove)
            stack.callback(register_module_forward_hook(leave, always_call=True).remove)
            stack.enter_context(resizes_heard(self.resized))
            stack.enter_context(self)
            yield

    def window(self, named: Mapping[int, BlockName]) -> MemoryWindow:
        """Convert the tracked blocks to a window of a recording.

        Args:
            named: maps indices of blocks to better names.
        """
        numbers: dict[BlockName, int] = {}
        name = [numbers.setdefault(named.get(i, default), len(numbers)) for i, default in enumerate(self.names)]
        blocks = np.array(self.blocks, np.int64).reshape(-1, 3)
        columns = {"bytes": blocks[:, 0], "born": blocks[:, 1], "died": blocks[:, 2], "name": np.array(name, np.int64)}
        columns |= {"born_at": blocks[:, 1], "died_at": blocks[:, 2], "address": np.arange(len(blocks))}
        return MemoryWindow(columns, list(numbers), self.peak_event)


@dataclass(frozen=True)
class Prediction:
    """The predicted memory of a step on one rank."""

    window: MemoryWindow
    """The blocks of the step, in the form of a recording's window."""
    unseen: Sequence[str] = field(default_factory=tuple)
    """Names of features whose memory is not predicted."""
    host: int = 0
    """Bytes of host memory that features lease; `peak` does not include them."""

    @property
    def peak(self) -> int:
        """Bytes of all tensors at the peak."""
        return self.window.peak


def predict_step(
    job: Job,
    batches: Sequence[Batch],
    *,
    live: LiveTensors,
    buckets: bool = False,
    unseen: Sequence[str] = (),
) -> Prediction:
    """Predict the memory of an optimizer step of a job whose tensors are fake.

    Args:
        batches: micro-batches of fake tensors.
        live: tracks the tensors of the step.
        buckets: whether gradients have buckets that are allocated permanently (DDP). With one micro-batch, the
            gradients are views of these buckets.
        unseen: names of features whose memory is not predicted.

    Raises:
        Exception: the error of an operator that does not support fake tensors.
    """
    attachments = attachments_of(job)
    optimizer = job.optimizer
    trained = [tensor for tensor in attachments.trained.values() if isinstance(tensor, Tensor)]
    for tensor in (
        *attachments.module.parameters(),
        *attachments.module.buffers(),
        *trained,
        *_tensors(batches),
    ):
        live.add(tensor)
    labelled: dict[int, BlockName] = {}
    gradients_stay = buckets and len(batches) == 1
    separate = [torch.zeros_like(parameter) for parameter in trained] if buckets and not gradients_stay else []
    for bucket in separate:
        live.add(bucket)
        labelled[live.where[bucket.untyped_storage()._cdata]] = BlockName(
            "communication buffer", "buckets of gradients"
        )
    with live.following(attachments.module):
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        update(optimizer)  # allocates the optimizer's state
        if not gradients_stay:
            optimizer.zero_grad(set_to_none=True)
        live.begin()
        for index, batch in enumerate(batches):
            with attachments.sync(index == len(batches) - 1):
                with attachments.computing():
                    total, count = sum_and_count(attachments.loss(attachments.forward(job.model, batch), batch))
                loss = total / count
                live.backward = True
                loss.backward()
                live.backward = False
            del total, count, loss
        labelled |= _held_by_name(job, live)  # before the update, because the update may free gradients
        update(optimizer)
    host = sum(nbytes for nbytes, _ in job.world.memory.leases.values())
    inputs = (live.where.get(tensor.untyped_storage()._cdata) for tensor in _tensors(batches))
    labelled |= {index: BlockName("input", "batch") for index in inputs if index is not None}
    return Prediction(live.window(labelled), unseen, host)


def update(optimizer: Optimizer) -> None:
    """Step an optimizer whose tensors are fake. Native loops refuse fake tensors; their error is ignored, because
    native loops allocate nothing."""
    try:
        optimizer.step()
    except RuntimeError as error:
        if "FakeTensor" not in str(error):
            raise


def _held_by_name(job: Job, live: LiveTensors) -> dict[int, BlockName]:
    """Map indices of blocks to the names of the parameters, buffers, gradients and optimizer state in the blocks."""
    attachments = attachments_of(job)
    names_of_blocks: dict[int, BlockName] = {}
    names = {id(tensor): name for name, tensor in attachments.trained.items()}

    def label(held: Iterable[tuple[str, str, Tensor]]) -> None:
        for kind, name, tensor in held:
            local = tensor._local_tensor if is_sharded(tensor) else tensor
            index = live.where.get(local.untyped_storage()._cdata)
            if index is not None:
                names_of_blocks.setdefault(index, BlockName(kind, name))

    label(("parameter", plain(name), tensor) for name, tensor in attachments.module.named_parameters())
    label(("buffer", plain(name), tensor) for name, tensor in attachments.module.named_buffers())
    label(("gradient", name, tensor.grad) for name, tensor in attachments.trained.items() if tensor.grad is not None)
    label(optimizer_state([job.optimizer], names))
    return names_of_blocks


def _tensors(batches: Sequence[Batch]) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(batches) if isinstance(leaf, Tensor)]


# -- a run -----------------------------------------------------------------------------------------------------------


class ImaginedWorld(World):
    """A world with only its first rank; the other ranks are imagined, and assumed to send the same data as the
    first."""

    @cached_property
    def mesh(self) -> DeviceMesh | None:
        if self.size == 1:
            return None
        return init_device_mesh("cpu", tuple(self.axes.values()), mesh_dim_names=tuple(self.axes))

    def gather(self, data: bytes, group: Any = None) -> list[bytes]:
        return [data] * self.size

    def broadcast(self, data: bytes | None, source: int = 0) -> bytes:
        return data or b""

    def barrier(self) -> None:
        return


@dataclass(frozen=True, kw_only=True)
class BeforeSteps(Feature):
    """Wraps a feature and leaves out its STEP seam, because work at this seam needs values, not only shapes."""

    inner: Feature

    @property
    def seams(self) -> tuple[Seam, ...]:  # pyrefly: ignore[bad-override]
        return tuple(seam for seam in self.inner.seams if seam is not Seam.STEP)

    @property
    def inexact(self) -> Inexact:
        return self.inner.inexact

    @property
    def divided(self) -> Divided:  # pyrefly: ignore[bad-override]
        return self.inner.divided

    @property
    def averages_in_backward(self) -> bool:  # pyrefly: ignore[bad-override]
        return self.inner.averages_in_backward

    @property
    def adds_parameters(self) -> bool:  # pyrefly: ignore[bad-override]
        return self.inner.adds_parameters

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def over(self) -> tuple[str, ...]:
        return self.inner.over

    def arrange(self, world: World) -> World:
        return self.inner.arrange(world)

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        self.inner.apply(attachments, seam)


_NO_MEMORY = ("memory.budget", "memory.tracing", "memory.broker", "graph.compile")
"""Features that are not applied, because they change no tensor of the step."""
_PREDICTED = ("memory", "precision", "optim", "parallel", "sparse")
"""Areas of the features that a prediction applies."""


def is_predicted(feature: Feature) -> bool:
    """Whether `predict` applies a feature, so that the feature may change the predicted peak."""
    area = feature.name.partition(".")[0]
    return area in _PREDICTED and feature.name not in _NO_MEMORY and bool(BeforeSteps(inner=feature).seams)


def predict(
    model: nn.Module,
    features: Sequence[Feature],
    loss: Loss,
    shape: tuple[int, int],
    *,
    ranks: int,
    accumulate: int = 1,
    live: LiveTensors | None = None,
    forward: Forward = call_model,
    batch: Batch = None,
) -> Prediction:
    """Predict the memory of an optimizer step of a run, which is the same on all ranks.

    Args:
        model: the model, on the meta device.
        features: the resolved features of the run.
        shape: (samples per micro-batch, tokens per sample).
        accumulate: number of micro-batches per step; more than two micro-batches have the same peak as two.
        live: tracks the tensors of the step; defaults to a plain `LiveTensors`.
        forward: (model, batch) -> output.
        batch: a micro-batch, for models that do not read token ids of shape `shape`; only its shapes and data types are
            used.

    Raises:
        Exception: the error of a feature or operator that cannot work without values.
    """
    device = device_type()
    applied, unseen, replicated = [], [], False
    for feature in features:
        before = BeforeSteps(inner=feature)
        if feature.name == "parallel.ddp":
            replicated = ranks > 1
        elif feature.name.partition(".")[0] not in _PREDICTED or not before.seams:
            unseen.append(feature.name)
        elif feature.name not in _NO_MEMORY:
            applied.append(before)
    sharing = not replicated and ranks > 1
    with ExitStack() as stack:
        world = ImaginedWorld(size=ranks, local_size=ranks) if sharing else World()
        if sharing:
            stack.enter_context(fake_ranks(ranks))
            world.mesh_over(tuple(world.axes))  # before tensors are fake, because creating a mesh reads values
        stack.enter_context(fake_tensors())
        stack.enter_context(modules_stay())
        job = stack.enter_context(compose(Job(with_fake_tensors(model, device), forward, loss, world=world), applied))
        batches = [fake_batch(batch, shape, device) for _ in range(min(accumulate, 2))]
        live = live or LiveTensors(ROUNDING.get(device, 1))
        return predict_step(job, batches, live=live, buckets=replicated, unseen=unseen)


def device_type() -> str:
    """Type of the device for which memory is predicted: the GPU if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def fake_batch(batch: Batch, shape: tuple[int, int], device: str) -> Batch:
    """Make zeros shaped like `batch`, or like token ids of `shape` if `batch` is None; called inside `fake_tensors`."""
    if batch is None:
        tokens = torch.empty(shape, dtype=torch.int64, device="meta")
        batch = {"inputs": tokens, "targets": tokens}
    return tree_map_only(Tensor, lambda like: torch.zeros(like.shape, dtype=like.dtype, device=device), batch)
