"""Searches how the ranks of a mesh divide a step, along one axis of the mesh after the other.

After the first axis has divided a step, each rank computes a smaller step, whose operators include moves; the next axis
divides this step. Which plan is best along the first axis depends on the later axes, so several plans are tried there:
the plan that the search finds, and the usual ways to train. The result need not be optimal, because a search along one
axis does not foresee the later axes.
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
    """The step that each axis divides: what one rank computes after the earlier axes."""
    axes: tuple[GraphPlan, ...]
    """The plan along each axis."""
    divided: DividedStep
    """The step that one rank of the mesh computes."""

    @property
    def objective(self) -> float:
        """Predicted seconds of a step, without overlap of communication and computation."""
        return self.axes[-1].objective

    @property
    def memory(self) -> float:
        """Bytes of a rank's parameters, gradients, optimizer state and saved activations."""
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
        books: number of ranks -> rules; shared by several searches, so that rules are found only once.

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
    """Find a plan along all remaining axes."""
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
    """The placements that `first` requires; where it requires none, those of `second`."""
    return lambda name: second(name) if (wanted := first(name)) is None else wanted
