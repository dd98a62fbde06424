"""Improves a plan operator by operator: each takes the rule that is the fastest beside those of its neighbours.

Where operators decide together, all must take what is best for their sum. Descent lets each of them decide again, and
its neighbours after it, until none can gain. It finds no change that needs several operators at once.
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
"""Part of a step that a change must gain, so that sums of rounded numbers end."""


class _Edge(NamedTuple):
    """A tensor that one operator computes and another reads."""

    producer: fx.Node
    place: int
    """Which output of the producer it is."""
    reader: fx.Node
    slot: int
    """Which input of the reader it is; -1 for a gradient, which lies as its parameter does."""
    nbytes: float


class Descent:
    """A plan that is being improved.

    Args:
        rules: the plan: a rule for each operator, and for each placeholder one that has only an output.
        choices: the rules that each node may take.
        alike: a number for each node; nodes with the same one compute the same on tensors of the same sizes.
        objective: predicted seconds of the plan. memory: bytes that a rank holds by it.
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
        """Operator -> (which of its outputs the step returns, its bytes)."""
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
        """Change rules until no operator gains by another one, holding at most so many bytes."""
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
        """Seconds that depend on a node's rule: its own, those of moves to it and from it, and the optimizer's."""
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
        """Seconds in which a rank computes its part of an operator."""
        key = self.alike[node], rule
        if key not in self._known:
            self._known[key] = self.costs.operator(node, rule) if node.op == "call_function" else 0.0
        return self._known[key]

    def _held(self, node: fx.Node, rule: ShardingRule) -> float:
        """Bytes that a rank holds of what a node computes, or of a parameter with what belongs to it."""
        outputs = outputs_of(node)
        places = [0] if node.op == "placeholder" else self._saved.get(node, ())
        trained = self._names.get(node) in self.step.nodes.gradients
        tensors: list[tuple[Tensor | None, Placement]] = [(outputs[place], rule.outputs[place]) for place in places]
        return sum(self.costs.held(tensor.nbytes, at, trained) for tensor, at in tensors if tensor is not None)


def _read(rule: ShardingRule, slot: int) -> Placement:
    return rule.outputs[0] if slot < 0 else rule.inputs[slot]
