"""Runs programs of ranks: on the ranks of a process group, and of all ranks in one process, to check them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from shoestring._torch import all_gather_single, reduce_scatter_single
from shoestring.core.trace import span
from shoestring.graph.lockstep import divide, join, sum_together
from shoestring.graph.placements import SUM, WHOLE, Placement
from shoestring.graph.program import RankProgram, begin_move, end_move, exchange, take_shard


def run_lockstep(program: RankProgram, values: Sequence[Tensor]) -> list[Tensor | None]:
    """Run the programs of all ranks in one process.

    Args:
        values: the step's inputs, whole, in the order of the placeholders.

    Returns:
        The step's outputs, whole.
    """
    ranks, placed = range(program.ranks), iter(zip(values, program.inputs, strict=True))
    columns = dict[fx.Node, list[Any]]()

    def arguments(node: fx.Node, rank: int) -> tuple[Any, Any]:
        return fx.node.map_arg((node.args, dict(node.kwargs)), lambda source: columns[source][rank])

    with torch.no_grad():
        for node in program.graph.nodes:
            if node.op == "placeholder":
                columns[node] = divide(*next(placed), program.ranks)
                continue
            calls = [arguments(node, rank) for rank in ranks]
            if node.op == "output":
                rows = zip(*(args[0] for args, _ in calls), strict=True)
                return [join(row, to) for row, to in zip(rows, program.outputs, strict=True)]
            if node.target is begin_move:
                columns[node] = [args for args, _ in calls]
            elif node.target is end_move:
                begun = [args[0] for args, _ in calls]
                _, source, target = begun[0]
                rows = zip(*(tensors for tensors, _, _ in begun), strict=True)  # a tensor's parts on all ranks
                columns[node] = [*zip(*(divide(join(row, source), target, program.ranks) for row in rows), strict=True)]
            elif node.target is take_shard:
                columns[node] = [divide(args[0], args[1], program.ranks)[rank] for rank, (args, _) in enumerate(calls)]
            elif node.target is exchange:
                columns[node] = sum_together([_computation(args, program.ranks) for args, _ in calls])
            else:
                function: Any = node.target
                columns[node] = [function(*args, **kwargs) for args, kwargs in calls]
    raise ValueError("the program has no output")


def _computation(args: Sequence[Any], ranks: int) -> Any:
    compute, op, inner, kwargs = args
    return compute(op, inner, kwargs, ranks)


@dataclass
class MessageTotals:
    """What a rank exchanges while it runs programs."""

    sent: int = 0
    """Bytes of the tensors that the rank gives to messages."""
    waited: float = 0.0
    """Seconds for which it waits for messages."""

    @contextmanager
    def waiting(self, nbytes: int) -> Iterator[None]:
        """Context around waiting for a message to which the rank gives so many bytes."""
        with span("operators", "wire", nbytes) as work:
            yield
        self.sent += nbytes
        self.waited += time.perf_counter() - work.began


def run_rank(
    program: RankProgram, values: Sequence[Tensor], group: dist.ProcessGroup, traffic: MessageTotals | None = None
) -> list[Tensor | None]:
    """Run a program on this rank of a process group. A collective.

    Args:
        values: what this rank has of the step's inputs, in the order of the placeholders.
        traffic: counts what the rank exchanges.

    Returns:
        What this rank has of the step's outputs.
    """
    index, left, env = dist.get_rank(group), iter(values), dict[fx.Node, Any]()
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
                env[node] = _Message(args[0], args[1], args[2], group)
            elif node.target is end_move:
                env[node] = args[0].ended(traffic)
            elif node.target is take_shard:
                env[node] = divide(args[0], args[1], program.ranks)[index]
            elif node.target is exchange:
                env[node] = _sum_over(_computation(args, program.ranks), group, traffic)
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
    """A message that travels: tensors on their way from one placement to another."""

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
        self.sent = sent  # lives until it has been sent

    def ended(self, traffic: MessageTotals) -> tuple[Tensor, ...]:
        """Wait for the message; returns what this rank has of the moved tensors."""
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
