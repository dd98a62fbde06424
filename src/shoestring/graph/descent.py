"""Improves a plan one operator at a time: each takes the rule that is fastest with the rules of its neighbours.

The integer program gives all operators of a group the rule that is best for the group. The descent lets each operator
choose again by itself, and then its neighbours, until no operator can make the step faster. It finds no improvement
that needs changes of several operators at once.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, fx

from shoestring.graph.costs import GraphCosts, saved_tensors
from shoestring.graph.placements import WHOLE, Placement, ShardingRule
from shoestring.graph.trace import StepGraph, inputs_of, outputs_of, producer_of

GAIN = 1e-9
"""Fraction of a step's seconds that a change must save; otherwise rounding errors could keep the descent from
ending."""


class _Edge(NamedTuple):
    """A tensor that one operator computes and another reads."""

    producer: fx.Node
    place: int
    """Index of the tensor among the producer's outputs."""
    reader: fx.Node
    slot: int
    """Index of the tensor among the reader's inputs; -1 for a gradient, which must have its parameter's placement."""
    nbytes: float


class Descent:
    """A plan that is being improved.

    Args:
        rules: the plan: a rule for each operator; for each placeholder, a rule that has only an output.
        choices: the rules that each node may take.
        alike: a class number for each node; nodes of one class compute the same function of tensors of the same sizes.
        objective: predicted seconds of the plan. memory: bytes that a rank holds under the plan.
    """

    def __init__(
        self,
        step: StepGraph,
        costs: GraphCosts,
        rules: Mapping[fx.Node, ShardingRule],
        choices: Mapping[fx.Node, Sequence[ShardingRule]],
        alike: Mapping[fx.Node, int],
        *,
        objective: float,
        memory: float,
    ) -> None:
        self.step, self.costs, self.rules, self.choices, self.alike = step, costs, dict(rules), choices, alike
        self.objective, self.memory = objective, memory
        self._saved, self._names = saved_tensors(step), {node: name for name, node in step.nodes.parameters.items()}
        self._known = dict[tuple[int, ShardingRule], float]()
        self._results = defaultdict[fx.Node, list[tuple[int, float]]](list)
        """Operator -> (index, bytes) of each of its outputs that the step returns."""
        for node in step.results:
            producer, place = producer_of(node)
            self._results[producer].append((place, node.meta["val"].nbytes))
        self._into, self._out = defaultdict[fx.Node, list[_Edge]](list), defaultdict[fx.Node, list[_Edge]](list)
        for edge in self._edges():
            self._into[edge.reader].append(edge)
            self._out[edge.producer].append(edge)

    def _edges(self) -> Iterator[_Edge]:
        for node in self.step.operators:
            for slot, source in enumerate(inputs_of(node)):
                yield _Edge(*producer_of(source), node, slot, source.meta["val"].nbytes)
        for name, gradient in self.step.nodes.gradients.items():
            parameter = self.step.nodes.parameters[name]
            yield _Edge(*producer_of(gradient), parameter, -1, parameter.meta["val"].nbytes)

    def run(self, room: float) -> None:
        """Change rules until no single change makes the step faster; a rank may hold at most `room` bytes."""
        waiting, queued = deque(self.rules), set(self.rules)
        while waiting:
            node = waiting.popleft()
            queued.remove(node)
            own, held = self.rules[node], self._held(node, self.rules[node])
            now = self._seconds(node, own)
            best, seconds, more = own, now, 0.0
            for rule in self.choices[node]:
                added = self._held(node, rule) - held
                if self.memory + added <= room and (taken := self._seconds(node, rule)) < seconds:
                    best, seconds, more = rule, taken, added
            if seconds < now - GAIN * self.objective:
                self.rules[node] = best
                self.objective, self.memory = self.objective + seconds - now, self.memory + more
                for other in [edge.producer for edge in self._into[node]] + [edge.reader for edge in self._out[node]]:
                    if other not in queued:
                        queued.add(other)
                        waiting.append(other)

    def _seconds(self, node: fx.Node, rule: ShardingRule) -> float:
        """Seconds that depend on a node's rule: its computation, moves to and from it, and its optimizer step."""
        seconds = self._own(node, rule)
        for edge in self._into[node]:
            start = (rule if edge.producer is node else self.rules[edge.producer]).outputs[edge.place]
            seconds += self.costs.move(start, _read(rule, edge.slot), edge.nbytes)
        for edge in self._out[node]:
            if edge.reader is not node:
                seconds += self.costs.move(
                    rule.outputs[edge.place], _read(self.rules[edge.reader], edge.slot), edge.nbytes
                )
        for place, nbytes in self._results.get(node, ()):
            seconds += self.costs.move(rule.outputs[place], WHOLE, nbytes)
        if self._names.get(node) in self.step.nodes.gradients:
            seconds += self.costs.update(node.meta["val"].nbytes, rule.outputs[0])
        return seconds

    def _own(self, node: fx.Node, rule: ShardingRule) -> float:
        """Seconds that a rank takes for its share of an operator."""
        key = self.alike[node], rule
        if key not in self._known:
            self._known[key] = self.costs.operator(node, rule) if node.op == "call_function" else 0.0
        return self._known[key]

    def _held(self, node: fx.Node, rule: ShardingRule) -> float:
        """Bytes that a rank holds of a node's saved outputs, or of a parameter with gradient and optimizer state."""
        outputs = outputs_of(node)
        places = [0] if node.op == "placeholder" else self._saved.get(node, ())
        trained = self._names.get(node) in self.step.nodes.gradients
        tensors: list[tuple[Tensor | None, Placement]] = [(outputs[place], rule.outputs[place]) for place in places]
        return sum(self.costs.held(tensor.nbytes, at, trained) for tensor, at in tensors if tensor is not None)


def _read(rule: ShardingRule, slot: int) -> Placement:
    return rule.outputs[0] if slot < 0 else rule.inputs[slot]
