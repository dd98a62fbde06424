"""Attaches ZeRO to a job: shards for the optimizer to update, and hooks that reduce gradients and gather parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shoestring._torch import allow_any_gradient, step_without_hooks
from shoestring.collectives import broadcast_tensors
from shoestring.core.attachments import Attachments
from shoestring.core.errors import ConfigError
from shoestring.core.feature import DATA, Phase
from shoestring.memory.zero.buckets import ShardedParameter, deal_buckets
from shoestring.memory.zero.buffers import Buffers
from shoestring.memory.zero.collectives import Collectives
from shoestring.memory.zero.gradients import Gradients
from shoestring.memory.zero.measured import StepMetrics
from shoestring.memory.zero.placement import is_half
from shoestring.memory.zero.shardable import check_shardable, steps_apart
from shoestring.memory.zero.weights import Weights
from shoestring.models.blocks import repeated
from shoestring.sharded import local_part

if TYPE_CHECKING:
    from shoestring.memory.settings.zero import Zero

PIECES = 32  # maximum number of pieces of the optimizer's step; only one piece at a time has float32 gradients
# minimum elements of a piece on this rank, so that its update takes longer than the call's overhead
SMALLEST_PIECE = 2**18


def divide(attachments: Attachments, settings: Zero) -> Divided | None:
    """Divide the optimizer's tensors among the ranks; None if there is only one rank and no copies are needed."""
    if attachments.world.ranks_over(settings.over) == 1 and not settings.steps_copies(attachments.trained.values()):
        return None
    attachments.claim(settings.over, trained=True, whole=True)
    broadcast_tensors([*attachments.module.parameters(), *attachments.module.buffers()], attachments.world.group(DATA))
    return Divided(attachments, settings)


class Divided:
    """The shards of one rank, and the work that a step does on these shards."""

    def __init__(self, attachments: Attachments, settings: Zero) -> None:
        self.attachments, self.stage = attachments, settings.stage
        self.mesh = attachments.world.mesh_over(settings.divided_over)
        group = attachments.world.group(settings.divided_over)
        # The axes along which ranks hold the same shards: hosts, if the state is replicated across hosts.
        between = [axis for axis in settings.over if axis not in settings.divided_over]
        across = Collectives(attachments.world.group(between)) if attachments.world.ranks_over(between) > 1 else None
        collectives = self.collectives = Collectives(group, across)
        # torch.compile traces inner modules together with their hooks, so a compiled module is one unit.
        compiled = (
            attachments.module._compiled_call_impl is not None or type(attachments.module).__name__ == "OptimizedModule"
        )
        self.units = [] if compiled else repeated(attachments.module)
        parts = self._parts(attachments, collectives)
        self.buckets = deal_buckets(parts, int(1e6 * settings.bucket_mb))
        placement = settings.placement(attachments, parts)
        self.trained = {part.name: self.spread(part, placement.shard(part)) for part in parts}
        for tensor in self.trained.values():
            allow_any_gradient(tensor.requires_grad_())
        buffers = Buffers(attachments.module.buffers(), collectives)
        self.gradients = Gradients(
            self.buckets, buffers, collectives, 1e6 * settings.in_flight_mb, placement, self.accumulate
        )
        self.gradients.exchanging = settings.stage == 2
        self.weights = Weights(self.buckets, collectives, placement)
        self.late = settings.late_steps(self)
        self.pieces = [range(len(self.buckets))]
        self._hidden: dict[str, Tensor] = {}  # gradients of pieces that are not updated yet, by parameter name
        attachments.shard(over=settings.over, sync=self.sync, trained=self.trained, refresh=self.weights.refresh)
        attachments.exits.callback(self._close)
        for part in self.gradients.parts.values():
            hook = part.parameter.register_post_accumulate_grad_hook(partial(self._arrive, part))
            attachments.exits.callback(hook.remove)
        before: Any = torch.compiler.disable(self._before_forward)
        attachments.exits.callback(attachments.module.register_forward_pre_hook(before).remove)
        for number, block in enumerate(self.units, 1):
            attachments.exits.callback(block.register_forward_pre_hook(partial(self._before_block, number)).remove)
        attachments.exits.callback(
            attachments.module.register_state_dict_pre_hook(lambda *_: self.weights.wait()).remove
        )
        attachments.surround_evaluation(self._evaluating)
        # Inserted first in its phase, because the work of other features needs gathered weights and reduced gradients.
        attachments.phases[Phase.FORWARD].insert(0, self._before_step)
        attachments.phases[Phase.CLIP].insert(0, self.gradients.finish)
        if self.late is not None:
            attachments.phases[Phase.CLIP].insert(0, self.late.end)
        attachments.phases[Phase.PROJECT].insert(0, self._step_others)
        attachments.at(Phase.WAIT, self._hide_others)
        attachments.at(Phase.OUTER, self._gather_rest)
        attachments.at(Phase.CAPTURE, StepMetrics(attachments, self.buckets, self.collectives).publish)

    def check_optimizer(self, name: str) -> None:
        """Refuse an optimizer that treats shards unlike whole tensors; divide its step into pieces if possible."""
        optimizer = self.attachments.optimizer
        if self.mesh is not None:
            check_shardable(optimizer, self.mesh, name)
        if steps_apart(optimizer):
            self.pieces = deal_pieces([bucket.width for bucket in self.buckets])
        elif self.late is not None:
            message = f"`{name}.late` updates parameters in several calls, which {type(optimizer).__name__} cannot do"
            raise ConfigError(message, hint="leave it out, or use optim.AdamW or optim.SGD")

    # -- shards ------------------------------------------------------------------------------------------------------

    def _parts(self, attachments: Attachments, collectives: Collectives) -> list[ShardedParameter]:
        """The trained parameters, each with its unit: the number of the only block that uses the parameter, or 0."""
        units: dict[Tensor, set[int]] = {}
        for number, block in enumerate(self.units, 1):
            for parameter in block.parameters():
                units.setdefault(parameter, set()).add(number)
        unit_of = {parameter: numbers.pop() for parameter, numbers in units.items() if len(numbers) == 1}
        inside = {module for block in self.units for module in block.modules()}
        for module in attachments.module.modules():
            if module not in inside:
                for parameter in module.parameters(recurse=False):
                    unit_of.pop(parameter, None)  # the parameter is shared with a module outside the blocks
        return [
            ShardedParameter(name, tensor, unit_of.get(tensor, 0), collectives.size, collectives.rank)
            for name, tensor in attachments.trained.items()
        ]

    def spread(self, part: ShardedParameter, shard: Tensor) -> Tensor:
        """Wrap a shard, or the gradient of a shard, in a DTensor; on one rank, return the shard unchanged."""
        if self.mesh is None:
            return shard
        from torch.distributed.tensor import DTensor, Replicate, Shard

        shape, stride = part.parameter.shape, part.parameter.stride()
        placement = Replicate() if part.whole else Shard(0)
        return DTensor.from_local(shard, self.mesh, [placement], run_check=False, shape=shape, stride=stride)

    # -- hooks -------------------------------------------------------------------------------------------------------

    def _arrive(self, part: ShardedParameter, _: Tensor) -> None:
        self.gradients.arrive(part)

    def _before_forward(self, module: nn.Module, _: object) -> None:
        if module.training and torch.is_grad_enabled() and self.gradients.arrived:
            self.gradients.close()
        self.weights.wait(0 if self.units else None)

    def _before_block(self, number: int, module: nn.Module, _: object) -> None:
        self.weights.wait(number)

    def _before_step(self) -> None:
        others = [
            work for work in self.attachments.phases[Phase.FORWARD] if work not in (self._before_step, self._begin_late)
        ]
        if self.late is not None:
            # Other features may still read weights that late updates overwrite, so their work runs first.
            for work in self.attachments.phases[Phase.WAIT]:
                if work != self._hide_others:
                    work()
            self.attachments.phases[Phase.FORWARD][:] = [self._before_step, *others, self._begin_late]
        if others:  # other features may read any parameter
            self.weights.wait()

    def _begin_late(self) -> None:
        assert self.late is not None
        self.late.begin()

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        self.weights.wait()
        yield

    @contextmanager
    def sync(self, last: bool) -> Iterator[None]:
        """Context of each micro-batch's forward and backward pass; see `Attachments.shard`."""
        gradients = self.gradients
        gradients.exchanging = last or self.stage == 2
        gradients.narrow = last and not self.attachments.gradients
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
        """Add this rank's shard of a mean gradient to the gradient for the optimizer."""
        trained = self.trained[part.name]
        if trained.grad is None:
            trained.grad = self.spread(part, mean)
            return
        held = local_part(trained.grad)
        if not is_half(held):
            held += mean
        else:
            trained.grad = self.spread(part, held.float() + mean)

    def _hide_others(self) -> None:
        """Hide the gradients of all pieces but the first, so that the optimizer's step updates only the first."""
        self.weights.wait()  # for weights that the last forward pass did not use
        self.gradients.buffers.align()
        if self.late is not None:
            self.late.defer()
        for piece in self.pieces[1:]:
            for part in self._parts_of(piece):
                if (grad := self.trained[part.name].grad) is not None:
                    self._hidden[part.name], self.trained[part.name].grad = grad, None
        self._show(self.pieces[0])

    def _step_others(self) -> None:
        """Update the remaining pieces one after another, while the weights of the previous piece are gathered."""
        project, outer = (self.attachments.phases[phase] for phase in (Phase.PROJECT, Phase.OUTER))
        gathering = len(project) == len(outer) == 1  # no other feature will write to the updated weights
        if outer[-1] != self._gather_rest:
            outer.append(outer.pop(outer.index(self._gather_rest)))
        for number, piece in enumerate(self.pieces):
            if number:
                self._show(piece)
                step_without_hooks(self.attachments.optimizer)
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
        """Restore the gradients of a piece, in the data type of the shards."""
        for part in self._parts_of(piece):
            trained = self.trained[part.name]
            grad = self._hidden.pop(part.name, trained.grad)
            trained.grad = None if grad is None else grad.to(trained.dtype)

    def _parts_of(self, piece: range) -> Iterator[ShardedParameter]:
        return (part for index in piece for part in self.buckets[index].parts)


def deal_pieces(widths: Sequence[int]) -> list[range]:
    """Group consecutive buckets into pieces with about the same number of elements."""
    pieces: list[range] = []
    passed, length = 0, max(sum(widths) / PIECES, SMALLEST_PIECE)
    for index, width in enumerate(widths):
        if not pieces or passed >= len(pieces) * length:
            pieces.append(range(index, index))
        pieces[-1] = range(pieces[-1].start, index + 1)
        passed += width
    return pieces
