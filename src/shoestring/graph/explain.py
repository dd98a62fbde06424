"""Says in words how a step is divided, what that costs, and why operators stay whole."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import fx, nn

from shoestring import figures
from shoestring.graph.costs import GraphCosts
from shoestring.graph.overlap import OverlappedProgram, overlap
from shoestring.graph.placements import SUM, WHOLE, Placement, named
from shoestring.graph.program import rank_program
from shoestring.graph.rules import RuleBook
from shoestring.graph.search import GraphPlan, SplitSearch, fixed_plans, search
from shoestring.graph.trace import JointTrace, inputs_of, pattern_of, producer_of, trace
from shoestring.planning.cluster import Cluster

WORTH = 0.01
"""Part of a step below which an order of messages is said to be useless."""
SHOWN = 8
"""Number of moves, and of kinds of operators that stay whole, that are shown."""


class Move(NamedTuple):
    """A tensor that ranks exchange between two operators, because they need different placements of it."""

    kind: str
    tensor: fx.Node
    reader: str
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class ExplainedPlan:
    """A plan, and what it was chosen from."""

    step: JointTrace
    book: RuleBook
    costs: GraphCosts
    plan: GraphPlan
    usual: Mapping[str, GraphPlan]
    """The usual ways to train -> the best plan that has their placements of parameters and batch."""
    prefix: str = ""
    """Beginning of all parameters' names, which is not shown."""

    def moves(self) -> list[Move]:
        """What ranks exchange between operators, and of gradients, in order."""
        moves = list[Move]()
        for node in self.step.operators:
            for source, target in zip(inputs_of(node), self.plan.rules[node].inputs, strict=True):
                moves += self._move(source, target, str(node.target))
        for name, gradient in self.step.nodes.gradients.items():
            target = self.plan.rules[self.step.nodes.parameters[name]].outputs[0]
            moves += self._move(gradient, target, f"gradient of {name.removeprefix(self.prefix)}")
        return moves

    def _move(self, source: fx.Node, target: Placement, reader: str) -> Iterator[Move]:
        producer, place = producer_of(source)
        begin, nbytes = self.plan.rules[producer].outputs[place], source.meta["val"].nbytes
        if seconds := self.costs.move(begin, target, nbytes):
            yield Move(_KINDS[begin == SUM, target == WHOLE], source, reader, nbytes, seconds)

    def lines(self) -> Iterator[str]:
        """Describe the plan, at most in a screenful."""
        yield from self._traced()
        yield ""
        yield "predicted   memory of a rank   way"
        best = min(self.usual.values(), key=lambda plan: plan.objective, default=self.plan)
        gain = f"{best.objective / self.plan.objective:.2f}x as fast"
        yield f"{self._row(self.plan)}   operators split by the search, {gain}"
        for name, plan in sorted(self.usual.items(), key=lambda item: item[1].objective):
            yield f"{self._row(plan)}   {name}"
        yield ""
        yield from self._parameters()
        yield ""
        yield from self._messages()
        yield ""
        yield from self._schedule()

    @cached_property
    def overlapped(self) -> OverlappedProgram:
        """A rank's program for the plan, with messages that travel while the rank computes."""
        return overlap(rank_program(self.step, self.plan.rules, self.costs.ranks), self.costs)

    def _schedule(self) -> Iterator[str]:
        """What another order of messages, tiles and fused messages would gain."""
        try:
            one = self.overlapped
        except ValueError as error:
            yield f"schedule: none, because {error}"
            return
        rows = (
            (one.serial, "one after the other"),
            (one.traced, f"in the traced order; {figures.seconds(one.exposed_traced)} of exposed communication"),
            (one.schedule.seconds, f"in the order found; {figures.seconds(one.exposed)} of exposed communication"),
            (one.schedule.bound, "or more in any order"),
        )
        yield f"schedule of {len(one.program.messages)} messages beside computation, without the optimizer's step"
        for seconds, order in rows:
            yield f"{figures.seconds(seconds):>9}   {order}"
        yield f"  {one.tiled} messages are split into tiles, {one.fused} travel as part of another"
        if one.traced - one.schedule.seconds < WORTH * one.traced:
            yield f"  another order of messages saves less than {figures.percent(WORTH)} here"

    def _traced(self) -> Iterator[str]:
        step, plan, repeats = self.step, self.plan, self.step.repeats
        blocks = f"; {repeats.times} repeated blocks of {repeats.operators} operators" if repeats.times > 1 else ""
        how = ", through torch's analysis of bytecode" if step.dynamo else ""
        yield f"traced {len(step.operators):,} operators in {figures.seconds(step.seconds)}{how}{blocks}"
        whole = {str(node.target): self.book[node].reason for node in step.operators if self.book[node].reason}
        yield f"{len(self.book)} different operators; {len(whole)} kinds can only be whole on every rank"
        for name, reason in list(whole.items())[:SHOWN]:
            yield f"  {name}: {reason}"
        if tried := {str(node.target) for node in step.operators if self.book[node].tried}:
            yield f"{len(tried)} kinds have rules that were found by trying them: {', '.join(sorted(tried))}"
        yield (
            f"{plan.deciders:,} decisions in {plan.groups:,} groups; {plan.variables:,} variables, built in "
            f"{figures.seconds(plan.build_seconds)} and solved in {figures.seconds(plan.solve_seconds)}"
        )

    def _row(self, plan: GraphPlan) -> str:
        return f"{figures.seconds(plan.objective):>9}   {figures.memory(int(plan.memory)):>16}"

    def _parameters(self) -> Iterator[str]:
        """Placements of parameters; equal layers of a list share a line."""
        shared = defaultdict[tuple[Placement, str], list[str]](list)
        for name, node in self.step.nodes.parameters.items():
            shared[self.plan.rules[node].outputs[0], pattern_of(name.removeprefix(self.prefix))].append(name)
        yield "parameters: R whole on every rank, S(d) in shards along dimension d"
        for (placement, pattern), names in shared.items():
            yield f"  {named(placement):4} {pattern}" + (f" ({len(names)})" if len(names) > 1 else "")

    def _messages(self) -> Iterator[str]:
        """What ranks exchange, in sum, and the tensors that take the longest."""
        moves = self.moves()
        inside = [rule for rule in self.plan.rules.values() if rule.exchange]
        counts = Counter(move.kind for move in moves)
        told = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
        told += f" in {figures.seconds(sum(move.seconds for move in moves))}" if moves else "nothing between operators"
        yield f"ranks exchange {told}" + (f", and {len(inside)} statistics within operators" if inside else "")
        for move in sorted(moves, key=lambda move: -move.seconds)[:SHOWN]:
            yield f"  {figures.seconds(move.seconds):>9}  {move.kind} of {figures.size(move.nbytes)}: {move.reader}"


_KINDS = {
    (True, True): "all-reduce",
    (True, False): "reduce-scatter",
    (False, True): "all-gather",
    (False, False): "all-to-all",
}
"""(whether the tensor was a sum, whether it becomes whole) -> collective."""


def explain(model: nn.Module, *inputs: object, cluster: Cluster, settings: SplitSearch | None = None) -> ExplainedPlan:
    """Trace the step of a model that returns its loss, and search how a host's ranks divide its operators.

    Args:
        inputs: a batch, for all ranks together; only shapes and data types are used.
        cluster: a host that `shoestring probe` measured, or that `costs.ring` assumes.

    Raises:
        ConfigError: the model cannot be traced, or no plan fits into the memory.
    """
    step, costs = trace(model, *inputs), GraphCosts.of(cluster)
    book = RuleBook(costs.ranks)
    plan = search(step, book, costs, settings)
    usual = {name: search(step, book, costs, pinned=pinned) for name, pinned in fixed_plans(step).items()}
    return ExplainedPlan(step, book, costs, plan, usual)
