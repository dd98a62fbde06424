"""Describes how a step is divided, what the division costs, and why some operators are not divided."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import fx, nn

from shoestring import figures
from shoestring.graph.costs import GraphCosts
from shoestring.graph.instructions import exchange, move, take_shard
from shoestring.graph.meshes import MeshPlan, search_mesh
from shoestring.graph.overlap import OverlappedProgram, overlap
from shoestring.graph.placements import SUM, WHOLE, named
from shoestring.graph.rules import RuleBook
from shoestring.graph.search import SplitSearch, fixed_plans
from shoestring.graph.trace import JointTrace, inputs_of, pattern_of, trace
from shoestring.planning.cluster import Cluster

WORTH = 0.01
"""Fraction of a step's seconds; if another order of messages saves less, the description says so."""
SHOWN = 8
"""Largest number of moves that are listed, and of kinds of undivided operators."""


class Move(NamedTuple):
    """A tensor that ranks exchange between two operators, because they need different placements of it."""

    kind: str
    tensor: fx.Node
    reader: str
    axis: int
    nbytes: float
    seconds: float


@dataclass(frozen=True)
class ExplainedPlan:
    """A plan, with the rules and costs that it was searched with and the plans of usual ways to train."""

    step: JointTrace
    books: Mapping[int, RuleBook]
    """Number of ranks -> rules of operators."""
    costs: tuple[GraphCosts, ...]
    """Costs along each axis of the mesh."""
    plan: MeshPlan
    usual: Mapping[str, MeshPlan]
    """Name of a usual way to train -> the best plan with its placements of parameters and batch, on all ranks as one
    axis. With a mesh, also the plan that the search finds for all ranks as one axis."""
    prefix: str = ""
    """Prefix of all parameter names, which is not shown."""

    def moves(self) -> list[Move]:
        """The tensors, with gradients, that ranks exchange between operators, in order."""
        moves, step = list[Move](), self.plan.divided.step
        gradients = {node: name for name, node in step.nodes.gradients.items()}
        for node in step.operators:
            if node.target is not move:
                continue
            (tensor,), (_, source, target, axis) = inputs_of(node), node.args
            assert isinstance(source, int) and isinstance(target, int) and isinstance(axis, int)
            own = self.costs[axis]
            nbytes = tensor.meta["val"].nbytes * (own.ranks if source >= 0 else 1)
            readers = [_operator(user) for user in node.users if user.op == "call_function"]
            if node in gradients:
                readers.insert(0, f"gradient of {gradients[node].removeprefix(self.prefix)}")
            reader, kind = next(iter(readers), "a result"), _KINDS[source == SUM, target == WHOLE]
            moves.append(Move(kind, tensor, reader, axis, nbytes, own.move(source, target, nbytes)))
        return moves

    def lines(self) -> Iterator[str]:
        """Yield the lines of a description of the plan."""
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
        """A rank's program for the plan, with messages that overlap computation."""
        return overlap(self.plan.divided.program(), self.costs[-1])

    def _schedule(self) -> Iterator[str]:
        """Describe what another order of messages, tiles and fused messages gain."""
        one = self.overlapped
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
        step, repeats, book = self.step, self.step.repeats, self.books[self.costs[0].ranks]
        blocks = f"; {repeats.times} repeated blocks of {repeats.operators} operators" if repeats.times > 1 else ""
        how = ", through torch's analysis of bytecode" if step.dynamo else ""
        yield f"traced {len(step.operators):,} operators in {figures.seconds(step.seconds)}{how}{blocks}"
        whole = {str(node.target): book[node].reason for node in step.operators if book[node].reason}
        yield f"{len(book)} different operators; {len(whole)} kinds can only be whole on every rank"
        for name, reason in list(whole.items())[:SHOWN]:
            yield f"  {name}: {reason}"
        if tried := {str(node.target) for node in step.operators if book[node].tried}:
            yield f"{len(tried)} kinds have rules that were found by trying them: {', '.join(sorted(tried))}"
        for number, axis in enumerate(self.plan.axes, start=1):
            along = f"along axis {number}, of {axis.ranks} ranks: " if len(self.plan.axes) > 1 else ""
            yield (
                f"{along}{axis.deciders:,} decisions in {axis.groups:,} groups; {axis.variables:,} variables, built in "
                f"{figures.seconds(axis.build_seconds)} and solved in {figures.seconds(axis.solve_seconds)}"
            )

    def _row(self, plan: MeshPlan) -> str:
        return f"{figures.seconds(plan.objective):>9}   {figures.memory(int(plan.memory)):>16}"

    def _parameters(self) -> Iterator[str]:
        """Placements of parameters; equal layers of a list share a line."""
        shared = defaultdict[tuple[str, str], list[str]](list)
        placements = self.plan.divided.placements(self.step)
        for name, node in self.step.nodes.parameters.items():
            placed = " ".join(named(placement) for placement in placements[node])
            shared[placed, pattern_of(name.removeprefix(self.prefix))].append(name)
        axes = ", for each axis of the mesh" if len(self.costs) > 1 else ""
        yield f"parameters: R whole on every rank, S(d) in shards along dimension d{axes}"
        for (placed, pattern), names in shared.items():
            yield f"  {placed:{5 * len(self.costs) - 1}} {pattern}" + (f" ({len(names)})" if len(names) > 1 else "")

    def _messages(self) -> Iterator[str]:
        """Totals of what ranks exchange, and the exchanges that take the longest."""
        moves = self.moves()
        inside = [node for node in self.plan.divided.step.operators if node.target is exchange]
        counts = Counter(one.kind for one in moves)
        told = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
        told += f" in {figures.seconds(sum(one.seconds for one in moves))}" if moves else "nothing between operators"
        yield f"ranks exchange {told}" + (f", and {len(inside)} statistics within operators" if inside else "")
        for one in sorted(moves, key=lambda one: -one.seconds)[:SHOWN]:
            along = f" along axis {one.axis + 1}" if len(self.costs) > 1 else ""
            size = figures.size(int(one.nbytes))
            yield f"  {figures.seconds(one.seconds):>9}  {one.kind} of {size}{along}: {one.reader}"


def _operator(node: fx.Node) -> str:
    """Name of the operator that a node computes, or that it exchanges numbers for."""
    if node.target is exchange:
        return str(node.args[1])
    return "another exchange" if node.target in (move, take_shard) else str(node.target)


_KINDS = {
    (True, True): "all-reduce",
    (True, False): "reduce-scatter",
    (False, True): "all-gather",
    (False, False): "all-to-all",
}
"""(whether the tensor was a sum, whether it becomes whole) -> collective."""


def explain(
    model: nn.Module,
    *inputs: object,
    cluster: Cluster,
    settings: SplitSearch | None = None,
    mesh: Sequence[int] = (),
) -> ExplainedPlan:
    """Trace the step of a model that returns its loss, and search how to divide it among a host's ranks.

    Args:
        inputs: a batch of all ranks' samples; only shapes and data types are used.
        cluster: a host that `shoestring probe` measured, or that `costs.ring` assumes.
        mesh: number of ranks along each axis of a mesh of the host's ranks; if empty, all ranks form one axis.

    Raises:
        ConfigError: the model cannot be traced, the mesh has another number of ranks than the host, or no plan fits
            into the memory.
    """
    step, costs = trace(model, *inputs), GraphCosts.of(cluster)
    axes, line = costs.over(mesh or (costs.ranks,)), costs.over((costs.ranks,))
    books = {ranks: RuleBook(ranks) for ranks in {costs.ranks, *mesh}}
    plan = search_mesh(step, axes, settings, books=books)
    usual = {name: search_mesh(step, line, None, pinned, books) for name, pinned in fixed_plans(step).items()}
    if len(axes) > 1:
        usual["operators split by the search, all ranks as one axis"] = search_mesh(step, line, settings, None, books)
    return ExplainedPlan(step, books, axes, plan, usual)
