"""Attaches ZeRO to a job: shards that the optimizer steps, and hooks that exchange gradients and gather parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from shoestring._torch import allow_any_gradient, step_without_hooks
from shoestring.core.errors import ConfigError
from shoestring.core.feature import DATA, Phase
from shoestring.core.job import Job
from shoestring.memory.zero.buckets import ShardedParameter, deal_buckets
from shoestring.memory.zero.buffers import Buffers
from shoestring.memory.zero.collectives import Collectives
from shoestring.memory.zero.gradients import Gradients
from shoestring.memory.zero.measured import StepMetrics
from shoestring.memory.zero.placement import is_half
from shoestring.memory.zero.shardable import check_shardable, steps_apart
from shoestring.memory.zero.weights import Weights
from shoestring.models.blocks import repeated

if TYPE_CHECKING:
    from shoestring.memory.settings.zero import Zero

PIECES = 32  # of the optimizer's step, at most, of which one at a time has gradients in float32
SMALLEST_PIECE = 2**18  # elements of this rank, which take longer to step than torch takes to begin a step


def divide(job: Job, settings: Zero) -> Divided | None:
    """Divide what the optimizer steps among the ranks, where the settings place it."""
    if job.world.ranks_over(settings.over) == 1 and not settings.steps_copies(job.trained.values()):
        return None
    broadcast_tensors([*job.module.parameters(), *job.module.buffers()], job.world.group(DATA))
    return Divided(job, settings)


class Divided:
    """The shards of one rank, and all that happens to them in a step."""

    def __init__(self, job: Job, settings: Zero) -> None:
        self.job, self.stage = job, settings.stage
        self.mesh = job.world.mesh_over(settings.divided_over)
        group = job.world.group(settings.divided_over)
        # Between hosts, where these hold the same shards.
        between = [axis for axis in settings.over if axis not in settings.divided_over]
        across = Collectives(job.world.group(between)) if job.world.ranks_over(between) > 1 else None
        collectives = self.collectives = Collectives(group, across)
        self.units = [] if _is_compiled(job.module) else repeated(job.module)
        parts = self._parts(job, collectives)
        self.buckets = deal_buckets(parts, int(1e6 * settings.bucket_mb))
        placement = settings.placement(job, parts)
        self.trained = {part.name: self.spread(part, placement.shard(part)) for part in parts}
        for tensor in self.trained.values():
            allow_any_gradient(tensor.requires_grad_())
        buffers = Buffers(job.module.buffers(), collectives)
        self.gradients = Gradients(
            self.buckets, buffers, collectives, 1e6 * settings.in_flight_mb, placement, self.accumulate
        )
        self.gradients.exchanging = settings.stage == 2
        self.weights = Weights(self.buckets, collectives, placement)
        self.late = settings.late_steps(self)
        self.pieces = [range(len(self.buckets))]
        self._hidden: dict[str, Tensor] = {}  # gradients of the pieces that are not stepped yet
        self._attach(settings.over)

    def check_optimizer(self, name: str) -> None:
        """Refuse an optimizer that does not step shards as whole tensors; step in pieces where it allows that."""
        optimizer = self.job.built_optimizer
        if self.mesh is not None:
            check_shardable(optimizer, self.mesh, name)
        if steps_apart(optimizer):
            self.pieces = deal_pieces([bucket.width for bucket in self.buckets])
        elif self.late is not None:
            said = f"`{name}.late` lets parameters be stepped apart, which {type(optimizer).__name__} cannot do"
            raise ConfigError(said, hint="leave it out, or use optim.AdamW or optim.SGD")

    # -- shards ------------------------------------------------------------------------------------------------------

    def _parts(self, job: Job, collectives: Collectives) -> list[ShardedParameter]:
        units: dict[Tensor, set[int]] = {}
        for number, block in enumerate(self.units, 1):
            for parameter in block.parameters():
                units.setdefault(parameter, set()).add(number)
        of = {parameter: numbers.pop() for parameter, numbers in units.items() if len(numbers) == 1}
        outside = {p for p in _parameters_outside(job.module, self.units) if p in of}  # shared with what is in no block
        return [
            ShardedParameter(
                name, tensor, 0 if tensor in outside else of.get(tensor, 0), collectives.size, collectives.rank
            )
            for name, tensor in job.trained.items()
        ]

    def spread(self, part: ShardedParameter, shard: Tensor) -> Tensor:
        """A shard, or the gradient of one, as part of the whole tensor."""
        if self.mesh is None:
            return shard
        shape, stride = part.parameter.shape, part.parameter.stride()
        placement = Replicate() if part.whole else Shard(0)
        return DTensor.from_local(shard, self.mesh, [placement], run_check=False, shape=shape, stride=stride)

    # -- hooks -------------------------------------------------------------------------------------------------------

    def _attach(self, over: Sequence[str]) -> None:
        job = self.job
        job.shard(over=over, sync=self.sync, trained=self.trained, refresh=self.weights.refresh)
        job.exits.callback(self._close)
        for part in self.gradients.parts.values():
            hook = part.parameter.register_post_accumulate_grad_hook(partial(self._arrive, part))
            job.exits.callback(hook.remove)
        before: Any = torch.compiler.disable(self._before_forward)
        job.exits.callback(job.module.register_forward_pre_hook(before).remove)
        for number, block in enumerate(self.units, 1):
            job.exits.callback(block.register_forward_pre_hook(partial(self._before_block, number)).remove)
        job.exits.callback(job.module.register_state_dict_pre_hook(lambda *_: self.weights.wait()).remove)
        job.surround_evaluation(self._evaluating)
        # Before the work of other features, which may read or write what they find.
        job.phases[Phase.FORWARD].insert(0, self._before_step)
        job.phases[Phase.CLIP].insert(0, self.gradients.finish)
        if self.late is not None:
            job.phases[Phase.CLIP].insert(0, self.late.end)
        job.phases[Phase.PROJECT].insert(0, self._step_others)
        job.at(Phase.WAIT, self._hide_others)
        job.at(Phase.OUTER, self._gather_rest)
        job.at(Phase.CAPTURE, StepMetrics(job, self.buckets, self.collectives).publish)

    def _arrive(self, part: ShardedParameter, _: Tensor) -> None:
        self.gradients.arrive(part)

    def _before_forward(self, module: nn.Module, _: object) -> None:
        if module.training and torch.is_grad_enabled() and self.gradients.arrived:
            self.gradients.close()
        self.weights.wait(0 if self.units else None)

    def _before_block(self, number: int, module: nn.Module, _: object) -> None:
        self.weights.wait(number)

    def _before_step(self) -> None:
        if self.late is not None:
            for work in self.job.phases[Phase.WAIT]:  # for what the late steps overwrite
                if work != self._hide_others:
                    work()
            self.late.begin()
        # Other work of this phase may read any parameter.
        if len(self.job.phases[Phase.FORWARD]) > 1:
            self.weights.wait()

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        self.weights.wait()
        yield

    @contextmanager
    def sync(self, last: bool) -> Iterator[None]:
        """For `Job.shard`: around each micro-batch."""
        gradients = self.gradients
        gradients.exchanging = last or self.stage == 2
        gradients.narrow = last and not self.job.gradients
        try:
            yield
            if gradients.exchanging:
                gradients.close()
            if last:
                gradients.collect()
        except BaseException:
            gradients.abandon()
            raise
        finally:
            gradients.exchanging, gradients.narrow = self.stage == 2, True

    def _close(self) -> None:
        self.weights.wait()
        if self.late is not None:
            self.late.close()

    # -- the step ----------------------------------------------------------------------------------------------------

    def accumulate(self, part: ShardedParameter, mean: Tensor) -> None:
        """Add this rank's shard of a mean gradient to what the optimizer steps with."""
        trained = self.trained[part.name]
        if trained.grad is None:
            trained.grad = self.spread(part, mean)
            return
        held = trained.grad.to_local() if isinstance(trained.grad, DTensor) else trained.grad
        if not is_half(held):
            held += mean
        else:
            trained.grad = self.spread(part, held.float() + mean)

    def _hide_others(self) -> None:
        """Leave the optimizer's own step the first piece, whose gradients get the type of what it steps."""
        self.weights.wait()  # for what the last forward pass did not use
        self.gradients.buffers.align()
        if self.late is not None:
            self.late.defer()
        for piece in self.pieces[1:]:
            for part in self._parts_of(piece):
                if (grad := self.trained[part.name].grad) is not None:
                    self._hidden[part.name], self.trained[part.name].grad = grad, None
        self._show(self.pieces[0])

    def _step_others(self) -> None:
        """Step piece after piece, each while the one before it is gathered."""
        project, outer = (self.job.phases[phase] for phase in (Phase.PROJECT, Phase.OUTER))
        gathering = len(project) == len(outer) == 1  # no other feature writes to what was stepped
        if outer[-1] != self._gather_rest:
            outer.append(outer.pop(outer.index(self._gather_rest)))
        for number, piece in enumerate(self.pieces):
            if number:
                self._show(piece)
                step_without_hooks(self.job.built_optimizer)
            for part in self._parts_of(piece):
                self.trained[part.name].grad = None
            if gathering:
                self._gather(piece)
        self._hidden.clear()
        self._ungathered = [] if gathering else self.pieces

    def _gather_rest(self) -> None:
        for piece in self._ungathered:
            self._gather(piece)

    def _gather(self, piece: range) -> None:
        for index in piece:
            if self.late is None or self.late.write(index):
                self.weights.start(index)

    def _show(self, piece: range) -> None:
        for part in self._parts_of(piece):
            trained = self.trained[part.name]
            grad = self._hidden.pop(part.name, trained.grad)
            trained.grad = None if grad is None else grad.to(trained.dtype)

    def _parts_of(self, piece: range) -> Iterator[ShardedParameter]:
        return (part for index in piece for part in self.buckets[index].parts)


def deal_pieces(widths: Sequence[int]) -> list[range]:
    """Runs of buckets of about the same number of elements."""
    pieces: list[range] = []
    passed, each = 0, max(sum(widths) / PIECES, SMALLEST_PIECE)
    for index, width in enumerate(widths):
        if not pieces or passed >= len(pieces) * each:
            pieces.append(range(index, index))
        pieces[-1] = range(pieces[-1].start, index + 1)
        passed += width
    return pieces


@torch.no_grad()
def broadcast_tensors(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Give all ranks the first one's parameters and buffers."""
    if group is None:
        return
    for tensor in tensors:
        dense = tensor.contiguous()
        dist.broadcast(dense, group=group, group_src=0)
        if dense is not tensor:
            tensor.copy_(dense)


def _is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile traces it, and with it the hooks of the modules inside."""
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"


def _parameters_outside(module: nn.Module, blocks: Sequence[nn.Module]) -> Iterator[Tensor]:
    inside = {each for block in blocks for each in block.modules()}
    for each in module.modules():
        if each not in inside:
            yield from each.parameters(recurse=False)
