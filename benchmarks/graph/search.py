"""Search: the time from a model to its plan, how much merging reduces, and whether usual ways are ever better."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cache
from itertools import product

from benchmarks.graph.models import CASES, FEW_LAYERS, Shape, gpt, text_case
from benchmarks.harness import Bar, Deadline
from benchmarks.intervals import of_median
from benchmarks.rows import Measured
from benchmarks.timing import FEWEST_ROUNDS
from shoestring.graph.costs import GraphCosts, ring
from shoestring.graph.meshes import search_mesh
from shoestring.graph.program import DividedStep
from shoestring.graph.rules import RuleBook
from shoestring.graph.search import GraphPlan, SplitSearch, fixed_plans, search
from shoestring.graph.trace import JointTrace
from shoestring.planning.cluster import Cluster

CPUS, FOUR = "4 CPUs at 1 Gbit/s", "4 GPUs at 40 Gbit/s"
CLUSTERS: Mapping[str, Cluster] = {
    CPUS: ring(4, latency=2e-4, bandwidth=1.25e8, flops=2e10, copy=4e9),
    FOUR: ring(4, latency=2e-5, bandwidth=5e9, flops=9e12, copy=3e11),
    "2 GPUs at 200 Gbit/s": ring(2, latency=1e-5, bandwidth=2.5e10, flops=9e12, copy=3e11),
}
PATIENCE = 300.0  # seconds for one program


@cache
def traced(name: str) -> JointTrace:
    """The traced step of a model."""
    return CASES[name].fake()


@cache
def planned(name: str, cluster: str, merge: bool | None = None) -> GraphPlan:
    """The plan that the search finds; where `merge` is None, as it is by default."""
    costs = GraphCosts.of(CLUSTERS[cluster])
    return search(traced(name), RuleBook(costs.ranks), costs, SplitSearch(merge=merge, seconds=PATIENCE))


def seconds(layers: int, mesh: tuple[int, ...]) -> Callable[[Deadline], Measured]:
    """Processor seconds from GPT of so many layers to its plan on four GPUs; the first round warms up."""

    def measure(deadline: Deadline) -> Measured:
        times = list[float]()
        for _ in range(FEWEST_ROUNDS + 1):
            deadline.check()
            began = time.process_time()
            step = text_case(gpt, Shape(layers)).fake()
            plan = search_mesh(step, GraphCosts.of(CLUSTERS[FOUR]).over(mesh))
            times.append(time.process_time() - began)
        built, solved = (sum(getattr(axis, part) for axis in plan.axes) for part in ("build_seconds", "solve_seconds"))
        parts = f"trace {step.seconds:.2f} s, build {built:.2f} s, solve {solved:.2f} s"
        told = f"{len(step.operators)} operators; the last plan: {parts}; the first took {times[0]:.1f} s"
        return of_median(times[1:], told)

    return measure


def reduction(name: str) -> Callable[[Deadline], Measured]:
    """How many operators share a decision, at the least over clusters."""

    def measure(deadline: Deadline) -> Measured:
        plans = {cluster: planned(name, cluster, True) for cluster in CLUSTERS}
        told = "; ".join(f"{where}: {plan.groups} groups of {plan.deciders}" for where, plan in plans.items())
        return Measured(min(plan.reduction for plan in plans.values()), told)

    return measure


def loss(name: str) -> Callable[[Deadline], Measured]:
    """How far the objective of the merged program is above that of the whole program, at the most over clusters."""

    def measure(deadline: Deadline) -> Measured:
        losses = {}
        for cluster in CLUSTERS:
            deadline.check()
            losses[cluster] = planned(name, cluster, True).objective / planned(name, cluster, False).objective - 1
        return Measured(max(losses.values()), "; ".join(f"{where} {value:.2%}" for where, value in losses.items()))

    return measure


def never_worse(deadline: Deadline) -> Measured:
    """The largest objective of a found plan over the best of the usual plans, whose programs are not merged."""
    ratios = {}
    for name, cluster in product(CASES, CLUSTERS):
        deadline.check()
        step, costs = traced(name), GraphCosts.of(CLUSTERS[cluster])
        book, settings = RuleBook(costs.ranks), SplitSearch(merge=False, seconds=PATIENCE)
        usual = {
            way: search(step, book, costs, settings, pinned).objective for way, pinned in fixed_plans(step).items()
        }
        best = min(usual, key=usual.__getitem__)
        ratio = planned(name, cluster).objective / usual[best]
        # Where the found plan is the usual one, the sums differ in their last bit.
        ratios[f"{name} on {cluster} against {best}"] = round(ratio, 12)
    worst = max(ratios, key=ratios.__getitem__)
    return Measured(ratios[worst], f"of {len(ratios)}, the worst: {worst}; the best {min(ratios.values()):.3f}")


def never_worse_on_meshes(usual: bool) -> Callable[[Deadline], Measured]:
    """The largest objective of a plan found on a mesh over the best two of the usual ways, one along each axis.

    Args:
        usual: whether the search may try them along the first axis.
    """

    def measure(deadline: Deadline) -> Measured:
        ratios = {}
        for (name, case), cluster in product(FEW_LAYERS.items(), (CPUS, FOUR)):
            first, second = GraphCosts.of(CLUSTERS[cluster]).over((2, 2))
            step, book, least = case.fake(), RuleBook(2), dict[str, float]()
            for outer, pinned in fixed_plans(step).items():
                deadline.check()
                along = search(step, book, first, SplitSearch(merge=False, seconds=PATIENCE), pinned)
                inside = DividedStep.whole(step).divided(along.rules, 2).step
                for inner, more in fixed_plans(inside).items():
                    settings = SplitSearch(merge=False, seconds=PATIENCE)
                    least[f"{outer}, then {inner}"] = search(inside, book, second, settings, more).objective
            plan, best = search_mesh(step, (first, second), SplitSearch(usual=usual)), min(least, key=least.__getitem__)
            ratios[f"{name} on {cluster} against {best}"] = plan.objective / least[best]
        return Measured(max(ratios.values()), "; ".join(f"{name} {value:.3f}" for name, value in ratios.items()))

    return measure


def rows() -> list[Bar]:
    """The bars of the search."""
    above = "objective of the merged program above that of the whole one, at most over three clusters"
    shared = "operators and placeholders over groups that decide for themselves, at least over three clusters"
    bars = {"resnet50": 7.2, "gpt12": 10.0, "llama8": 6.0}
    never = "objective of found plans over the best of replicas, FSDP and Megatron, at most over models and clusters"
    on_mesh = "objective of plans found on 2 × 2 ranks over the best two of the usual ways, one along each axis"
    timed = "processor seconds from GPT of 2 layers to its plan"
    return [
        Bar("graph.search-seconds", "processor seconds from GPT of 8 layers to its plan", "<=", 5, seconds(8, (4,))),
        Bar("graph.search-mesh-seconds", f"{timed} on 2 × 2 ranks", "<=", 8, seconds(2, (2, 2))),
        *(
            Bar(f"graph.merged-{name}", f"{name}: {shared}", ">=", bar, reduction(name), kind="exact")
            for name, bar in bars.items()
        ),
        *(Bar(f"graph.merged-{name}-loss", f"{name}: {above}", "<=", 0.005, loss(name), kind="exact") for name in bars),
        Bar("graph.never-worse", never, "<=", 1.0, never_worse, kind="exact"),
        Bar("graph.never-worse-mesh", on_mesh, "<=", 1.0, never_worse_on_meshes(usual=True), kind="exact"),
        Bar(
            "graph.never-worse-mesh-withheld",
            f"{on_mesh}, which the search does not try",
            "<=",
            1.02,
            never_worse_on_meshes(usual=False),
            kind="exact",
        ),
    ]
