"""Measures what the parts of a run's model cost on this rank, without optimizer state and gradients.

Blocks are measured one by one, each on the inputs that it got in a forward pass; of several equal blocks, only one is
measured. The layers outside the blocks are measured while the blocks do nothing. In this way a model can be measured
that is too large to be trained on one rank.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from operator import methodcaller
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from shoestring._torch import fake_tensors, modules_stay
from shoestring.core.attachments import Attachments
from shoestring.core.compose import compose
from shoestring.core.errors import ConfigError
from shoestring.core.feature import Feature, Seam
from shoestring.core.job import Job, attachments_of
from shoestring.core.task import Batch, sum_and_count
from shoestring.core.trace import Trace
from shoestring.core.world import World
from shoestring.memory.predicted import BeforeSteps, device_type, fake_batch, is_predicted, update
from shoestring.models.without_data import with_fake_tensors
from shoestring.parallel.pipeline.stage import Layout
from shoestring.planning.links import synchronize
from shoestring.planning.step import ModelCosts, PartCosts
from shoestring.planning.system import return_memory
from shoestring.report.settings import RecordsSteps
from shoestring.run import Run
from shoestring.training.build import build_job
from shoestring.training.data_loading import DataSets, to_device
from shoestring.training.user_code import UserCode

TURNS = 3
"""Number of turns, in each of which all parts are measured once. The median of the turns counts, so that other work on
the machine changes nothing if it lasts for less than a turn."""
SUSTAINED = 0.1
"""Minimum number of seconds for which a pass is repeated in each turn. A processor with a quota, or a cool one, runs a
single short pass faster than the many passes of a step."""
_ALONE = {Seam.MODEL, Seam.LOSS, Seam.OPTIM, Seam.STEP}
"""Seams of features that stay in the run when the model is measured on one rank, because they change a pass's cost."""


@dataclass
class _Timed:
    """Measurements of a part of the model; the lists have one entry for each number of samples."""

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    held: list[float] = field(default_factory=list)
    trained: int = 0
    frozen: int = 0

    def note(self, forward: float, backward: float) -> None:
        """Add the seconds of the forward and the backward pass over another number of samples."""
        self.forward.append(forward)
        self.backward.append(backward)

    def costs(self) -> PartCosts:
        return PartCosts(
            forward=tuple(self.forward),
            backward=tuple(self.backward),
            held=tuple(self.held),
            trained=self.trained,
            frozen=self.frozen,
        )


Turn = Callable[[], tuple[float, ...]]
"""Function that measures one part in one turn; it returns the seconds of the part's passes."""


def _medians(parts: Sequence[Turn]) -> list[tuple[float, ...]]:
    """Measure parts in turn, and return the medians of what each part returned."""
    turns = [[part() for part in parts] for _ in range(TURNS)]
    return [tuple(map(median, zip(*part, strict=True))) for part in zip(*turns, strict=True)]


def measure(run: Run, code: UserCode, world: World, data: DataSets, sizes: Sequence[int]) -> ModelCosts:
    """Measure the parts of the run's model for micro-batches of `sizes` samples, on all ranks at once.

    A collective. The result has the costs of the slowest rank.
    """
    alone = World(device=world.device)
    with build_job(replace(run, features=_measured(run.features)), code, alone, data, Trace()) as job:
        measuring = _Measuring(job, world)
        for size in sizes:
            measuring.measure(to_device(data.first_batch(size), world.device), size)
        own = measuring.costs(tuple(sizes))
    del job, measuring
    return_memory()  # the trials of plans that follow need this memory for their models
    messages = world.gather(json.dumps(asdict(own)).encode())
    everyone = [json.loads(message) for message in messages]  # own file: what the ranks of this job send
    return _slowest(own, everyone)


def _measured(features: Iterable[Feature]) -> tuple[Feature, ...]:
    """The features with which a model is measured on one rank."""
    own = (feature for feature in features if {*feature.seams} <= _ALONE and not writes_files(feature))
    return tuple(feature for feature in own if feature.name != "memory.recompute")


def writes_files(feature: Feature) -> bool:
    """Whether a feature saves checkpoints or records steps, which neither measurements nor trials may do."""
    return feature.name.startswith("checkpoint.") or isinstance(feature, RecordsSteps)


@contextmanager
def _fake_job(attachments: Attachments, batch: Batch, shape: tuple[int, int]) -> Iterator[tuple[Job, Batch]]:
    """Context with a job of the same model on one rank, and a batch, whose tensors are fake. See `measure_sizes`."""
    features = [BeforeSteps(inner=one) for one in _measured(attachments.features) if is_predicted(one)]
    device = device_type()
    with fake_tensors(), modules_stay():
        model = with_fake_tensors(attachments.module, device)
        with compose(Job(model, attachments.forward, attachments.loss), features) as job:
            yield job, fake_batch(batch, shape, device)


def measure_sizes(attachments: Attachments, batch: Batch, shape: tuple[int, int]) -> ModelCosts:
    """Like `measure`, but on fake tensors: bytes are as for real tensors, and times are meaningless.

    Args:
        attachments: attachments of a job with resolved features, whose model is on the meta device and gets fake
            tensors.
        batch, shape: see `memory.predicted.predict`.

    Raises:
        Exception: the error of a feature or operator that cannot work without values.
    """
    with _fake_job(attachments, batch, shape) as (job, micro):
        measuring = _Measuring(job, World(), update, sustained=0.0)
        measuring.measure(micro, shape[0])
        return measuring.costs(shape[:1])


def _slowest(own: ModelCosts, everyone: Sequence[Any]) -> ModelCosts:
    """The costs of the slowest rank: the maximum of all times and bytes over ranks, and the minimum of speeds."""

    def part(place: Callable[[Any], Any]) -> PartCosts:
        parts = [place(costs) for costs in everyone]
        most = {
            name: tuple(map(max, zip(*(one[name] for one in parts), strict=True)))
            for name in ("forward", "backward", "held")
        }
        return PartCosts(**most, trained=parts[0]["trained"], frozen=parts[0]["frozen"])

    return replace(
        own,
        blocks=tuple(part(lambda costs, index=index: costs["blocks"][index]) for index in range(len(own.blocks))),
        before=part(lambda costs: costs["before"]),
        behind=part(lambda costs: costs["behind"]),
        optimizer=max(costs["optimizer"] for costs in everyone),
        moved=min(costs["moved"] for costs in everyone),
    )


class _Measuring:
    """Measures the parts of a job's model on one rank."""

    def __init__(
        self,
        job: Job,
        world: World,
        update: Callable[[Optimizer], object] = methodcaller("step"),
        sustained: float = SUSTAINED,
    ) -> None:
        self.job, self.world, self.update, self.sustained = job, world, update, sustained
        self.attachments = attachments_of(job)
        self.model = self.attachments.module
        self.blocks = list[nn.Module]()  # the model's repeated blocks; empty if a pipeline cannot cut it between them
        with suppress(ConfigError):
            self.blocks = Layout(self.model).blocks
        self.kind_of = list[int]()  # index of a block -> index of the equal block that is measured in its place
        self.timed = dict[int, _Timed]()
        self.before, self.behind = _Timed(), _Timed()
        self.hidden = list[int]()  # bytes of hidden states per sample: before the first block, then after each block
        self.scored = 0
        self.inputs = dict[int, tuple[tuple[Any, ...], dict[str, Any]]]()
        self.outputs = dict[int, Any]()
        self._entered = self._left = 0.0

    def measure(self, batch: Batch, samples: int) -> None:
        """Measure all parts of the model on a batch."""
        if self.blocks and not self._capture(batch, samples):
            self.blocks, self.kind_of, self.timed, self.hidden = [], [], {}, []
        kinds = sorted({*self.kind_of})
        around, *blocks = _medians([self._around(batch, samples), *map(self._block, kinds)])
        before, behind, behind_back, before_back = around
        self.before.note(before, before_back)
        self.behind.note(behind, behind_back)
        for index, (forward, backward) in zip(kinds, blocks, strict=True):
            self.timed[index].note(forward, backward)

    # -- blocks ------------------------------------------------------------------------------------------------------

    def _capture(self, batch: Batch, samples: int) -> bool:
        """Record the inputs and outputs of one block of each kind; False if the blocks are not called in order."""
        self.inputs.clear()
        self.outputs.clear()
        kinds, order, sizes = dict[Any, int](), list[int](), list[int]()
        kind_of = dict[int, int]()

        def watched(index: int, inner: Callable[..., Any]) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                output = inner(*args, **kwargs)
                hidden = _hidden_of(args, kwargs)
                shape = None if hidden is None else tuple(hidden.shape)
                parameters = self.blocks[index].named_parameters()
                form = tuple((name, tuple(one.shape), one.dtype, one.requires_grad) for name, one in parameters)
                kind = kind_of[index] = kinds.setdefault((type(self.blocks[index]), form, shape), index)
                if kind == index:
                    self.inputs[index] = args, kwargs
                if not order:
                    sizes.append(0 if hidden is None else hidden.nbytes // samples)
                order.append(index)
                result = output[0] if isinstance(output, tuple) else output
                sizes.append(result.nbytes // samples if isinstance(result, Tensor) else 0)
                self.outputs[index] = output
                return output

            return forward

        with self._patched(watched), torch.no_grad():
            self.attachments.forward(self.job.model, batch)
        self.kind_of, self.hidden = [kind_of.get(index, -1) for index in range(len(self.blocks))], sizes
        self.timed = {kind: self.timed.get(kind, _Timed()) for kind in {*self.kind_of}}
        return order == [*range(len(self.blocks))] and all(sizes)

    @contextmanager
    def _patched(self, forward_of: Callable[[int, Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
        """Context in which each block's `forward` is replaced by `forward_of(index, forward)`."""
        with ExitStack() as stack:
            for index, block in enumerate(self.blocks):
                own = block.__dict__.get("forward")
                stack.callback(_restore, block, own)
                block.forward = forward_of(index, block.forward)
            yield

    def _block(self, index: int) -> Turn:
        """Note the bytes of a block; returns a function that times its forward and backward pass."""
        block, timed = self.blocks[index], self.timed[index]
        args, kwargs = pytree.tree_map_only(Tensor, _detached, self.inputs[index])
        timed.trained, timed.frozen = _bytes_of(block.parameters(), block.buffers())

        def once() -> tuple[float, float]:
            began = time.perf_counter()
            with self.attachments.computing():
                output = block(*args, **kwargs)
            result = output[0] if isinstance(output, tuple) else output
            synchronize(self.world.device)
            ended = time.perf_counter()
            if result.requires_grad:
                result.backward(torch.ones_like(result))
            synchronize(self.world.device)
            backward = time.perf_counter() - ended
            self._forget_gradients()
            return ended - began, backward

        with _holding(block) as held:
            once()
        timed.held.append(held.total)
        return partial(self._repeated, once)

    # -- the layers outside the blocks -------------------------------------------------------------------------------

    def _around(self, batch: Batch, samples: int) -> Turn:
        """Note the bytes of the layers outside the blocks; returns a function that times their passes.

        The function returns seconds: forward before the blocks and behind them, backward behind them and before them.
        """
        last = len(self.blocks) - 1
        first_hidden = list[Tensor]()

        def passes_by(index: int, inner: Callable[..., Any]) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                hidden = _hidden_of(args, kwargs)
                if index == 0 and hidden is not None:
                    self._entered = time.perf_counter()
                    first_hidden[:] = [hidden]
                self._left = time.perf_counter()
                output = self.outputs[index]
                return pytree.tree_map_only(Tensor, _detached, output) if index == last else output

            return forward

        def once() -> tuple[float, float, float, float]:
            began = self._entered = self._left = time.perf_counter()
            with self.attachments.computing():
                output = self.attachments.forward(self.job.model, batch)
                total, count = sum_and_count(self.attachments.loss(output, batch))
            synchronize(self.world.device)
            ended = time.perf_counter()
            self.scored = _nbytes(output) // samples
            (total / count).backward()
            synchronize(self.world.device)
            middle = time.perf_counter()
            for hidden in first_hidden:
                if hidden.requires_grad:
                    hidden.backward(torch.ones_like(hidden))
            synchronize(self.world.device)
            stopped = time.perf_counter()
            self._forget_gradients()
            return self._entered - began, ended - self._left, middle - ended, stopped - middle

        with self._patched(passes_by), _holding(self.model) as held:
            once()
        inside = {parameter for block in self.blocks for parameter in block.parameters()}
        buffers = {id(buffer) for block in self.blocks for buffer in block.buffers()}
        rest = [parameter for parameter in self.model.parameters() if parameter not in inside]
        self.behind.trained, self.behind.frozen = _bytes_of(
            rest, [buffer for buffer in self.model.buffers() if id(buffer) not in buffers]
        )
        self.before.held.append(0.0)
        self.behind.held.append(held.total)

        def repeated() -> tuple[float, ...]:
            with self._patched(passes_by):
                return self._repeated(once)

        return repeated

    # -- the rest ----------------------------------------------------------------------------------------------------

    def costs(self, sizes: tuple[int, ...]) -> ModelCosts:
        """All measurements, including the optimizer's."""
        before, behind, tied = self._weights_around()
        self.before.trained, self.behind.trained = before, behind
        optimizer, state = self._optimizer()
        return ModelCosts(
            samples=sizes,
            blocks=tuple(self.timed[kind].costs() for kind in self.kind_of),
            before=self.before.costs(),
            behind=self.behind.costs(),
            hidden=tuple(self.hidden),
            tied=tied,
            scored=self.scored,
            optimizer=optimizer,
            state=state,
            moved=self._moved(),
        )

    def _weights_around(self) -> tuple[int, int, int]:
        """Bytes of trained weights before the blocks, after the blocks, and of weights in both places (tied weights).

        The second number includes the third; the first does not.
        """

        def trained(parameters: Any) -> int:
            return sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)

        if not self.blocks:
            return 0, self.behind.trained, 0
        layout = Layout(self.model)
        both = layout.before & layout.behind
        return trained(layout.before - both), trained(layout.behind), trained(both)

    def _optimizer(self) -> tuple[float, float]:
        """Seconds of a step and bytes of state of the optimizer, per byte of trained weights, measured on one block."""
        block = max(self.blocks, key=lambda one: sum(p.nbytes for p in one.parameters()), default=self.model)
        trained = [parameter for parameter in block.parameters() if parameter.requires_grad]
        total = sum(parameter.nbytes for parameter in trained)
        if not total:
            return 0.0, 0.0
        optimizer = self.job.optimizer
        before = [parameter.detach().clone() for parameter in trained]

        def once() -> tuple[float]:
            for parameter in trained:
                parameter.grad = torch.full_like(parameter, 1e-4)
            synchronize(self.world.device)
            began = time.perf_counter()
            self.update(optimizer)
            synchronize(self.world.device)
            return (time.perf_counter() - began,)

        with self.attachments.hooks_off():
            once()  # allocates the optimizer's state
            ((seconds,),) = _medians([partial(self._repeated, once)])
        leaves = pytree.tree_leaves([optimizer.state.get(parameter, {}) for parameter in trained])
        state = {id(leaf): leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor)}
        optimizer.state.clear()
        self._forget_gradients()
        with torch.no_grad():
            for parameter, old in zip(trained, before, strict=True):
                parameter.copy_(old)
        return seconds / total, sum(state.values()) / total

    def _moved(self) -> float:
        """Bytes per second that a memory-bound operator reads and writes."""
        flat = torch.rand(1 << 22, device=self.world.device)
        out = torch.empty_like(flat)
        seconds = list[float]()
        for _ in range(TURNS + 1):
            self._wait()
            began = time.perf_counter()
            torch.add(flat, 1, out=out)
            synchronize(self.world.device)
            seconds.append(time.perf_counter() - began)
        return 2 * flat.nbytes / median(seconds[1:])

    def _repeated(self, once: Callable[[], tuple[float, ...]]) -> tuple[float, ...]:
        """Mean of each of the numbers that `once` returns, over repetitions that take at least `sustained` seconds."""
        self._wait()
        rounds, began = [once()], time.perf_counter()
        while time.perf_counter() - began < self.sustained:
            rounds.append(once())
        return tuple(map(fmean, zip(*rounds, strict=True)))

    def _wait(self) -> None:
        synchronize(self.world.device)
        self.world.barrier()

    def _forget_gradients(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None


class HeldBytes:
    """Counts the bytes of tensors that autograd saves for the backward pass, except parameters and buffers."""

    def __init__(self, module: nn.Module) -> None:
        self.known = {tensor.untyped_storage()._cdata for tensor in (*module.parameters(), *module.buffers())}
        self.total = 0

    def note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.known:
            self.known.add(storage._cdata)
            self.total += storage.nbytes()
        return tensor


@contextmanager
def _holding(module: nn.Module) -> Iterator[HeldBytes]:
    held = HeldBytes(module)
    with torch.autograd.graph.saved_tensors_hooks(held.note, lambda tensor: tensor):
        yield held


def _restore(block: nn.Module, own: Any) -> None:
    if own is None:
        del block.forward
    else:
        block.forward = own


def _hidden_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The first floating-point tensor among a block's arguments."""
    tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.is_floating_point())
    return next(tensors, None)


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _bytes_of(parameters: Any, buffers: Any) -> tuple[int, int]:
    """Bytes of trained parameters; bytes of frozen parameters and buffers."""
    parameters = [*parameters]
    trained = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
    return trained, sum(p.nbytes for p in parameters) - trained + sum(buffer.nbytes for buffer in buffers)


def _nbytes(output: Any) -> int:
    leaves = pytree.tree_leaves(output)
    if not any(isinstance(leaf, Tensor) for leaf in leaves):
        leaves = (
            [value for value in vars(output).values() if isinstance(value, Tensor)]
            if hasattr(output, "__dict__")
            else []
        )
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
