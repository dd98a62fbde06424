"""Traces a training step as one graph of operators, forward and backward, without computing anything."""

from __future__ import annotations

import operator
import re
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn

from shoestring.core.errors import ConfigError
from shoestring.graph import _torch
from shoestring.graph._torch import JointNodes, joint_graph, merge_tied, nodes_of_joint

T = TypeVar("T")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class StepGraph:
    """The graph of a training step, with what its placeholders stand for."""

    graph: fx.Graph
    nodes: JointNodes

    @cached_property
    def operators(self) -> tuple[fx.Node, ...]:
        """The operators that compute tensors, in order, without nodes that only pick one of several outputs."""
        calls = (node for node in self.graph.nodes if node.op == "call_function")
        return tuple(node for node in calls if node.target is not operator.getitem and tensors_of(node))

    @cached_property
    def tensors(self) -> tuple[fx.Node, ...]:
        """The placeholders and operators, and nodes that pick one of several outputs, in order."""
        return tuple(node for node in self.graph.nodes if node.op != "output" and tensors_of(node))

    @cached_property
    def backward(self) -> frozenset[fx.Node]:
        """The nodes of the backward pass: all that depend on the gradient of the loss."""
        later = set(self.nodes.tangents)
        for node in self.graph.nodes:
            if any(source in later for source in node.all_input_nodes):
                later.add(node)
        return frozenset(later)

    @cached_property
    def results(self) -> tuple[fx.Node, ...]:
        """What the step returns besides gradients: the loss, and the new values of buffers."""
        output = next(node for node in self.graph.nodes if node.op == "output")
        gradients = set(self.nodes.gradients.values())
        return tuple(node for node in output.args[0] if isinstance(node, fx.Node) and node not in gradients)

    @property
    def repeats(self) -> Repeats:
        """The repeated blocks of the model, forward and backward; their number is that of matrices of one kind."""
        kinds = {node: self.kind_of(name) for name, node in self.nodes.parameters.items()}
        classes = neighbourhoods(self.tensors, 1, kinds)
        matrices = Counter(classes[node] for node, kind in kinds.items() if kind)
        sizes = Counter(Counter(classes[node] for node in self.operators).values())
        times = max({*matrices.values()} - {1}, key=lambda count: count * sizes[count], default=1)
        return Repeats(times, sizes[times])

    def kind_of(self, name: str) -> str:
        """A parameter's name without its layer's number, which equal layers share; empty for vectors."""
        matrix = self.nodes.parameters[name].meta["val"].ndim > 1
        return pattern_of(name) if matrix else ""


@dataclass(frozen=True)
class JointTrace(StepGraph):
    """The undivided graph of a step, as it was traced; one rank can run it."""

    module: fx.GraphModule
    seconds: float
    """Seconds that tracing took."""
    dynamo: bool
    """Whether the forward pass could only be captured by torch's analysis of bytecode."""


@dataclass(frozen=True)
class Repeats:
    """Operators that occur in equal neighbourhoods: `times` blocks that have at least `operators` operators each."""

    times: int
    operators: int


def trace(model: nn.Module, *inputs: Any) -> JointTrace:
    """Trace the forward and backward pass of a model that returns its loss.

    Raises:
        ConfigError: the model cannot be traced (the message names the line of its code), or the loss depends on no
            trained parameter.
    """
    began, dynamo = time.perf_counter(), False
    try:
        module = joint_graph(model, inputs)
    except Exception as error:  # whatever the model's own code raises on tensors without data
        try:
            module, dynamo = joint_graph(model, inputs, dynamo=True), True
        except Exception:
            raise _untraceable(error) from error
    merge_tied(module.graph, model)
    module.graph.eliminate_dead_code()
    nodes = nodes_of_joint(module.graph)
    if not nodes.gradients:
        raise ConfigError("the loss depends on no trained parameter", hint="the traced module must return its loss")
    return JointTrace(module.graph, nodes, module, time.perf_counter() - began, dynamo)


def _untraceable(error: Exception) -> ConfigError:
    """The error for a model that cannot be traced: it names the last line outside of torch."""
    frames = traceback.extract_tb(error.__traceback__)
    began = max((place for place, frame in enumerate(frames) if frame.filename == _torch.__file__), default=-1)
    inside = str(Path(torch.__file__).parent)
    own = [frame for frame in frames[began + 1 :] if not frame.filename.startswith((inside, "<"))]
    why = next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
    if not own:
        return ConfigError(f"the model cannot be traced: {why}")
    return ConfigError(
        f"the model cannot be traced at {own[-1].filename}:{own[-1].lineno}: `{own[-1].line}`: {why}",
        hint="a traced step may branch on shapes and settings, but not on numbers in tensors",
    )


def outputs_of(node: fx.Node) -> tuple[Tensor | None, ...]:
    """The outputs of a node, without data; None for an output that the operator leaves out."""
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else (value,)
    return tuple(one if isinstance(one, Tensor) else None for one in values)


def tensors_of(node: fx.Node) -> list[Tensor]:
    return [output for output in outputs_of(node) if output is not None]


def inputs_of(node: fx.Node) -> list[fx.Node]:
    """The tensors among a node's arguments, in order and with repetitions."""
    inputs = list[fx.Node]()

    def collect(source: fx.Node) -> fx.Node:
        inputs.append(source)
        return source

    fx.node.map_arg((node.args, dict(node.kwargs)), collect)
    return [source for source in inputs if tensors_of(source)]


def producer_of(node: fx.Node) -> tuple[fx.Node, int]:
    """The node that computed a tensor, and the tensor's index among the node's outputs."""
    if node.target is operator.getitem:
        source, place = node.args
        assert isinstance(source, fx.Node) and isinstance(place, int)
        return source, place
    return node, 0


def arguments_of(node: fx.Node, value: Callable[[fx.Node], Any] = lambda source: source.meta["val"]) -> tuple[Any, Any]:
    """(args, kwargs) of a node, with `value(node)` in place of nodes: by default, their tensors without data."""
    return fx.node.map_arg((node.args, dict(node.kwargs)), value)


def pattern_of(name: str) -> str:
    """A parameter's name with a star in place of its layer's number, so that equal layers share the name."""
    return _NUMBER.sub("*", name, count=1)


def neighbourhoods(
    nodes: Sequence[fx.Node], depth: int, kinds: Mapping[fx.Node, object] | None = None
) -> dict[fx.Node, int]:
    """Number the classes of nodes whose neighbourhoods are equal up to distance `depth`, in order of appearance.

    Nodes are equal if their operators, the shapes of their tensors, their other arguments and their entries in `kinds`
    are (Weisfeiler and Lehman, 1968).
    """

    def own(node: fx.Node) -> object:
        rest = str(fx.node.map_arg((node.args, dict(node.kwargs)), lambda _: None))
        shapes = tuple((output.shape, output.dtype) for output in tensors_of(node))
        return node.op, node.target if node.op == "call_function" else "", shapes, rest, (kinds or {}).get(node)

    classes = _numbered({node: own(node) for node in nodes})
    for _ in range(depth):
        classes = _numbered(
            {
                node: (
                    classes[node],
                    tuple(classes.get(source, -1) for source in node.all_input_nodes),
                    tuple(sorted(classes.get(user, -1) for user in node.users)),
                )
                for node in nodes
            }
        )
    return classes


def _numbered(kinds: Mapping[T, object]) -> dict[T, int]:
    numbers = dict[object, int]()
    return {node: numbers.setdefault(kind, len(numbers)) for node, kind in kinds.items()}
