"""Trains by a plan of operators: each rank holds what the plan gives it, and runs its own program in each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
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
from shoestring.graph.lockstep import divide
from shoestring.graph.names import OPERATORS
from shoestring.graph.overlap import overlap
from shoestring.graph.placements import Placement
from shoestring.graph.program import RankProgram, rank_program
from shoestring.graph.rules import RuleBook
from shoestring.graph.running import MessageTotals, run_rank

if TYPE_CHECKING:
    from shoestring.graph.settings import Split


def attach(attachments: Attachments, settings: Split) -> None:
    """Let the ranks of a host split the operators of each step. A collective; does nothing with one rank."""
    ranks = attachments.world.ranks_over([OPERATORS])
    if ranks == 1:
        return
    attachments.claim([OPERATORS], trained=True, whole=True)
    plan = chosen(attachments, settings)
    assert plan is not None  # only a check without ranks has none
    traced = trace_job(attachments, settings)
    world, own = attachments.world, f"the step that `{settings.name}` has traced"
    world.alike({own: traced.digest}, "start all ranks with the same code, versions and data")
    program = _program(settings, traced, plan, ranks)
    world.alike({f"the order that `{settings.name}` has found": digest(program.graph)}, "use one cluster file")
    if traced.digest != plan.digest:
        raise ConfigError(f"{own} has changed since it was planned", hint="make the model trace in the same way twice")
    SplitStep(attachments, traced, plan, program).attach()


def _program(settings: Split, traced: TracedStep, plan: ChosenPlan, ranks: int) -> RankProgram:
    book = RuleBook(ranks)
    program = rank_program(traced.step, plan.rules(traced, book), ranks)
    return overlap(program, costs_of(settings, ranks)[0]).program if settings.order == "searched" else program


class SplitStep:
    """A rank's part of the model and of each step."""

    def __init__(self, attachments: Attachments, traced: TracedStep, plan: ChosenPlan, program: RankProgram) -> None:
        world, group = attachments.world, attachments.world.group([OPERATORS])
        mesh = world.mesh_over([OPERATORS])
        assert group is not None and mesh is not None
        self.attachments, self.model = attachments, attachments.module
        self.traced, self.plan, self.program = traced, plan, program
        self.group, self.mesh, self.ranks, self.index = group, mesh, program.ranks, world.index_over([OPERATORS])
        self.traffic = MessageTotals()
        self.stepped: dict[str, DTensor] = {}
        """Name of a parameter -> what this rank has of it, which the optimizer steps."""
        self.parts: dict[nn.Parameter, str] = {}
        """The shards that the model holds in place of parameters -> their names."""
        self._turn = 0
        self._whole: list[tuple[nn.Module, str, nn.Parameter]] = []
        """(module, name, shard) of the parameters that are whole for the duration of an evaluation."""
        holders = [node for node in traced.step.module.graph.nodes if node.op == "placeholder"]
        placements = dict(zip(holders, program.inputs, strict=True))
        self._sources: list[Callable[[Tensor, list[Tensor]], Tensor]] = []
        nodes = traced.step.nodes
        parameters = {node: name.removeprefix(PREFIX) for name, node in nodes.parameters.items()}
        buffers = {node: name.removeprefix(PREFIX) for name, node in nodes.buffers.items()}
        self.placed = {parameters[node]: at for node, at in placements.items() if node in parameters}
        self.buffers = {name: self.model.get_buffer(name) for name in buffers.values()}
        for node, at in placements.items():
            if node in parameters:
                self._sources.append(self._parameter(parameters[node]))
            elif node in buffers:
                self._sources.append(self._buffer(buffers[node]))
            elif node in nodes.inputs:
                self._sources.append(self._entry(nodes.inputs.index(node), at))
            else:
                self._sources.append(lambda start, batch: start)

    # -- what a program reads ------------------------------------------------------------------------------------------

    def _parameter(self, name: str) -> Callable[..., Tensor]:
        return lambda start, batch: (
            self.stepped[name].to_local() if name in self.stepped else self.model.get_parameter(name).detach()
        )

    def _buffer(self, name: str) -> Callable[..., Tensor]:
        return lambda start, batch: self.buffers[name]

    def _entry(self, number: int, at: Placement) -> Callable[..., Tensor]:
        return lambda start, batch: divide(batch[number], at, self.ranks)[self.index]

    # -- weights -------------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Let this rank hold its parts, the optimizer step them, and each step run the program."""
        attachments, facts = self.attachments, self.attachments.trace.facts
        # Ranks may have initialised their weights differently, so all take those of the first rank.
        broadcast_tensors([*self.model.parameters(), *self.model.buffers()], self.group)
        facts[names.WHOLE_FACT] = float(sum(tensor.nbytes for tensor in self.model.parameters()))
        trained = {name: tensor for name, tensor in attachments.named().items() if tensor.requires_grad}
        for name, parameter in trained.items():
            self.stepped[name] = self._placed(parameter.detach(), self.placed[name])
        attachments.shard(over=(), trained=self.stepped, run=self.run)
        whole = {parameter: name for name, parameter in trained.items()}
        for module, name, parameter in [*_parameters_of(self.model)]:
            if parameter in whole and self.placed[whole[parameter]] >= 0:
                self._hold(module, name, whole[parameter])
        attachments.surround_evaluation(self._evaluating)
        facts[names.HELD_FACT] = float(sum(tensor.nbytes for tensor in self.model.parameters()))
        facts |= {names.SENT_FACT: 0.0, names.WAITED_FACT: 0.0, names.MESSAGES_FACT: len(self.program.messages)}

    def _placed(self, whole: Tensor, at: Placement) -> DTensor:
        """What this rank has of a parameter: a shard of its own, or all of it."""
        local = divide(whole, at, self.ranks)[self.index].clone() if at >= 0 else whole
        placement = Shard(at) if at >= 0 else Replicate()
        layout: dict[str, Any] = {"shape": whole.shape, "stride": whole.stride()}
        placed = DTensor.from_local(local, self.mesh, [placement], run_check=False, **layout)
        placed.requires_grad_()
        return placed

    @torch.no_grad()
    def _hold(self, module: nn.Module, name: str, parameter: str) -> None:
        """Let a module hold this rank's shard in place of a parameter; a shard is the same in all modules."""
        part = next((part for part, own in self.parts.items() if own == parameter), None)
        if part is None:
            part = nn.Parameter(self.stepped[parameter].to_local())
            self.parts[part] = parameter
        module._parameters[name] = part

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
        """Run the program for a micro-batch: adds its loss and its gradients, and writes new values of buffers."""
        form = BatchForm.of(batch)
        if form != self.traced.form:
            raise ConfigError(
                f"a micro-batch has the sizes {form}, and the step was traced for {self.traced.form}",
                hint="give all batches the same sizes, or train without [graph.split]",
            )
        entries = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
        (tangent,) = (node.meta["val"] for node in self.traced.step.nodes.tangents)
        start = micro.gradient_of(torch.ones((), dtype=tangent.dtype, device=self.attachments.world.device))
        values = [source(start, entries) for source in self._sources]
        returned = run_rank(self.program, values, self.group, self.traffic)
        results, taken = list[Tensor](), {value.untyped_storage().data_ptr() for value in values}
        for (kind, name), value in zip(self.traced.step.nodes.outputs, returned, strict=True):
            if value is None:
                continue
            if kind == "result":
                results.append(value)
            elif kind == "buffer":
                self.buffers[name.removeprefix(PREFIX)].copy_(value)
            else:
                self._add_gradient(name.removeprefix(PREFIX), _apart(value, taken))
        total = results[0]
        count = results[1] if len(results) > 1 else torch.full_like(total, self.traced.number or 0)
        if self.index == 0:  # all ranks have computed the same loss
            micro.add(total, count)

    def _add_gradient(self, name: str, value: Tensor) -> None:
        stepped = self.stepped[name]
        if isinstance(stepped.grad, DTensor):
            stepped.grad.to_local().add_(value)
            return
        layout: dict[str, Any] = {"shape": stepped.shape, "stride": stepped.stride()}
        stepped.grad = DTensor.from_local(value, self.mesh, stepped.placements, run_check=False, **layout)

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def _evaluate(self, micro: MicroBatches) -> None:
        """Compute the loss of batches by the whole model; ranks take turns, so one rank computes each batch."""
        if not self._whole:
            self._gather()
        for batch in micro.batches:
            turn, self._turn = self._turn, (self._turn + 1) % self.ranks
            if turn == self.index:
                with micro.computing(), span("forward", "compute"):
                    micro.loss(micro.forward(batch), batch)

    def _gather(self) -> None:
        """Gather the parameters of which ranks have shards into the model, until the evaluation ends. A collective."""
        whole = {
            part: nn.Parameter(self.stepped[name].full_tensor(), requires_grad=False)
            for part, name in self.parts.items()
        }
        for module, name, parameter in [*_parameters_of(self.model)]:
            if parameter in whole:
                self._whole.append((module, name, parameter))
                module._parameters[name] = whole[parameter]

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Context around an evaluation, which begins with the first rank's turn and ends without whole parameters."""
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
    """A gradient that shares memory with no other tensor, because gradients are changed in place."""
    storage = value.untyped_storage()
    if storage.data_ptr() in taken or storage.nbytes() != value.nbytes or not value.is_contiguous():
        return value.clone(memory_format=torch.contiguous_format)
    taken.add(storage.data_ptr())
    return value
