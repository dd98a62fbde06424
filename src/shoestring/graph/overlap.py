"""Reorders a rank's program so that messages overlap computation, and splits or fuses messages for this purpose.

A message is critical if the processor must wait for it, because too little other work is left that does not depend on
it. Critical messages are split into tiles if the step then ends earlier in spite of the extra costs of tiles
(latencies, launches of operators, and reading weights again). Short messages are fused, and `planning.schedule` orders
operators and messages. The order depends only on the program and the costs, so ranks with equal programs and costs find
the same order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from torch import fx

from shoestring.core.trace import Trace
from shoestring.graph.costs import GraphCosts
from shoestring.graph.program import (
    PROCESSOR,
    ProgramTasks,
    RankProgram,
    in_program_order,
    message_kind,
    message_seconds,
    program_tasks,
)
from shoestring.graph.rules import RuleBook
from shoestring.graph.tiles import Region, regions_of, tiled
from shoestring.graph.trace import neighbourhoods
from shoestring.planning.fusion import fuse
from shoestring.planning.schedule import TaskOrder, in_order, lower_bound, schedule
from shoestring.planning.simulate import Task, makespan, simulate

TILES = (2, 4)
"""Numbers of tiles per message that are tried."""
PRODUCTS = (1, 2)
"""Numbers of matrix products before and after a message that are tiled with it, to try."""
KINDS = 4
"""Number of kinds of critical messages for which tiles are tried; messages in equal neighbourhoods are one kind."""
GAIN = 0.002
"""Fraction of a step's seconds that tiles for one kind of messages must save."""
ROUNDS = 100
"""Rounds in which `planning.schedule` improves the order."""


@dataclass(frozen=True)
class OverlappedProgram:
    """A program in an order in which messages and computation overlap."""

    program: RankProgram
    schedule: TaskOrder
    serial: float
    """Seconds of the original program if nothing overlaps."""
    traced: float
    """Seconds of the original program if messages begin as soon as their tensors exist."""
    exposed_traced: float
    """Seconds, of `traced`, in which the processor waits."""
    exposed: float
    """Seconds of the ordered program in which the processor waits."""
    tiled: int
    """Number of messages of the original program that are split into tiles."""
    fused: int
    """Number of messages that are sent as part of another one."""


def overlap(program: RankProgram, costs: GraphCosts, rounds: int = ROUNDS) -> OverlappedProgram:
    """Reorder a program, and split and fuse its messages, if it then ends earlier."""
    before = program_tasks(program, costs)
    regions = choose_regions(program, costs)
    parted = tiled(program, regions) if regions else program
    work = program_tasks(parted, costs)

    def together(members: Sequence[int]) -> float | None:
        nodes = [work.nodes[index] for index in members]
        return message_seconds(nodes, costs) if len({message_kind(node) for node in nodes}) == 1 else None

    fused = fuse(work.tasks, together)
    planned = schedule(fused.tasks, rounds)
    traced, ordered = simulate(before.tasks), simulate(in_order(fused.tasks, planned.order))
    serial, exposed = sum(task.seconds for task in before.tasks), makespan(traced) - _busy(before.tasks)
    if planned.seconds >= makespan(traced):  # no better order was found
        own = TaskOrder(tuple(range(len(before.tasks))), makespan(traced), lower_bound(before.tasks))
        return OverlappedProgram(program, own, serial, makespan(traced), exposed, exposed, tiled=0, fused=0)
    groups = [[work.nodes[index] for index in fused.members[place]] for place in planned.order]
    return OverlappedProgram(
        in_program_order(parted, groups),
        planned,
        serial,
        makespan(traced),
        exposed,
        makespan(ordered) - _busy(fused.tasks),
        tiled=len(regions),
        fused=len(work.tasks) - len(fused.tasks),
    )


def _busy(tasks: Sequence[Task]) -> float:
    return sum(task.seconds for task in tasks if task.resource == PROCESSOR)


# -- critical messages -------------------------------------------------------------------------------------------------


def choose_regions(program: RankProgram, costs: GraphCosts) -> list[Region]:
    """Choose the regions that are split into tiles, because the program then ends earlier."""
    before = program_tasks(program, costs)
    planned = schedule(before.tasks, rounds=0)
    books, regions, seconds = {tiles: RuleBook(tiles) for tiles in TILES}, list[Region](), planned.seconds
    for messages in _critical(program, before, planned)[:KINDS]:
        tried = list[tuple[float, list[Region]]]()
        for tiles, products in product(TILES, PRODUCTS):
            first = [next(regions_of(begun, books[tiles], products), None) for begun in messages]
            option = [*regions, *(region for region in first if region is not None)]
            tasks = program_tasks(tiled(program, option), costs).tasks
            tried.append((schedule(tasks, rounds=0).seconds, option))
        best, option = min(tried, key=lambda one: one[0])
        if best < seconds * (1 - GAIN):
            seconds, regions = best, option
    return regions


def _critical(program: RankProgram, work: ProgramTasks, planned: TaskOrder) -> list[list[fx.Node]]:
    """Messages for which the processor waits, grouped by kind; the kinds with the longest waits come first."""
    waits = exposed_messages(simulate(in_order(work.tasks, planned.order)))
    classes = neighbourhoods([node for node in program.graph.nodes if node.op != "output"], 2)
    kinds, total = defaultdict[int, list[fx.Node]](list), defaultdict[int, float](float)
    for node in program.messages:
        kinds[classes[node]].append(node)
        total[classes[node]] += waits[node.name]
    return [kinds[number] for number in sorted(kinds, key=lambda number: -total[number]) if total[number] > 0]


def exposed_messages(trace: Trace) -> dict[str, float]:
    """Name of each message of a simulated program -> its exposed seconds, in which the processor is idle."""
    computing = sorted((span.start, span.stop) for span in trace.spans if span.kind == "compute")
    exposed, place = dict[str, float](), 0
    for span in sorted((span for span in trace.spans if span.kind == "wire"), key=lambda span: span.start):
        while place < len(computing) and computing[place][1] <= span.start:
            place += 1
        hidden, at = 0.0, place
        while at < len(computing) and computing[at][0] < span.stop:
            hidden += min(computing[at][1], span.stop) - max(computing[at][0], span.start)
            at += 1
        exposed[span.name] = span.stop - span.start - hidden
    return exposed
