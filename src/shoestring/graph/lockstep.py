"""Computes the divided operators of all ranks in one process, to compare rules and plans with undivided operators."""

from __future__ import annotations

import operator
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from shoestring._torch import tree_leaves
from shoestring.graph.placements import SUM, WHOLE, Placement, ShardingRule, can_be, difference, divide, join
from shoestring.graph.rules import RuleBook, signature
from shoestring.graph.trace import JointTrace, StepGraph, arguments_of, inputs_of, outputs_of, tensors_of

aten = torch.ops.aten
Plan = Mapping[fx.Node, ShardingRule]
"""A rule for each operator; for each placeholder, a rule that has only an output."""
_SIZED = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.expand.default,
    aten.slice_backward.default,
    aten.select_backward.default,
    aten.new_empty.default,
    aten.new_full.default,
    aten.new_ones.default,
    aten.new_zeros.default,
}
"""Operators whose second argument is the size of their output."""
_VIEWS = {aten.view.default, aten._unsafe_view.default}
_UNDEFINED = {aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default, aten.new_empty_strided.default}
"""Operators whose output is uninitialised memory."""


def compute(node: fx.Node, rule: ShardingRule, inputs: Sequence[Sequence[Tensor]]) -> list[list[Tensor | None]]:
    """Compute an operator by a rule, for all ranks.

    Args:
        inputs: each rank's local tensor of each tensor input, in the order of `inputs_of`: inputs[place][rank].

    Returns:
        Each rank's local tensor of each output: outputs[place][rank].
    """
    ranks = len(inputs[0]) if inputs else 1
    calls = [local_arguments(node, rule, [shards[rank] for shards in inputs], ranks) for rank in range(ranks)]
    operator_of_shards = local_operator(node)
    if rule.exchange is None:
        results = [operator_of_shards(*args, **kwargs) for args, kwargs in calls]
    else:
        results = sum_together([rule.exchange.compute(node.target, args, kwargs, ranks) for args, kwargs in calls])
    rows = [result if isinstance(result, list | tuple) else (result,) for result in results]
    return [list(column) for column in zip(*rows, strict=True)]


def local_operator(node: fx.Node) -> Any:
    """The operator to compute a shard with: `reshape` instead of a view, which a shard's strides may not allow."""
    return aten.reshape.default if node.target in _VIEWS else node.target


def local_arguments(
    node: fx.Node, rule: ShardingRule, tensors: Sequence[Any], ranks: int
) -> tuple[list[Any], dict[str, Any]]:
    """An operator's arguments on one rank: local tensors (or nodes that compute them), and sizes of its output."""
    left = iter(tensors)
    args, kwargs = arguments_of(node, lambda source: next(left))
    args = list(args)
    if node.target in _SIZED and rule.outputs[0] >= 0:
        output = outputs_of(node)[0]
        assert output is not None
        args[1] = [size // ranks if dim == rule.outputs[0] else size for dim, size in enumerate(output.shape)]
    return args, dict(kwargs)


def sum_together(computations: Sequence[Any]) -> list[Any]:
    """Run the generators of all ranks, send each the sum of the tensors that they yielded, and return their results."""
    sent: list[Any] = [None] * len(computations)
    while True:
        yielded, results = list[Tensor](), list[Any]()
        for computation, value in zip(computations, sent, strict=True):
            try:
                yielded.append(computation.send(value))
            except StopIteration as stop:
                results.append(stop.value)
        if results:
            return results
        sent = [torch.stack(yielded).sum(0)] * len(computations)


@dataclass(frozen=True)
class RuleCheck:
    """How far the outputs of a divided operator are from those of the undivided operator."""

    node: fx.Node
    rule: ShardingRule
    error: float
    """Largest difference, relative to the largest entry of the outputs; infinite if the operator failed."""
    failure: str = ""

    @property
    def tensors(self) -> list[Tensor]:
        """The inputs and outputs, without data."""
        return [source.meta["val"] for source in inputs_of(self.node)] + tensors_of(self.node)

    def __str__(self) -> str:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in self.tensors)
        return f"{self.node.target} of {shapes}: {self.rule}: {self.failure or f'off by {self.error:.1g}'}"


def check_rules(step: JointTrace, book: RuleBook, values: Mapping[fx.Node, Tensor], seed: int = 0) -> list[RuleCheck]:
    """Compute the whole step, and every different operator in it by each of its rules, on the same inputs.

    Operators that draw random numbers or leave their output undefined are not checked.

    Args:
        values: the values of the placeholders (`real_values`).
    """
    checks = list[RuleCheck]()
    noise, seen = torch.Generator().manual_seed(seed), set[object]()
    operators = set(step.operators)

    class Checking(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            node, result = n, super().run_node(n)
            if node not in operators or node.target in _UNDEFINED or not inputs_of(node):
                return result
            draws = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            if not draws and (kind := signature(node)) not in seen:
                seen.add(kind)
                inputs = [self.env[source] for source in inputs_of(node)]
                outputs = result if isinstance(result, list | tuple) else (result,)
                checks.extend(_check(node, rule, inputs, outputs, book.ranks, noise) for rule in book[node].rules)
            return result

    with torch.no_grad():
        _run(Checking(step.module, garbage_collect_values=False), step, values)
    return checks


def _check(
    node: fx.Node,
    rule: ShardingRule,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor | None],
    ranks: int,
    noise: torch.Generator,
) -> RuleCheck:
    placed = zip(inputs, rule.inputs, strict=True)
    try:
        computed = compute(node, rule, [divide(tensor, placement, ranks, noise) for tensor, placement in placed])
        errors = [difference(joined, outputs) for joined in _joined(computed, rule.outputs)]
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        return RuleCheck(node, rule, float("inf"), f"{type(error).__name__}: {error}")
    return RuleCheck(node, rule, max(errors))


def _joined(computed: Sequence[Sequence[Tensor | None]], placements: Sequence[Placement]) -> list[list[Tensor | None]]:
    """For each rank, an operator's joined outputs; an output with placement WHOLE is the rank's own."""

    def of_rank(rank: int) -> list[Tensor | None]:
        pairs = zip(computed, placements, strict=True)
        return [shards[rank] if placement == WHOLE else join(shards, placement) for shards, placement in pairs]

    return [of_rank(rank) for rank in range(len(computed[0]))]


def real_values(step: JointTrace, model: nn.Module, *inputs: Any) -> dict[fx.Node, Tensor]:
    """Values of the placeholders of a step that was traced from `model` and such inputs; the loss's gradient is 1."""
    nodes = step.nodes
    values = {node: model.get_parameter(name).detach() for name, node in nodes.parameters.items()}
    values |= {node: model.get_buffer(name) for name, node in nodes.buffers.items()}
    values |= dict(zip(nodes.inputs, (leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)), strict=True))
    return values | {node: torch.ones(node.meta["val"].shape, dtype=node.meta["val"].dtype) for node in nodes.tangents}


def _run(interpreter: fx.Interpreter, step: JointTrace, values: Mapping[fx.Node, Tensor]) -> list[Tensor | None]:
    inputs = [values[node] for node in step.graph.nodes if node.op == "placeholder"]
    return list(interpreter.run(*inputs, enable_io_processing=False))


def run_whole(step: JointTrace, values: Mapping[fx.Node, Tensor]) -> list[Tensor | None]:
    """Compute a step on one rank: the loss, the gradients and the updated buffers."""
    with torch.no_grad():
        return _run(fx.Interpreter(step.module), step, values)


def run_divided(step: StepGraph, plan: Plan, values: Mapping[fx.Node, Tensor], ranks: int) -> list[Tensor | None]:
    """Compute a step by a plan, for all ranks; returns the same as `run_whole`."""
    placed = dict[fx.Node, list[tuple[list[Any], Placement]]]()
    with torch.no_grad():
        for node in step.graph.nodes:
            if node.op == "placeholder":
                placement = plan[node].outputs[0]
                placed[node] = [(divide(values[node], placement, ranks), placement)]
            elif node.target is operator.getitem:
                placed[node] = [placed[node.args[0]][node.args[1]]]
            elif node in plan:
                rule, sources = plan[node], inputs_of(node)
                inputs = [
                    _moved(*placed[source][0], to, ranks) for source, to in zip(sources, rule.inputs, strict=True)
                ]
                computed = compute(node, rule, inputs)
                columns = computed if sources else [[column[0]] * ranks for column in computed]
                placed[node] = list(zip(columns, rule.outputs, strict=True))
    outputs = next(node for node in step.graph.nodes if node.op == "output").args[0]
    return [join(*placed[node][0]) if isinstance(node, fx.Node) else None for node in outputs]


def _moved(shards: list[Tensor], placement: Placement, to: Placement, ranks: int) -> list[Tensor]:
    """Move a tensor, of which `shards` are the local tensors, to another placement."""
    return shards if placement == to else divide(join(shards, placement), to, ranks)


def random_plan(step: StepGraph, book: RuleBook, draw: random.Random) -> dict[fx.Node, ShardingRule]:
    """Draw a rule for each operator; rules that read a sum are drawn only if the input was computed as a sum."""
    plan = dict[fx.Node, ShardingRule]()
    placements = dict[fx.Node, Sequence[Placement]]()
    for node in step.tensors:
        if node.target is operator.getitem:
            source, place = node.args
            assert isinstance(source, fx.Node) and isinstance(place, int)
            placements[node] = [placements[source][place]]
            continue
        sources = inputs_of(node) if node.op == "call_function" else ()
        not_summed = [place for place, source in enumerate(sources) if placements[source][0] != SUM]
        fitting = [rule for rule in _choices(node, book) if all(rule.inputs[place] != SUM for place in not_summed)]
        plan[node] = draw.choice(fitting)
        placements[node] = plan[node].outputs
    return plan


def _choices(node: fx.Node, book: RuleBook) -> Iterable[ShardingRule]:
    if node.op == "call_function":
        return book[node].rules
    tensor = node.meta["val"]
    return [ShardingRule((place,), ()) for place in range(WHOLE, tensor.ndim) if can_be(place, tensor, book.ranks)]
