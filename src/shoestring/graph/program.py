"""The program of one rank of a divided step: operators on the rank's local tensors, and messages between ranks.

All ranks have the same program, with their own data, and `running` runs it. A message is two nodes, `begin_move` and
`end_move`; the nodes between them run while the message is under way. Programs are graphs of torch.fx and are changed
by building new ones: into another order, with several tensors in one message (here), or with messages in tiles
(`tiles`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from shoestring.graph.costs import GraphCosts, axis_of, is_view
from shoestring.graph.instructions import begin_move, end_move, exchange, move, take_shard
from shoestring.graph.lockstep import local_arguments, local_operator
from shoestring.graph.placements import SUM, WHOLE, Placement, ShardingRule
from shoestring.graph.trace import StepGraph, inputs_of, outputs_of
from shoestring.planning.simulate import Task

LAUNCH = 5e-6
"""Seconds to launch an operator, added to the time of its work."""


@dataclass(frozen=True)
class RankProgram:
    """The program of one rank for a step, and the placements of the step's inputs and outputs."""

    graph: fx.Graph
    mesh: tuple[int, ...]
    """Number of ranks along each axis."""
    inputs: tuple[tuple[Placement, ...], ...]
    """Placement of each placeholder along each axis."""
    outputs: tuple[tuple[Placement, ...], ...]
    """Placement of each output along each axis."""

    @property
    def messages(self) -> list[fx.Node]:
        """The nodes that begin messages, in order."""
        return [node for node in self.graph.nodes if node.target is begin_move]

    @property
    def ranks(self) -> int:
        return math.prod(self.mesh)


# -- building ----------------------------------------------------------------------------------------------------------


def rank_program(step: StepGraph, plan: Mapping[fx.Node, ShardingRule], ranks: int) -> RankProgram:
    """The program of a rank for a step that is divided by a plan: see `DividedStep.divided`."""
    return DividedStep.whole(step).divided(plan, ranks).program()


@dataclass(frozen=True)
class DividedStep:
    """The part of a step that one rank of a mesh computes, as a step of its own that another axis can divide.

    Exchanges between ranks along the earlier axes are operators of this step (`instructions`), with sharding rules like
    other operators.
    """

    step: StepGraph
    mesh: tuple[int, ...]
    inputs: tuple[tuple[Placement, ...], ...]
    outputs: tuple[tuple[Placement, ...], ...]

    @staticmethod
    def whole(step: StepGraph) -> DividedStep:
        """A step that is not divided yet."""
        holders = [node for node in step.graph.nodes if node.op == "placeholder"]
        return DividedStep(step, (), ((),) * len(holders), ((),) * len(step.nodes.outputs))

    def divided(self, plan: Mapping[fx.Node, ShardingRule], ranks: int) -> DividedStep:
        """Divide the step once more, among the ranks along another axis, which varies fastest.

        Args:
            plan: a rule for each operator; for each placeholder, a rule that has only an output.

        Raises:
            ValueError: the plan reads a whole tensor as a sum.
        """
        step, building = self.step, _RankBuilding(plan, ranks, len(self.mesh))
        placeholders, outputs = list[Placement](), list[Placement]()
        gradients = dict[str, fx.Node]()
        for node in step.graph.nodes:
            if node.op == "output":
                results = list[Any]()
                for result, (kind, name) in zip(node.args[0], step.nodes.outputs, strict=True):
                    gradient = kind == "gradient" and name in step.nodes.parameters
                    target = plan[step.nodes.parameters[name]].outputs[0] if gradient else WHOLE
                    outputs.append(target)
                    results.append(building.moved(result, target) if isinstance(result, fx.Node) else None)
                    if gradient and results[-1] is not None:
                        gradients[name] = results[-1]
                building.graph.output(tuple(results))
            elif node.op == "placeholder":
                placeholders.append(plan[node].outputs[0])
                building.add(node, building.graph.placeholder(node.name), plan[node].outputs)
            elif node.op == "get_attr":  # a constant, which every rank has
                building.add(node, building.graph.create_node("get_attr", node.target), plan[node].outputs)
            else:
                building.call(node)
        local, nodes = building.local, step.nodes
        return DividedStep(
            StepGraph(
                building.graph,
                nodes._replace(
                    parameters={name: local[node] for name, node in nodes.parameters.items()},
                    buffers={name: local[node] for name, node in nodes.buffers.items()},
                    inputs=[local[node] for node in nodes.inputs],
                    tangents=[local[node] for node in nodes.tangents],
                    gradients=gradients,
                ),
            ),
            (*self.mesh, ranks),
            tuple((*before, at) for before, at in zip(self.inputs, placeholders, strict=True)),
            tuple((*before, at) for before, at in zip(self.outputs, outputs, strict=True)),
        )

    def placements(self, step: StepGraph) -> dict[fx.Node, tuple[Placement, ...]]:
        """The placements, along each axis, of the placeholders of `step`, which is the undivided step."""
        return dict(zip((node for node in step.graph.nodes if node.op == "placeholder"), self.inputs, strict=True))

    def program(self) -> RankProgram:
        """The program of a rank, with messages in place of moves."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in self.step.graph.nodes:
            if node.target is move:
                tensor, source, target, axis = node.args
                copies[node] = add_message(graph, [copies[tensor]], (source, target, axis), [node.meta["val"]])[0]
            else:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        return RankProgram(graph, self.mesh, self.inputs, self.outputs)


class _RankBuilding:
    """A program that is being built: nodes of the step -> nodes of the program, and their placements."""

    def __init__(self, plan: Mapping[fx.Node, ShardingRule], ranks: int, axis: int) -> None:
        self.plan, self.ranks, self.axis, self.graph = plan, ranks, axis, fx.Graph()
        self.local = dict[fx.Node, fx.Node]()
        self.placements = dict[fx.Node, tuple[Placement, ...]]()
        self._moved = dict[tuple[fx.Node, Placement], fx.Node]()

    def add(self, node: fx.Node, local: fx.Node, placements: tuple[Placement, ...]) -> None:
        local.meta["val"] = local_value(node.meta.get("val"), placements, self.ranks)
        self.local[node], self.placements[node] = local, placements

    def call(self, node: fx.Node) -> None:
        """Add an operator, after the moves that it needs."""
        if node.target is operator.getitem:
            source, place = node.args
            assert isinstance(source, fx.Node) and isinstance(place, int)
            picked = self.graph.call_function(operator.getitem, (self.local[source], place))
            self.add(node, picked, (self.placements[source][place],))
        elif node in self.plan:
            rule = self.plan[node]
            sources = [self.moved(one, to) for one, to in zip(inputs_of(node), rule.inputs, strict=True)]
            args, kwargs = local_arguments(node, rule, sources, self.ranks)
            if rule.exchange is None:
                local = self.graph.call_function(local_operator(node), tuple(args), kwargs)
                local.meta |= {key: value for key, value in node.meta.items() if key == "exchanged"}
            else:
                call: tuple[Any, ...] = (rule.exchange.compute, node.target, tuple(args), kwargs, self.axis)
                local = self.graph.call_function(exchange, call)
                local.meta["exchanged"] = node, rule
            self.add(node, local, rule.outputs)
        else:
            local = self.graph.node_copy(node, lambda source: self.local[source])
            self.add(node, local, (WHOLE,) * len(outputs_of(node)))

    def moved(self, node: fx.Node, target: Placement) -> fx.Node:
        """The node of a tensor in placement `target`; a tensor is moved to each placement only once."""
        local, source = self.local[node], self.placements[node][0]
        if source == target:
            return local
        if (node, target) not in self._moved:
            value = local_value(node.meta["val"], (target,), self.ranks)
            if source == WHOLE:
                if target == SUM:
                    raise ValueError(f"`{node.name}` is whole on every rank, and the plan reads it as a sum")
                moved = self.graph.call_function(take_shard, (local, target, self.axis))
            else:
                moved = self.graph.call_function(move, (local, source, target, self.axis))
            moved.meta["val"] = value
            self._moved[node, target] = moved
        return self._moved[node, target]


def add_message(
    graph: fx.Graph, tensors: Sequence[fx.Node], how: Sequence[Any], values: Sequence[Any]
) -> list[fx.Node]:
    """Add the two nodes of a message to a graph; returns the moved tensors, with `values` as their `meta`.

    Args:
        how: source placement, target placement, and mesh axis.
    """
    begun = graph.call_function(begin_move, (tuple(tensors), *how))
    begun.meta["val"] = None
    ended = graph.call_function(end_move, (begun,))
    ended.meta["val"] = tuple(values)
    picks = [graph.call_function(operator.getitem, (ended, place)) for place in range(len(values))]
    for pick, value in zip(picks, values, strict=True):
        pick.meta["val"] = value
    return picks


def local_value(value: Any, placements: Sequence[Placement], ranks: int) -> Any:
    """An operator's outputs on one rank, as tensors without data."""
    if isinstance(value, list | tuple):
        pairs = zip(value, placements, strict=True)
        return tuple(local_value(one, (placement,), ranks) for one, placement in pairs)
    if not isinstance(value, Tensor):
        return value
    sizes = [size // ranks if dim == placements[0] else size for dim, size in enumerate(value.shape)]
    return torch.empty(sizes, dtype=value.dtype, device="meta")


# -- tasks and orders --------------------------------------------------------------------------------------------------

PROCESSOR, LINK = "processor", "link"
"""The resources of a rank, which each run one task at a time."""


@dataclass(frozen=True)
class ProgramTasks:
    """The tasks of a program, for `planning.schedule`."""

    tasks: list[Task]
    nodes: list[fx.Node]
    """For each task, the node of its operator, or the node that begins its message."""


def program_tasks(program: RankProgram, costs: GraphCosts) -> ProgramTasks:
    """The tasks of a program: its operators on the processor, and its messages on the link.

    Views and ends of messages are no tasks: a task that reads one waits for the operators and messages behind it.
    """
    tasks, nodes, after = list[Task](), list[fx.Node](), dict[fx.Node, frozenset[int]]()
    for node in program.graph.nodes:
        needed = frozenset[int]().union(*(after[source] for source in node.all_input_nodes))
        free = node.target in (operator.getitem, end_move) or (
            isinstance(node.target, torch._ops.OpOverload) and is_view(node)
        )
        if node.op == "call_function" and not free:
            wire = node.target is begin_move
            seconds = message_seconds([node], costs) if wire else operator_seconds(node, costs)
            nbytes = sum(tensor.meta["val"].nbytes for tensor in inputs_of(node)) if wire else 0
            resource = LINK if wire else PROCESSOR
            tasks.append(
                Task(node.name, "wire" if wire else "compute", seconds, resource, tuple(sorted(needed)), nbytes)
            )
            nodes.append(node)
            needed = frozenset([len(tasks) - 1])
        after[node] = needed
    return ProgramTasks(tasks, nodes)


def operator_seconds(node: fx.Node, costs: GraphCosts) -> float:
    """Seconds of an operator on a rank's own tensors."""
    if node.target is exchange:
        return LAUNCH + costs.along(axis_of(node)).operator(*node.meta["exchanged"])
    if node.target is take_shard:
        return LAUNCH + 2 * node.meta["val"].nbytes / costs.copy
    whole = ShardingRule((WHOLE,) * len(outputs_of(node)), (WHOLE,) * len(inputs_of(node)))
    return LAUNCH + costs.operator(node, whole)


def message_seconds(begun: Iterable[fx.Node], costs: GraphCosts) -> float:
    """Seconds of one message that holds the tensors of several messages of one kind."""
    nbytes, kinds = 0, set[tuple[Any, ...]]()
    for node in begun:
        kinds.add(node.args[1:])
        nbytes += sum(tensor.meta["val"].nbytes for tensor in inputs_of(node))
    ((source, target, number),) = kinds
    axis = costs.along(number)
    return axis.move(source, target, nbytes * (axis.ranks if source >= 0 else 1))


def message_kind(begun: fx.Node) -> tuple[Any, ...]:
    """What messages that are fused must have in common: both placements, the mesh axis, and the data type."""
    return *begun.args[1:], inputs_of(begun)[0].meta["val"].dtype


def in_program_order(program: RankProgram, groups: Sequence[Sequence[fx.Node]]) -> RankProgram:
    """The program with its operators and messages in another order.

    Args:
        groups: the nodes of the tasks, in the new order. The nodes of a larger group are messages of one kind, to be
            fused.
    """
    ordering = _Ordering(program)
    for group in groups:
        if len(group) == 1:
            ordering.emit(group[0])
        else:
            ordering.emit_together(group)
    (output,) = [node for node in program.graph.nodes if node.op == "output"]
    ordering.emit(output)
    return RankProgram(ordering.graph, program.mesh, program.inputs, program.outputs)


class _Ordering:
    """Copies a program in another order; views and ends of messages come right before their first reader."""

    def __init__(self, program: RankProgram) -> None:
        self.graph, self.copies = fx.Graph(), dict[fx.Node, fx.Node]()
        self._joined = dict[fx.Node, tuple[fx.Node, int]]()  # end of a message -> (fused message, index in it)
        self._ended = dict[fx.Node, fx.Node]()  # fused message -> its end
        for node in program.graph.nodes:
            if node.op == "placeholder":
                self.emit(node)

    def emit(self, node: fx.Node) -> fx.Node:
        """Copy a node, after the nodes that it reads."""
        if node in self.copies:
            return self.copies[node]
        sources = [self.emit(source) for source in node.all_input_nodes]
        if node in self._joined:
            joint, _ = self._joined[node]
            if joint not in self._ended:
                self._ended[joint] = self.graph.call_function(end_move, (joint,))
                self._ended[joint].meta["val"] = joint.meta["values"]
            copy = self._ended[joint]
        elif node.target is operator.getitem and node.args[0] in self._joined:
            _, first = self._joined[node.all_input_nodes[0]]
            place = node.args[1]
            assert isinstance(place, int)
            copy = self.graph.call_function(operator.getitem, (sources[0], first + place))
            copy.meta = dict(node.meta)
        else:
            copy = self.graph.node_copy(node, self.copies.__getitem__)
        self.copies[node] = copy
        return copy

    def emit_together(self, begun: Sequence[fx.Node]) -> None:
        """Copy several messages as one fused message."""
        tensors = [self.emit(tensor) for node in begun for tensor in inputs_of(node)]
        joint, values = self.graph.call_function(begin_move, (tuple(tensors), *begun[0].args[1:])), list[Any]()
        for node in begun:
            (end,) = node.users
            self.copies[node], self._joined[end] = joint, (joint, len(values))
            values += end.meta["val"]
        joint.meta |= {"val": None, "values": tuple(values)}
