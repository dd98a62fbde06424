"""Searches how ranks that are arranged in a mesh divide a step: along one axis after the other.

What a rank computes after the first axis has divided the step is a step as well, with messages among its operators, and
the next axis divides that one exactly. What is best along the first axis depends on the later ones, so several plans
along it are tried: the one that the search finds, and the usual ways to train. This is no optimum: the first axis
cannot know what the next one makes of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from shoestring.core.errors import ConfigError
from shoestring.graph.costs import GraphCosts
from shoestring.graph.placements import ShardingRule
from shoestring.graph.program import DividedStep
from shoestring.graph.rules import RuleBook
from shoestring.graph.search import GraphPlan, Pinned, SplitSearch, fixed_plans, search
from shoestring.graph.trace import StepGraph


@dataclass(frozen=True)
class MeshPlan:
    """How a step is divided along the axes of a mesh."""

    steps: tuple[StepGraph, ...]
    """The step that each axis divides: what the axes before it leave to a rank."""
    axes: tuple[GraphPlan, ...]
    """The plan along each axis."""
    divided: DividedStep
    """What one rank computes."""

    @property
    def objective(self) -> float:
        """Predicted seconds of a step, without overlap of communication and computation."""
        return self.axes[-1].objective

    @property
    def memory(self) -> float:
        """Bytes that parameters, gradients, optimizer state and saved activations of a rank take."""
        return self.axes[-1].memory


def search_mesh(
    step: StepGraph,
    axes: Sequence[GraphCosts],
    settings: SplitSearch | None = None,
    pinned: Pinned | None = None,
    books: Mapping[int, RuleBook] | None = None,
) -> MeshPlan:
    """Find a fast plan of a step on a mesh.

    Args:
        axes: costs along each axis (`GraphCosts.over`).
        pinned: placements that parameters and inputs must have along every axis; everything else stays free.
        books: rules by numbers of ranks, to find them once for several searches.

    Raises:
        ConfigError: scipy is not installed, no plan fits into the memory, or the solver found none in time.
    """
    books = books or {axis.ranks: RuleBook(axis.ranks) for axis in axes}
    return _search(DividedStep.whole(step), axes, settings or SplitSearch(), pinned or (lambda name: None), books)


def _search(
    divided: DividedStep,
    axes: Sequence[GraphCosts],
    settings: SplitSearch,
    pinned: Pinned,
    books: Mapping[int, RuleBook],
) -> MeshPlan:
    """Find a plan along all axes that are left."""
    if not axes:
        return MeshPlan((), (), divided)
    axis, *later = axes
    room = replace(settings, memory=settings.memory * math.prod(one.ranks for one in later))
    ways: list[Pinned] = [pinned]
    if later and settings.usual:
        ways += [_both(pinned, way) for way in fixed_plans(divided.step).values()]
    best, failed, tried = None, None, list[Mapping[fx.Node, ShardingRule]]()
    for way in ways:
        try:
            plan = search(divided.step, books[axis.ranks], axis, room, way)
            if plan.rules in tried:
                continue
            tried.append(plan.rules)
            rest = _search(divided.divided(plan.rules, axis.ranks), later, settings, pinned, books)
        except ConfigError as error:
            failed = error
            continue
        whole = MeshPlan((divided.step, *rest.steps), (plan, *rest.axes), rest.divided)
        best = whole if best is None or whole.objective < best.objective else best
    if best is None:
        assert failed is not None
        raise failed
    return best


def _both(first: Pinned, second: Pinned) -> Pinned:
    """Placements that the first asks for, and elsewhere those of the second."""
    return lambda name: second(name) if (wanted := first(name)) is None else wanted
