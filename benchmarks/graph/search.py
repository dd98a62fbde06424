"""Search: the time from a model to its plan, how much merging reduces, and whether usual ways are ever better."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cache
from itertools import product

from benchmarks.graph.models import CASES, Shape, gpt, text_case
from benchmarks.harness import Bar, Deadline
from benchmarks.intervals import of_median
from benchmarks.rows import Measured
from benchmarks.timing import FEWEST_ROUNDS
from shoestring.graph.costs import GraphCosts, ring
from shoestring.graph.rules import RuleBook
from shoestring.graph.search import GraphPlan, SplitSearch, fixed_plans, search
from shoestring.graph.trace import JointTrace
from shoestring.planning.cluster import Cluster

CLUSTERS: Mapping[str, Cluster] = {
    "4 CPUs at 1 Gbit/s": ring(4, latency=2e-4, bandwidth=1.25e8, flops=2e10, copy=4e9),
    "4 GPUs at 40 Gbit/s": ring(4, latency=2e-5, bandwidth=5e9, flops=9e12, copy=3e11),
    "2 GPUs at 200 Gbit/s": ring(2, latency=1e-5, bandwidth=2.5e10, flops=9e12, copy=3e11),
}
PATIENCE = 300.0  # seconds for one program


@cache
def traced(name: str) -> JointTrace:
    """The traced step of a model."""
    return CASES[name].fake()


@cache
def planned(name: str, cluster: str, merge: bool) -> GraphPlan:
    """The plan that the search finds."""
    costs = GraphCosts.of(CLUSTERS[cluster])
    return search(traced(name), RuleBook(costs.ranks), costs, SplitSearch(merge=merge, seconds=PATIENCE))


def seconds(deadline: Deadline) -> Measured:
    """Processor seconds from the model to the plan; the first round warms up."""
    times = list[float]()
    for _ in range(FEWEST_ROUNDS + 1):
        deadline.check()
        began = time.process_time()
        step = text_case(gpt, Shape(8)).fake()
        costs = GraphCosts.of(CLUSTERS["4 GPUs at 40 Gbit/s"])
        plan = search(step, RuleBook(costs.ranks), costs)
        times.append(time.process_time() - began)
    parts = f"trace {step.seconds:.2f} s, build {plan.build_seconds:.2f} s, solve {plan.solve_seconds:.2f} s"
    return of_median(times[1:], f"{len(step.operators)} operators; the last: {parts}; the first took {times[0]:.1f} s")


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
        ratios[f"{name} on {cluster} against {best}"] = planned(name, cluster, True).objective / usual[best]
    worst = max(ratios, key=ratios.__getitem__)
    return Measured(ratios[worst], f"of {len(ratios)}, the worst: {worst}; the best {min(ratios.values()):.3f}")


def rows() -> list[Bar]:
    """The bars of the search."""
    above = "objective of the merged program above that of the whole one, at most over three clusters"
    shared = "operators and placeholders over groups that decide for themselves, at least over three clusters"
    bars = {"resnet50": 7.2, "gpt12": 10.0, "llama8": 6.0}
    never = "objective of found plans over the best of replicas, FSDP and Megatron, at most over models and clusters"
    return [
        Bar("graph.search-seconds", "processor seconds from GPT of 8 layers to its plan", "<=", 5, seconds),
        *(
            Bar(f"graph.merged-{name}", f"{name}: {shared}", ">=", bar, reduction(name), kind="exact")
            for name, bar in bars.items()
        ),
        *(Bar(f"graph.merged-{name}-loss", f"{name}: {above}", "<=", 0.005, loss(name), kind="exact") for name in bars),
        Bar("graph.never-worse", never, "<=", 1.0, never_worse, kind="exact"),
    ]
