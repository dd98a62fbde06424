"""Chooses how every operator of a step is divided among the ranks of a host, by an integer program.

One variable for each rule of each operator says whether the operator takes the rule. For each tensor, flow variables
lead from the placements in which its producer may compute it to those in which a reader may read it, and carry the cost
of the move. Flows between *distinct* placements, instead of between pairs of rules, keep the program small and its
relaxation nearly integral (as for shortest paths).

The program of a large step is reduced in two ways. Operators in equal neighbourhoods, such as those of repeated blocks,
share one decision. Light operators follow their largest input: they are bandwidth-bound, so moving a tensor for them
hardly pays. A descent, in which each operator chooses again by itself, recovers most of what this loses.
"""

from __future__ import annotations

import math
import operator
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import fx

from shoestring import figures
from shoestring.core.errors import ConfigError
from shoestring.graph.costs import GraphCosts, flop_of, saved_tensors
from shoestring.graph.descent import Descent
from shoestring.graph.placements import SUM, WHOLE, Placement, ShardingRule, can_be
from shoestring.graph.rules import RuleBook
from shoestring.graph.trace import StepGraph, inputs_of, neighbourhoods, producer_of

DEPTH = 1
"""Distance in the graph up to which neighbourhoods must be equal for operators to share a decision."""
MERGED_FROM = 2000
"""Number of operators of a step from which operators share decisions by default (`merge`). The whole program of a
smaller step takes a few seconds at most, and merging has made steps up to 13% slower along the first axis of a mesh."""
Pinned = Callable[[str], Placement | None]
"""Name of a parameter, or "" for an input -> the placement that it must have; None leaves it to the search."""


@dataclass(frozen=True)
class SplitSearch:
    """Settings of a search.

    Args:
        merge: whether operators in equal neighbourhoods share a decision at first, light operators follow their largest
            input, and vectors stay whole; a `descent` then improves on that. None: only in steps of at least
            `MERGED_FROM` operators.
        memory: bytes that parameters, gradients, optimizer state and saved activations of a rank may take.
        seconds: time after which the solver returns the best plan so far.
        usual: whether the usual ways to train are also tried along all axes of a mesh but the last.
    """

    merge: bool | None = None
    memory: float = math.inf
    seconds: float = 60.0
    usual: bool = True


@dataclass(frozen=True)
class GraphPlan:
    """How a step is divided along one axis of a mesh."""

    ranks: int
    rules: Mapping[fx.Node, ShardingRule]
    """The rule of each operator; for each placeholder, a rule that has only an output."""
    objective: float
    """Predicted seconds of a step, without overlap of communication and computation."""
    memory: float
    """Bytes of a rank's parameters, gradients, optimizer state and saved activations."""
    groups: int
    """Number of independent decisions; `deciders` is the number of operators and placeholders."""
    deciders: int
    variables: int
    build_seconds: float
    solve_seconds: float

    @property
    def reduction(self) -> float:
        return self.deciders / self.groups


def search(
    step: StepGraph,
    book: RuleBook,
    costs: GraphCosts,
    settings: SplitSearch | None = None,
    pinned: Pinned | None = None,
) -> GraphPlan:
    """Find the fastest plan of a step.

    Args:
        pinned: placements that parameters and inputs must have; everything else stays free.

    Raises:
        ConfigError: scipy is not installed, no plan fits into the memory, or the solver found none in time.
    """
    settings = settings or SplitSearch()
    began = time.perf_counter()
    merge = len(step.operators) >= MERGED_FROM if settings.merge is None else settings.merge
    program = _Program(step, book, costs, pinned or (lambda name: None), merge=merge)
    built = time.perf_counter()
    chosen = program.solve(settings)
    rules = {node: program.rules[node][chosen[program.classes[node]]] for node in program.deciders}
    objective, memory = program.objective, program.memory_of(chosen)
    if merge:
        choices = {node: program.choices(node, book, merge=False) for node in program.deciders}
        descent = Descent(step, costs, rules, choices, program.classes, objective=objective, memory=memory)
        descent.run(settings.memory)
        rules, objective, memory = descent.rules, descent.objective, descent.memory
    return GraphPlan(
        book.ranks,
        rules,
        objective,
        memory,
        program.groups,
        len(program.deciders),
        len(program.cost),
        built - began,
        time.perf_counter() - built,
    )


@dataclass
class _Flow:
    """Tensors that one class of operators computes and another class reads, at the same position of both."""

    place: int
    """Index of the tensor among the producer's outputs."""
    reads: Callable[[ShardingRule], Placement]
    """The placement in which a rule of the consumer reads the tensor."""
    nbytes: float
    follows: bool = False
    count: int = field(default=0)


class _Program:
    """The integer program of a step."""

    def __init__(self, step: StepGraph, book: RuleBook, costs: GraphCosts, pinned: Pinned, *, merge: bool) -> None:
        self.step, self.costs = step, costs
        self.deciders = [node for node in step.tensors if node.target is not operator.getitem]
        self.names = {node: name for name, node in step.nodes.parameters.items()}
        free = (*step.nodes.parameters.values(), *step.nodes.inputs)
        self.pinned = {node: placement for node in free if (placement := pinned(self.names.get(node, ""))) is not None}
        self.rules = {node: self.choices(node, book, merge=merge) for node in self.deciders}
        self.classes = self._classes(merge)
        self.members = Counter(self.classes.values())
        self.example = dict[int, fx.Node]()
        for node in self.deciders:
            self.example.setdefault(self.classes[node], node)
        self.cost = list[float]()
        self._rows, self._columns, self._factors = list[int](), list[int](), list[float]()
        self._low, self._high = list[float](), list[float]()
        self.held = dict[int, float]()  # variable -> bytes that its rule makes a rank hold
        self.taken = {number: self._take(number) for number in self.example}
        self._parent = {number: number for number in self.example}
        self._connect(merge)
        self._hold()
        self._return()
        choosing = [number for number, taken in self.taken.items() if len(taken) > 1]
        self.groups = len({self._root(number) for number in choosing})
        self.objective = math.nan

    # -- what there is to decide ---------------------------------------------------------------------------------------

    def choices(self, node: fx.Node, book: RuleBook, *, merge: bool) -> tuple[ShardingRule, ...]:
        """The rules that a node may take; with `merge` vectors stay whole."""
        if node.op == "call_function":
            return book[node].rules
        tensor, nodes = node.meta["val"], self.step.nodes
        dims = range(tensor.ndim) if node in self.names or node in nodes.inputs else ()  # buffers stay whole
        possible = [place for place in (WHOLE, *dims) if can_be(place, tensor, self.costs.ranks)]
        if self.pinned.get(node) in possible:
            possible = [self.pinned[node]]
        elif merge and node in self.names and tensor.ndim < 2:
            possible = [WHOLE]  # weights of norms and biases are too small to matter
        return tuple(ShardingRule((place,), ()) for place in possible)

    def _classes(self, merge: bool) -> dict[fx.Node, int]:
        if not merge:
            return {node: number for number, node in enumerate(self.deciders)}
        kinds: dict[fx.Node, object] = dict.fromkeys(self.step.nodes.inputs, "input")
        kinds |= {node: (self.step.kind_of(name), self.pinned.get(node)) for node, name in self.names.items()}
        return neighbourhoods(self.step.tensors, DEPTH, kinds)

    def _take(self, number: int) -> range:
        """Add variables for the rules of a class, exactly one of which is taken."""
        node, first = self.example[number], len(self.cost)
        for rule in self.rules[node]:
            seconds = self.costs.operator(node, rule) if node.op == "call_function" else 0.0
            self._variable(seconds * self.members[number])
        variables = range(first, len(self.cost))
        self._constrain([(variable, 1.0) for variable in variables], 1.0)
        return variables

    def _variable(self, cost: float) -> int:
        self.cost.append(cost)
        return len(self.cost) - 1

    def _constrain(self, terms: Iterable[tuple[int, float]], value: float) -> None:
        """Require that a weighted sum of variables has this value."""
        for variable, factor in terms:
            self._rows.append(len(self._low))
            self._columns.append(variable)
            self._factors.append(factor)
        self._low.append(value)
        self._high.append(value)

    # -- flows ---------------------------------------------------------------------------------------------------------

    def _connect(self, merge: bool) -> None:
        """Add the flows from producers to consumers, and from gradients to their parameters."""
        flows = dict[tuple[int, int, int, int], _Flow]()
        for node in self.step.operators:
            leader = self._leader(node) if merge else -1
            for slot, source in enumerate(inputs_of(node)):
                producer, place = producer_of(source)
                key = (self.classes[producer], place, self.classes[node], slot)
                flow = flows.setdefault(key, _Flow(place, _reader(slot), source.meta["val"].nbytes, slot == leader))
                flow.count += 1
        for name, gradient in self.step.nodes.gradients.items():
            producer, place = producer_of(gradient)
            parameter = self.step.nodes.parameters[name]
            key = (self.classes[producer], place, self.classes[parameter], -1)
            flows.setdefault(key, _Flow(place, _reader(-1), parameter.meta["val"].nbytes)).count += 1
        for (source, _, target, _), flow in flows.items():
            self._flow(source, target, flow)

    def _leader(self, node: fx.Node) -> int:
        """Index of the input that a light operator follows: its largest; -1 if the operator decides for itself."""
        inputs = inputs_of(node)
        rules = self.rules[node]
        if not inputs or flop_of(node) or len(rules) == 1 or any(rule.exchange for rule in rules):
            return -1
        return max(range(len(inputs)), key=lambda slot: inputs[slot].meta["val"].numel())

    def _flow(self, source: int, target: int, flow: _Flow) -> None:
        """Add the flow of a tensor from the placement in which it is computed to that in which it is read."""
        computed, read = defaultdict[Placement, list[int]](list), defaultdict[Placement, list[int]](list)
        for variable, rule in zip(self.taken[source], self.rules[self.example[source]], strict=True):
            computed[rule.outputs[flow.place]].append(variable)
        for variable, rule in zip(self.taken[target], self.rules[self.example[target]], strict=True):
            read[flow.reads(rule)].append(variable)
        follows = flow.follows and read.keys() >= computed.keys() - {SUM} and self._joined(source, target)
        leaving, entering = defaultdict[Placement, list[int]](list), defaultdict[Placement, list[int]](list)
        for start in computed:
            for end in read:
                seconds = self.costs.move(start, end, flow.nbytes)
                if math.isinf(seconds) or (follows and start not in (end, SUM)):
                    continue
                variable = self._variable(seconds * flow.count)
                leaving[start].append(variable)
                entering[end].append(variable)
        for taken, moved in ((computed, leaving), (read, entering)):
            for placement, variables in taken.items():
                self._constrain(
                    [
                        *((variable, -1.0) for variable in variables),
                        *((variable, 1.0) for variable in moved[placement]),
                    ],
                    0.0,
                )

    def _joined(self, source: int, target: int) -> bool:
        """Put the class `target` into the group of `source`; if `source` is a placeholder, return False instead."""
        if self.example[source].op == "placeholder":
            return False
        self._parent[self._root(target)] = self._root(source)
        return True

    def _root(self, number: int) -> int:
        while self._parent[number] != number:
            self._parent[number] = self._parent[self._parent[number]]
            number = self._parent[number]
        return number

    # -- memory and optimizer ------------------------------------------------------------------------------------------

    def _hold(self) -> None:
        """Add the optimizer's time, and the bytes of a rank's parameters, their state, and saved activations."""
        saved = saved_tensors(self.step)
        for number, node in self.example.items():
            outputs = [0] if node.op == "placeholder" else saved.get(node, ())
            for variable, rule in zip(self.taken[number], self.rules[node], strict=True):
                for place in outputs:
                    tensor, placement = node.meta["val"], rule.outputs[place]
                    tensor = tensor[place] if isinstance(tensor, list | tuple) else tensor
                    trained = self.names.get(node) in self.step.nodes.gradients
                    nbytes = self.costs.held(tensor.nbytes, placement, trained) * self.members[number]
                    self.held[variable] = self.held.get(variable, 0.0) + nbytes
                    if trained:
                        self.cost[variable] += self.costs.update(tensor.nbytes, placement) * self.members[number]

    def _return(self) -> None:
        """Add the cost of moving the loss and updated buffers, which a step returns whole on every rank."""
        for node in self.step.results:
            producer, place = producer_of(node)
            number = self.classes[producer]
            for variable, rule in zip(self.taken[number], self.rules[self.example[number]], strict=True):
                self.cost[variable] += self.costs.move(rule.outputs[place], WHOLE, node.meta["val"].nbytes)

    def memory_of(self, chosen: Mapping[int, int]) -> float:
        """Bytes that a rank holds if these rules are chosen."""
        return sum(self.held.get(self.taken[number][place], 0.0) for number, place in chosen.items())

    # -- solving -------------------------------------------------------------------------------------------------------

    def solve(self, settings: SplitSearch) -> dict[int, int]:
        """Solve the program; returns the index of the rule that each class takes."""
        result = self._optimum(self.cost, settings.memory, settings.seconds)
        if result.x is None:
            if math.isfinite(settings.memory):
                least = self._optimum(
                    [self.held.get(variable, 0.0) for variable in range(len(self.cost))], math.inf, 10.0
                )
                if least.x is not None and least.fun > settings.memory:
                    raise ConfigError(
                        f"no plan fits into {figures.memory(int(settings.memory))} of a rank",
                        hint=f"the smallest takes {figures.memory(int(least.fun))}",
                    )
            raise ConfigError(f"no plan was found within {settings.seconds:g} s: {result.message}")
        self.objective = float(result.fun)
        return {number: int(np.argmax(result.x[list(taken)])) for number, taken in self.taken.items()}

    def _optimum(self, cost: Sequence[float], memory: float, seconds: float) -> Any:
        try:
            from scipy.optimize import Bounds, LinearConstraint, milp
            from scipy.sparse import csr_matrix
        except ImportError as error:
            raise ConfigError("the search needs scipy", hint="pip install 'shoestring[graph]'") from error
        rows, columns, factors, low, high = self._rows, self._columns, self._factors, self._low, self._high
        if math.isfinite(memory) and self.held:
            scale = max(self.held.values())
            rows = rows + [len(low)] * len(self.held)
            columns = columns + list(self.held)
            factors = factors + [nbytes / scale for nbytes in self.held.values()]
            low, high = [*low, -math.inf], [*high, memory / scale]
        integral = np.zeros(len(cost))
        integral[[variable for taken in self.taken.values() for variable in taken]] = 1  # flows are then determined
        scale = max(max(cost), 1e-30)
        matrix = csr_matrix((factors, (rows, columns)), shape=(len(low), len(cost)))
        result = milp(
            np.asarray(cost) / scale,
            constraints=LinearConstraint(matrix, low, high),
            bounds=Bounds(0, 1),
            integrality=integral,
            options={"time_limit": seconds, "mip_rel_gap": 1e-6},
        )
        if result.x is not None:
            result.fun = float(np.dot(cost, result.x))
        return result


def _reader(slot: int) -> Callable[[ShardingRule], Placement]:
    """Function: rule -> placement of input `slot`; -1 is the parameter itself, whose placement its gradient needs."""
    return (lambda rule: rule.outputs[0]) if slot < 0 else (lambda rule: rule.inputs[slot])


def fixed_plans(step: StepGraph) -> dict[str, Pinned]:
    """The usual ways to train, as placements of parameters and batch; no search result may be slower than these."""
    dims = {name: node.meta["val"].ndim for name, node in step.nodes.parameters.items()}

    def megatron(name: str) -> Placement | None:
        parts = name.split(".")
        if not name or dims[name] != 2 or any(word in part for part in parts for word in _OUTSIDE):
            return WHOLE
        # A layer that writes to the residual stream has its inputs divided and its outputs summed.
        return 1 if len(parts) > 1 and parts[-2] in _BACK else 0

    return {
        "one rank's work on every rank": lambda name: WHOLE,
        "replicas": lambda name: WHOLE if name else 0,
        "sharded weights (FSDP)": lambda name: 0,
        "split layers (Megatron)": megatron,
    }


_BACK = ("out", "down", "o_proj", "down_proj", "fc2", "c_proj", "dense")
_OUTSIDE = ("embed", "head", "classifier", "pooler", "wte", "wpe", "lm_head", "score")
