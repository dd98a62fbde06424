"""Trains with split operators: each rank holds its shards of the weights, and runs its own program in each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from shoestring._torch import tree_leaves
from shoestring.collectives import broadcast_tensors
from shoestring.core.attachments import Attachments
from shoestring.core.errors import ConfigError
from shoestring.core.step import MicroBatches
from shoestring.core.task import Batch
from shoestring.core.trace import span
from shoestring.graph import names
from shoestring.graph.choosing import (
    PREFIX,
    BatchForm,
    ChosenPlan,
    TracedStep,
    chosen,
    costs_of,
    digest,
    trace_job,
)
from shoestring.graph.overlap import overlap
from shoestring.graph.placements import Placement, divide_over
from shoestring.graph.program import RankProgram
from shoestring.graph.running import MessageTotals, run_rank

if TYPE_CHECKING:
    from shoestring.graph.settings import Split


def attach(attachments: Attachments, settings: Split) -> None:
    """Let the ranks of a host split the operators of each step. A collective; does nothing with one rank."""
    ranks = attachments.world.ranks_over(settings.over)
    if ranks == 1:
        return
    attachments.claim(settings.over, trained=True, whole=True)
    plan = chosen(attachments, settings)
    assert plan is not None  # None only in `shoestring check` without an example
    traced, alike = trace_job(attachments, settings), attachments.world.alike
    alike({f"{settings.name}: traced step": traced.digest}, "start all ranks with the same code, versions and data")
    if traced.digest != plan.digest:
        message = f"the step that `{settings.name}` has planned is traced in another way the second time"
        raise ConfigError(message, hint="let the model and its loss compute the same each time")
    divided = attachments.world.agree(lambda: plan.divided(traced, settings.mesh or (ranks,)))
    program = divided.program()
    if settings.order == "searched":
        program = overlap(program, costs_of(settings, ranks)[0][-1]).program
    alike(
        {f"{settings.name}: order of operators": digest(program.graph)}, "name the same file in `cluster` on all ranks"
    )
    SplitStep(attachments, settings.over, traced, plan, program).attach()


class SplitStep:
    """The shards of the model that a rank holds, and the program that it runs in each step."""

    def __init__(
        self,
        attachments: Attachments,
        axes: tuple[str, ...],
        traced: TracedStep,
        plan: ChosenPlan,
        program: RankProgram,
    ) -> None:
        world, mesh = attachments.world, attachments.world.mesh
        assert mesh is not None
        self.attachments, self.model = attachments, attachments.module
        self.traced, self.plan, self.program = traced, plan, program
        self.group, self.groups = world.group(axes), [group for axis in axes if (group := world.group([axis]))]
        self.mesh, self.ranks, self.index = mesh[axes], program.ranks, world.index_over(axes)
        world.mesh_over(axes)  # torch then gathers tensors sharded along several axes in one message
        self.traffic = MessageTotals()
        self.stepped: dict[str, DTensor] = {}
        """Name of a parameter -> DTensor of this rank's shard (or of the whole parameter), which the optimizer
        steps."""
        self.parts: dict[str, nn.Parameter] = {}
        """Name of a sharded parameter -> the shard that the model holds instead of it."""
        self._turn = 0
        self._whole: list[tuple[nn.Module, str, nn.Parameter]] = []
        """(module, name, shard) of the parameters that are whole until the running evaluation ends."""
        holders = (node for node in traced.step.graph.nodes if node.op == "placeholder")
        self.placements = dict(zip(holders, program.inputs, strict=True))
        self.buffers = {name: self.model.get_buffer(name.removeprefix(PREFIX)) for name in traced.step.nodes.buffers}

    # -- weights -------------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Replace parameters by this rank's shards, which the optimizer steps, and let steps run the program."""
        attachments, facts = self.attachments, self.attachments.trace.facts
        # Ranks may have initialised their weights differently, so all take those of the first rank.
        broadcast_tensors([*self.model.parameters(), *self.model.buffers()], self.group)
        facts[names.WHOLE_FACT] = float(sum(tensor.nbytes for tensor in self.model.parameters()))
        trained = {name: tensor for name, tensor in attachments.named().items() if tensor.requires_grad}
        placed = {
            name.removeprefix(PREFIX): self.placements[node] for name, node in self.traced.step.nodes.parameters.items()
        }
        for name, parameter in trained.items():
            self.stepped[name] = self._placed(parameter.detach(), placed[name])
        attachments.shard(over=(), trained=self.stepped, run=self.run)
        whole = {parameter: name for name, parameter in trained.items()}
        for module, name, parameter in [*_parameters_of(self.model)]:
            own = whole.get(parameter, "")
            if own and any(at >= 0 for at in placed[own]):
                if own not in self.parts:  # a tied parameter has several modules
                    self.parts[own] = nn.Parameter(self.stepped[own].to_local().detach())
                module._parameters[name] = self.parts[own]
        attachments.surround_evaluation(self._evaluating)
        facts[names.HELD_FACT] = float(sum(tensor.nbytes for tensor in self.model.parameters()))
        facts |= {names.SENT_FACT: 0.0, names.WAITED_FACT: 0.0, names.MESSAGES_FACT: len(self.program.messages)}

    def _placed(self, whole: Tensor, at: Sequence[Placement]) -> DTensor:
        """A DTensor of this rank's shard of a parameter, or of the whole parameter."""
        local = self._part(whole, at)
        local = whole if local is whole else local.clone()
        placements = [Shard(dim) if dim >= 0 else Replicate() for dim in at]
        layout: dict[str, Any] = {"shape": whole.shape, "stride": whole.stride()}
        placed = DTensor.from_local(local, self.mesh, placements, run_check=False, **layout)
        placed.requires_grad_()
        return placed

    def _part(self, whole: Tensor, at: Sequence[Placement]) -> Tensor:
        """This rank's shard of a tensor, or the whole tensor."""
        return divide_over(whole, at, self.program.mesh)[self.index]

    # -- training ------------------------------------------------------------------------------------------------------

    def run(self, micro: MicroBatches) -> None:
        """Run the micro-batches of a step or of an evaluation; see `Attachments.shard`."""
        if not micro.training:
            self._evaluate(micro)
            return
        self._check_modes()
        before = self.traffic.sent, self.traffic.waited
        for number, batch in enumerate(micro.batches):
            with micro.sync(number == len(micro.batches) - 1), span("program", "compute"):
                self._step(micro, batch)
        facts = self.attachments.trace.facts
        facts[names.SENT_FACT] += self.traffic.sent - before[0]
        facts[names.WAITED_FACT] += self.traffic.waited - before[1]
        facts[names.PREDICTED_FACT] = self.plan.seconds * len(micro.batches)

    def _check_modes(self) -> None:
        for (name, module), training in zip(self.model.named_modules(), self.traced.modes, strict=True):
            if module.training != training:
                raise ConfigError(
                    f"`{name or 'the model'}` is in {'training' if module.training else 'evaluation'} mode, and the "
                    f"step was traced in {'training' if training else 'evaluation'} mode",
                    hint="call model.train() before the first step",
                )

    @torch.no_grad()
    def _step(self, micro: MicroBatches, batch: Batch) -> None:
        """Run the program on a micro-batch: add its loss and its gradients to the step's, and update buffers."""
        form = BatchForm.of(batch)
        if form != self.traced.form:
            raise ConfigError(
                f"a micro-batch has the sizes {form}, and the step was traced for {self.traced.form}",
                hint="give all batches the same sizes, or train without [graph.split]",
            )
        values = self._values(micro, batch)
        returned = run_rank(self.program, values, self.groups, self.traffic)
        results, taken = list[Tensor](), {value.untyped_storage().data_ptr() for value in values}
        for (kind, name), value in zip(self.traced.step.nodes.outputs, returned, strict=True):
            if value is None:
                continue
            if kind == "result":
                results.append(value)
            elif kind == "buffer":
                self.buffers[name].copy_(value)
            else:
                self._add_gradient(name.removeprefix(PREFIX), _apart(value, taken))
        total = results[0]
        count = results[1] if len(results) > 1 else torch.full_like(total, self.traced.number or 0)
        if self.index == 0:  # all ranks have computed the same loss
            micro.add(total, count)

    def _values(self, micro: MicroBatches, batch: Batch) -> list[Tensor]:
        """This rank's inputs of the program: its shards of parameters and batch, buffers, and the loss's gradient."""
        nodes, values = self.traced.step.nodes, dict[fx.Node, Tensor]()
        for node in nodes.tangents:
            like = node.meta["val"]
            values[node] = micro.gradient_of(torch.ones((), dtype=like.dtype, device=self.attachments.world.device))
        for name, node in nodes.parameters.items():
            own = name.removeprefix(PREFIX)
            stepped = self.stepped.get(own)
            values[node] = self.model.get_parameter(own).detach() if stepped is None else stepped.to_local()
        for name, node in nodes.buffers.items():
            values[node] = self.buffers[name]
        entries = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
        for node, entry in zip(nodes.inputs, entries, strict=True):
            values[node] = self._part(entry, self.placements[node])
        return [values[node] for node in self.placements]

    def _add_gradient(self, name: str, value: Tensor) -> None:
        stepped = self.stepped[name]
        if isinstance(stepped.grad, DTensor):
            stepped.grad.to_local().add_(value)
            return
        layout: dict[str, Any] = {"shape": stepped.shape, "stride": stepped.stride()}
        stepped.grad = DTensor.from_local(value, self.mesh, stepped.placements, run_check=False, **layout)

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def _evaluate(self, micro: MicroBatches) -> None:
        """Compute the loss of batches with the whole model; each batch is computed by one rank, in rotation."""
        if not self._whole:
            self._gather()
        for batch in micro.batches:
            turn, self._turn = self._turn, (self._turn + 1) % self.ranks
            if turn == self.index:
                with micro.computing(), span("forward", "compute"):
                    micro.loss(micro.forward(batch), batch)

    def _gather(self) -> None:
        """Put whole parameters into the model in place of its shards, until the evaluation ends. A collective."""
        whole = {
            part: nn.Parameter(self.stepped[name].full_tensor(), requires_grad=False)
            for name, part in self.parts.items()
        }
        for module, name, parameter in [*_parameters_of(self.model)]:
            if parameter in whole:
                self._whole.append((module, name, parameter))
                module._parameters[name] = whole[parameter]

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Context around an evaluation: the first rank computes the first batch; at the end, shards are put back."""
        self._turn = 0
        try:
            yield
        finally:
            for module, name, part in self._whole:
                module._parameters[name] = part
            self._whole.clear()


def _parameters_of(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield each module that has a parameter, the parameter's name in it, and the parameter."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield module, name, parameter


def _apart(value: Tensor, taken: set[int]) -> Tensor:
    """A gradient, copied if it shares memory with another tensor, because gradients are changed in place."""
    storage = value.untyped_storage()
    if storage.data_ptr() in taken or storage.nbytes() != value.nbytes or not value.is_contiguous():
        return value.clone(memory_format=torch.contiguous_format)
    taken.add(storage.data_ptr())
    return value
