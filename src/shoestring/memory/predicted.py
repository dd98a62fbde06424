"""The peak of a training step, predicted before anything is allocated.

The step runs on fake tensors: every operator knows the shapes of what it returns, and nothing is computed. What each
operator returns lives as long as it would, for autograd and Python hold it as they would, so the sum of what is alive
is that of a real step. What kernels take for themselves is not in it.
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
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer

from shoestring._torch import TorchDispatchMode, fake_ranks, fake_tensors, modules_stay, resizes_heard, tree_leaves
from shoestring.core.compose import compose
from shoestring.core.feature import Feature, Seam
from shoestring.core.job import Job
from shoestring.core.task import Batch, Loss, sum_and_count
from shoestring.core.world import World
from shoestring.memory.tracing.labels import optimizer_state, plain
from shoestring.memory.tracing.recording import BlockName, MemoryWindow

ROUNDING = {"cuda": 512}
"""Bytes to whose multiples a device's allocator rounds."""


_INDEXED = (
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
)


def _places(index: Tensor | None) -> list[Tensor | None]:
    """An index as it is; in the place of a mask, as many indices as it has dimensions, of all its elements."""
    if index is None or index.dtype not in (torch.bool, torch.uint8):
        return [index]
    return [index.new_empty(index.numel(), dtype=torch.int64) for _ in range(index.ndim)]


class LiveTensors(TorchDispatchMode):
    """Follows the storages that operators return from their first appearance until nobody holds them.

    Args:
        rounding: bytes to whose multiples sizes are rounded.
    """

    def __init__(self, rounding: int = 1) -> None:
        super().__init__()
        self.rounding = rounding
        self.events = 0
        self.blocks: list[list[int]] = []  # (bytes, event of birth, of death or -1)
        self.names: list[BlockName] = []
        self.where: dict[int, int] = {}  # storage -> index of its block
        self.modules: list[str] = []
        self.paths: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self.backward = False
        self.watching: list[Any] = []
        self.total = self.peak = self.peak_event = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _INDEXED:  # by a mask, whose every element counts as true
            args = (args[0], [place for each in args[1] for place in _places(each)], *args[2:])
        returned = func(*args, **(kwargs or {}))
        for each in tree_leaves(returned):
            if isinstance(each, Tensor):
                self.add(each, func)
        return returned

    def add(self, tensor: Tensor, func: Any = None) -> None:
        """Count a tensor's storage from now on, if it is not counted already."""
        if isinstance(tensor, DTensor):
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
        self.watching.append(weakref.ref(storage, lambda _: self._gone(key, index)))

    def _gone(self, key: int, index: int) -> None:
        if self.blocks[index][2] >= 0:
            return
        self.events += 1
        if self.where.get(key) == index:
            del self.where[key]
        self.blocks[index][2] = self.events
        self.total -= self.blocks[index][0]

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage anew that has another size now."""
        if (index := self.where.get(storage._cdata)) is not None:
            self._gone(storage._cdata, index)
        self._count(storage, None)

    def begin(self) -> None:
        """Forget the peak so far."""
        self.peak, self.peak_event = self.total, self.events

    def _name(self, func: Any) -> BlockName:
        operator = str(getattr(func, "_overloadpacket", func)).replace(".", "::", 1) if func is not None else ""
        path = self.modules[-1] if self.modules else ""
        if self.backward and not self.modules:
            return BlockName("temporary", "backward", operator)
        return BlockName("activation", path or "loss", operator)

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """Name what is made within by the module that runs."""
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
        """What was followed, as a recording has it; `named` gives names by the index of a block."""
        numbers: dict[BlockName, int] = {}
        name = [numbers.setdefault(named.get(i, each), len(numbers)) for i, each in enumerate(self.names)]
        blocks = np.array(self.blocks, np.int64).reshape(-1, 3)
        columns = {"bytes": blocks[:, 0], "born": blocks[:, 1], "died": blocks[:, 2], "name": np.array(name, np.int64)}
        columns |= {"born_at": blocks[:, 1], "died_at": blocks[:, 2], "address": np.arange(len(blocks))}
        return MemoryWindow(columns, list(numbers), self.peak_event)


@dataclass(frozen=True)
class Prediction:
    """The peak of a step on one rank."""

    window: MemoryWindow
    unseen: Sequence[str] = field(default_factory=tuple)
    """Features whose memory is not in it."""
    host: int = 0
    """Bytes of host memory that features lease beside it."""

    @property
    def peak(self) -> int:
        """Bytes."""
        return self.window.peak


def predict_step(
    job: Job,
    batches: Sequence[Batch],
    *,
    live: LiveTensors,
    buckets: bool = False,
    unseen: Sequence[str] = (),
) -> Prediction:
    """Predict the peak of an optimizer step of a job whose tensors are fake.

    Args:
        batches: micro-batches of fake tensors.
        live: follows the tensors of the step.
        buckets: gradients are copied to memory that is there all the time, at once if there is one micro-batch (DDP).

    Raises:
        Exception: whatever an operator raises that has no fake version.
    """
    optimizer = job.built_optimizer
    trained = [each for each in job.trained.values() if isinstance(each, Tensor)]
    for tensor in (*job.module.parameters(), *job.module.buffers(), *trained, *_tensors(batches)):
        live.add(tensor)
    labelled: dict[int, BlockName] = {}
    there = buckets and len(batches) == 1
    held = [torch.zeros_like(parameter) for parameter in trained] if buckets and not there else []
    for bucket in held:
        live.add(bucket)
        labelled[live.where[bucket.untyped_storage()._cdata]] = BlockName(
            "communication buffer", "buckets of gradients"
        )
    with live.following(job.module):
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        _update(optimizer)  # lays out the optimizer's state
        if not there:
            optimizer.zero_grad(set_to_none=True)
        live.begin()
        for index, batch in enumerate(batches):
            with job.sync(index == len(batches) - 1):
                with job.computing():
                    total, count = sum_and_count(job.loss(job.forward(job.model, batch), batch))
                loss = total / count
                live.backward = True
                loss.backward()
                live.backward = False
            del total, count, loss
        labelled |= _labelled(job, live)
        _update(optimizer)
    host = sum(nbytes for nbytes, _ in job.world.memory.leases.values())
    return Prediction(live.window(labelled | _batches(batches, live)), unseen, host)


def _update(optimizer: Optimizer) -> None:
    """A step; native loops get no address of a fake tensor, and would work in place."""
    try:
        optimizer.step()
    except RuntimeError as error:
        if "FakeTensor" not in str(error):
            raise


def _labelled(job: Job, live: LiveTensors) -> dict[int, BlockName]:
    found: dict[int, BlockName] = {}
    names = {id(tensor): name for name, tensor in job.trained.items()}

    def label(held: Iterable[tuple[str, str, Tensor]]) -> None:
        for kind, name, tensor in held:
            index = live.where.get(_local(tensor).untyped_storage()._cdata)
            if index is not None:
                found.setdefault(index, BlockName(kind, name))

    label(("parameter", plain(name), tensor) for name, tensor in job.module.named_parameters())
    label(("buffer", plain(name), tensor) for name, tensor in job.module.named_buffers())
    label(("gradient", name, each.grad) for name, each in job.trained.items() if each.grad is not None)
    label(optimizer_state([job.built_optimizer], names))
    return found


def _batches(batches: Sequence[Batch], live: LiveTensors) -> dict[int, BlockName]:
    places = (live.where.get(tensor.untyped_storage()._cdata) for tensor in _tensors(batches))
    return {place: BlockName("input", "batch") for place in places if place is not None}


def _tensors(batches: Sequence[Batch]) -> list[Tensor]:
    return [each for each in tree_leaves(batches) if isinstance(each, Tensor)]


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


# -- a run -----------------------------------------------------------------------------------------------------------


class ImaginedWorld(World):
    """The first of ranks that are not there: every other one says what this one says."""

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
    """A feature without what it does around optimizer steps, which needs numbers and not only shapes."""

    inner: Feature

    @property
    def seams(self) -> tuple[Seam, ...]:  # pyrefly: ignore[bad-override]
        return tuple(seam for seam in self.inner.seams if seam is not Seam.STEP)

    @property
    def engine(self) -> Any:  # pyrefly: ignore[bad-override]
        return self.inner.engine

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

    def apply(self, job: Job, seam: Seam) -> None:
        self.inner.apply(job, seam)


_NO_MEMORY = ("memory.budget", "memory.tracing", "memory.broker", "graph.compile")
_PREDICTED = ("memory", "precision", "optim", "parallel", "sparse")


def is_predicted(feature: Feature) -> bool:
    """Whether `predict` applies a feature, and its peak is another without it."""
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
) -> Prediction:
    """Predict the peak of an optimizer step of a run, on each of its ranks.

    Args:
        model: on the meta device; it takes tokens.
        features: as they are resolved.
        shape: (samples of a micro-batch, tokens of each).
        live: follows the tensors of the step, to know more of them.

    Raises:
        Exception: whatever a feature or operator raises that cannot work without numbers.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
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
            world.mesh_over(tuple(world.axes))  # before tensors are fake: it is made of numbers
        stack.enter_context(fake_tensors())
        stack.enter_context(modules_stay())
        job = stack.enter_context(compose(Job(_filled(model, device), loss=loss, world=world), applied))
        tokens = [torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(2 * min(accumulate, 2))]
        batches = [{"inputs": one, "targets": other} for one, other in zip(tokens[::2], tokens[1::2], strict=True)]
        live = live or LiveTensors(ROUNDING.get(device, 1))
        return predict_step(job, batches, live=live, buckets=replicated, unseen=unseen)


def _filled(model: nn.Module, device: str) -> nn.Module:
    """The model with fake tensors in the place of those on the meta device; tied parameters stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    empty = torch.empty_like(parameter, device=device)
                    made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device=device)
    return model
