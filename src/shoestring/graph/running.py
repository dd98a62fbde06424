"""Runs the programs of ranks: one on each rank of a process group, or all in one process, to check them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from shoestring._torch import all_gather_single, reduce_scatter_single
from shoestring.core.trace import span
from shoestring.graph.costs import axis_of
from shoestring.graph.instructions import begin_move, end_move, exchange, take_shard
from shoestring.graph.lockstep import sum_together
from shoestring.graph.placements import SUM, WHOLE, Placement, divide, divide_over, join, join_over
from shoestring.graph.program import RankProgram


def run_lockstep(program: RankProgram, values: Sequence[Tensor]) -> list[Tensor | None]:
    """Run the programs of all ranks in one process.

    Args:
        values: the step's undivided inputs, in the order of the placeholders.

    Returns:
        The step's undivided outputs.
    """
    mesh, ranks = program.mesh, range(program.ranks)
    placed = iter(zip(values, program.inputs, strict=True))
    columns = dict[fx.Node, list[Any]]()

    def arguments(node: fx.Node, rank: int) -> tuple[Any, Any]:
        return fx.node.map_arg((node.args, dict(node.kwargs)), lambda source: columns[source][rank])

    with torch.no_grad():
        for node in program.graph.nodes:
            if node.op == "placeholder":
                columns[node] = divide_over(*next(placed), mesh)
                continue
            calls = [arguments(node, rank) for rank in ranks]
            if node.op == "output":
                rows = zip(*(args[0] for args, _ in calls), strict=True)
                return [join_over(row, to, mesh) for row, to in zip(rows, program.outputs, strict=True)]
            if node.target is begin_move:
                columns[node] = [args for args, _ in calls]
            elif node.target is end_move:
                begun = [args[0] for args, _ in calls]
                columns[node] = _together(begun, mesh, begun[0][-1], _moved)
            elif node.target is take_shard:
                taken = [args for args, _ in calls]
                columns[node] = _together(taken, mesh, axis_of(node), _own_shards)
            elif node.target is exchange:
                exchanged = [args for args, _ in calls]
                columns[node] = _together(exchanged, mesh, axis_of(node), _summed)
            else:
                function: Any = node.target
                columns[node] = [function(*args, **kwargs) for args, kwargs in calls]
    raise ValueError("the program has no output")


def _together(
    calls: Sequence[Any], mesh: Sequence[int], axis: int, work: Callable[[Sequence[Any]], Sequence[Any]]
) -> list[Any]:
    """Call `work` on the arguments of each group of ranks along a mesh axis; returns each rank's result."""
    results, stride = [None] * len(calls), math.prod(mesh[axis + 1 :])
    for first in range(len(calls)):
        if first // stride % mesh[axis] == 0:
            line = range(first, first + stride * mesh[axis], stride)
            for rank, result in zip(line, work([calls[rank] for rank in line]), strict=True):
                results[rank] = result
    return results


def _moved(begun: Sequence[Any]) -> list[Any]:
    _, source, target, _ = begun[0]
    rows = zip(*(tensors for tensors, *_ in begun), strict=True)  # local tensors of one tensor on all ranks
    return [*zip(*(divide(join(row, source), target, len(begun)) for row in rows), strict=True)]


def _own_shards(taken: Sequence[Any]) -> list[Tensor]:
    return [divide(tensor, dim, len(taken))[place] for place, (tensor, dim, _) in enumerate(taken)]


def _summed(exchanged: Sequence[Any]) -> list[Any]:
    return sum_together([_computation(args, len(exchanged)) for args in exchanged])


def _computation(args: Sequence[Any], ranks: int) -> Any:
    compute, op, inner, kwargs, _ = args
    return compute(op, inner, kwargs, ranks)


@dataclass
class MessageTotals:
    """Totals of the messages of one rank over all programs that it runs."""

    sent: int = 0
    """Bytes of the tensors that the rank sends."""
    waited: float = 0.0
    """Seconds for which the rank waits for messages."""

    @contextmanager
    def waiting(self, nbytes: int) -> Iterator[None]:
        """Context around waiting for a message in which the rank sends `nbytes` bytes."""
        with span("operators", "wire", nbytes) as work:
            yield
        self.sent += nbytes
        self.waited += time.perf_counter() - work.began


def run_rank(
    program: RankProgram,
    values: Sequence[Tensor],
    groups: Sequence[dist.ProcessGroup],
    traffic: MessageTotals | None = None,
) -> list[Tensor | None]:
    """Run a program on this rank of a mesh. A collective.

    Args:
        values: this rank's local tensors of the step's inputs, in the order of the placeholders.
        groups: this rank's group along each axis of the mesh.
        traffic: counts what the rank exchanges.

    Returns:
        This rank's local tensors of the step's outputs.
    """
    left, env = iter(values), dict[fx.Node, Any]()
    traffic = traffic or MessageTotals()
    uses = {node: len(node.users) for node in program.graph.nodes}
    with torch.no_grad():
        for node in program.graph.nodes:
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), env.__getitem__)
            if node.op == "placeholder":
                env[node] = next(left)
            elif node.op == "output":
                return list(args[0])
            elif node.target is begin_move:
                tensors, source, target, axis = args
                env[node] = _Message(tensors, source, target, groups[axis])
            elif node.target is end_move:
                env[node] = args[0].ended(traffic)
            elif node.target is take_shard:
                tensor, dim, axis = args
                env[node] = divide(tensor, dim, program.mesh[axis])[dist.get_rank(groups[axis])]
            elif node.target is exchange:
                group = groups[args[-1]]
                env[node] = _sum_over(_computation(args, group.size()), group, traffic)
            else:
                function: Any = node.target
                env[node] = function(*args, **kwargs)
            for source in node.all_input_nodes:  # free what no later node reads
                uses[source] -= 1
                if not uses[source]:
                    del env[source]
    raise ValueError("the program has no output")


def _sum_over(computation: Any, group: dist.ProcessGroup, traffic: MessageTotals) -> Any:
    value = None
    while True:
        try:
            value = computation.send(value).contiguous()
        except StopIteration as stop:
            return stop.value
        with traffic.waiting(value.nbytes):
            dist.all_reduce(value, group=group)


class _Message:
    """A message under way, which moves tensors from one placement to another."""

    def __init__(
        self, tensors: Sequence[Tensor], source: Placement, target: Placement, group: dist.ProcessGroup
    ) -> None:
        self.tensors, self.source, self.target, self.ranks = tensors, source, target, group.size()
        first = tensors[0]
        if target >= 0:  # a row for each rank, with its chunks of all tensors
            chunks = [tensor.chunk(self.ranks, target) for tensor in tensors]
            rows = [torch.cat([chunk[rank].flatten() for chunk in chunks]) for rank in range(self.ranks)]
            self.shapes, sent = [chunk[0].shape for chunk in chunks], torch.stack(rows)
        else:
            self.shapes, sent = [tensor.shape for tensor in tensors], torch.cat([one.flatten() for one in tensors])
        if source == SUM and target == WHOLE:
            self.received = sent
            self.work = dist.all_reduce(sent, group=group, async_op=True)
        elif source == SUM:
            self.received = first.new_empty(sent.shape[1])
            self.work = reduce_scatter_single(self.received, sent.flatten(), group=group, async_op=True)
        elif target == WHOLE:
            self.received = first.new_empty(self.ranks * len(sent))
            self.work = all_gather_single(self.received, sent, group=group, async_op=True)
        else:
            self.received = first.new_empty(sent.numel())
            self.work = dist.all_to_all_single(self.received, sent.flatten(), group=group, async_op=True)
        self.sent = sent  # must stay alive until it has been sent

    def ended(self, traffic: MessageTotals) -> tuple[Tensor, ...]:
        """Wait for the message; returns this rank's local tensors in the new placement."""
        assert self.work is not None
        with traffic.waiting(self.sent.nbytes):
            self.work.wait()
        sizes = [shape.numel() for shape in self.shapes]
        if self.source == SUM:
            parts = self.received.split(sizes)
            return tuple(part.view(shape) for part, shape in zip(parts, self.shapes, strict=True))
        rows = [row.split(sizes) for row in self.received.view(self.ranks, -1)]  # one from each rank
        return tuple(
            torch.cat([row[place].view(shape) for row in rows], self.source) for place, shape in enumerate(self.shapes)
        )
