"""How much another order of computations and messages saves, and how far found orders are from the bound.

A step's tasks (passes of micro-batches, messages, exchanges of gradients) and the resources that do them are those of
`planning.simulate`, for the plans that the planner chooses on assumed clusters. `graph.order` bounds what any order
could hide, and a list schedule stands beside it; both may hold more activations than the planned order.
`graph.schedule-exposed` is what orders hide that fit into memory, with the tasks as the planner would run them. The
bound itself is tried on generated steps.

A bar of `graph.order` that holds says that a scheduler is not worth building; one that is missed says only that it
might be.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from statistics import median

from benchmarks.graph.models import SMALL_CASES
from benchmarks.graph.search import CLUSTERS as HOSTS
from benchmarks.graph.search import planned, traced
from benchmarks.graph.two_chains import optimum
from benchmarks.harness import Bar, Deadline
from benchmarks.intervals import of_median
from benchmarks.parallel.case_costs import CaseCluster, links_of
from benchmarks.parallel.cases import CLUSTERS, MODELS, price
from benchmarks.rows import Measured
from benchmarks.timing import FEWEST_ROUNDS
from shoestring.graph.costs import GraphCosts
from shoestring.graph.lockstep import difference, random_plan, real_values, run_whole
from shoestring.graph.overlap import overlap
from shoestring.graph.program import rank_program
from shoestring.graph.rules import RuleBook
from shoestring.graph.running import run_lockstep
from shoestring.graph.tiles import regions_of, tiled
from shoestring.planner.outlook import FILLED, GIB
from shoestring.planner.reordering import with_overlap
from shoestring.planner.search import TrainingPlan
from shoestring.planning.fusion import fuse
from shoestring.planning.predict import tasks_of
from shoestring.planning.schedule import lower_bound, schedule
from shoestring.planning.simulate import Task, makespan, simulate

NAMES = ("GPT", "Llama", "ViT")
"""Beginnings of the names of models; of each, the largest model is planned."""
SIZES, SEEDS = (50, 150, 300, 600), range(3)
TILES, PLANS = (2, 4), 2


# -- planned steps -----------------------------------------------------------------------------------------------------


@cache
def plans(name: str) -> dict[CaseCluster, TrainingPlan]:
    """The planned step on each cluster, where ranks communicate."""
    model = max((one for one in MODELS if one.name.startswith(name)), key=lambda one: one.weights)
    best = {cluster: price(model, cluster, model.batches[1]).best for cluster in CLUSTERS}
    return {
        cluster: plan
        for cluster, plan in best.items()
        if plan is not None and len({span.kind for span in plan.predicted.trace.spans}) > 1
    }


def saved(name: str, deadline: Deadline) -> Measured:
    """The largest part of the exposed communication that any order could hide, over clusters."""
    parts, gains = dict[str, float](), list[float]()
    for cluster, plan in plans(name).items():
        deadline.check()
        tasks = tasks_of(plan.step, links_of(cluster))
        seconds = makespan(simulate(tasks))
        exposed = seconds - max(plan.predicted.busy())
        parts[cluster.label] = (seconds - lower_bound(tasks)) / exposed if exposed > 1e-9 * seconds else 0.0
        gains.append(seconds / schedule(tasks, rounds=1).seconds)
    told = ", ".join(f"{cluster} {part:.0%}" for cluster, part in parts.items())
    return Measured(max(parts.values()), f"{told}; by a list schedule at most {max(gains):.3f} times as fast")


def hidden(name: str, deadline: Deadline) -> Measured:
    """The part of the exposed communication that the found order hides, as the median over clusters."""
    parts, told = list[float](), list[str]()
    for cluster, plan in plans(name).items():
        deadline.check()
        links = links_of(cluster)
        tasks = tasks_of(plan.step, links)
        at_once = [replace(task, seconds=0.0) if task.kind == "wire" else task for task in tasks]
        seconds, free = makespan(simulate(tasks)), makespan(simulate(at_once))
        if plan.step.stages > 1 or plan.step.ways > 1:
            ordered = with_overlap([plan], links, None, FILLED * cluster.processor.gib * GIB)[0].seconds
        else:
            ordered = min(seconds, schedule(_fused(tasks, plan, cluster), rounds=100).seconds)
        parts.append((seconds - ordered) / (seconds - free) if seconds > free * (1 + 1e-9) else 0.0)
        told.append(f"{cluster.label} {seconds - free:.3g} s to {ordered - free:.3g} s of {seconds:.3g} s")
    return Measured(median(parts), "exposed: " + "; ".join(told))


def _fused(tasks: Sequence[Task], plan: TrainingPlan, cluster: CaseCluster) -> list[Task]:
    """The tasks with exchanges of gradients fused where that ends the step earlier."""
    averages, links = plan.step.averages, links_of(cluster)

    def together(members: Sequence[int]) -> float | None:
        if len(averages) != 1 or any(not tasks[index].name.startswith("gradients") for index in members):
            return None
        nbytes = sum(tasks[index].nbytes for index in members)
        return links.seconds(averages[0].kind, plan.step.group(averages[0].over), nbytes)

    return fuse(tasks, together).tasks


# -- generated steps ---------------------------------------------------------------------------------------------------


class _Drawn:
    """A step with drawn durations."""

    def __init__(self, seed: int) -> None:
        self.draw, self.tasks = random.Random(seed), list[Task]()

    def task(self, resource: str, mean: float, *after: int) -> int:
        return self.exactly(resource, mean * self.draw.uniform(0.5, 1.5), *after)

    def exactly(self, resource: str, seconds: float, *after: int) -> int:
        kind = "compute" if resource.startswith("processor") else "wire"
        self.tasks.append(Task(f"task {len(self.tasks)}", kind, seconds, resource, tuple(sorted({*after}))))
        return len(self.tasks) - 1


def gathered_layers(size: int, seed: int) -> list[Task]:
    """Layers whose weights are gathered and whose gradients are scattered, and that exchange activations."""
    drawn, state = _Drawn(seed), list[int]()
    layers = max(size // 14, 1)
    for _ in range(layers):
        weights = drawn.task("link", 0.6)
        for _ in range(2):
            state = [drawn.task("link", 0.3, drawn.task("processor", 1.0, weights, *state))]
    for _ in range(layers):
        weights = drawn.task("link", 0.6)
        for _ in range(2):
            state = [drawn.task("link", 0.3, drawn.task("processor", 1.0, weights, *state))]
            drawn.task("processor", 0.7, weights, *state)
        drawn.task("link", 0.6, len(drawn.tasks) - 1)
    return drawn.tasks


def buckets(size: int, seed: int) -> list[Task]:
    """Backward passes of layers whose gradients are averaged, and the optimizer's steps for each bucket."""
    drawn, state = _Drawn(seed), list[int]()
    for _ in range(size // 3):
        state = [drawn.task("processor", 1.0, *state)]
        drawn.task("processor", 0.2, drawn.task("link", drawn.draw.choice((0.3, 1.5)), *state))
    return drawn.tasks


def stages(size: int, seed: int) -> list[Task]:
    """Micro-batches that pass through four stages and back."""
    drawn, count = _Drawn(seed), 4
    seconds = [drawn.draw.uniform(0.8, 1.2) for _ in range(count)]
    for _ in range(max(size // (4 * count - 2), 1)):
        state = list[int]()
        for stage in range(count):
            state = [drawn.task(f"processor {stage}", seconds[stage], *state)]
            state = [drawn.task(f"link {stage}", 0.4, *state)] if stage < count - 1 else state
        for stage in reversed(range(count)):
            state = [drawn.task(f"processor {stage}", 2 * seconds[stage], *state)]
            state = [drawn.task(f"link {stage}", 0.4, *state)] if stage else state
    return drawn.tasks


def halves(size: int, seed: int) -> list[Task]:
    """Equal split layers that compute a batch in two tiles, each of which waits for the sums of the layer before."""
    drawn = _Drawn(seed)
    kinds = [(drawn.draw.uniform(0.7, 1.3), drawn.draw.uniform(0.3, 0.9)) for _ in range(2)]
    states: list[list[int]] = [[], []]
    for number in range(size // 4):
        work, message = kinds[number % 2]
        for tile, state in enumerate(states):
            done = drawn.exactly("processor", work, *state)
            states[tile] = [drawn.exactly("link", message, done)]
    return drawn.tasks


STEPS: dict[str, Callable[[int, int], list[Task]]] = {
    "gathered layers": gathered_layers,
    "buckets": buckets,
    "tiles of split layers": halves,
}
"""The steps of one rank."""


def ratio(deadline: Deadline) -> Measured:
    """The largest ratio of a found order to the bound, or to the optimum of tiles, which is known."""
    ratios, longest = dict[str, float](), 0.0
    for (name, step), size, seed in product(STEPS.items(), SIZES, SEEDS):
        deadline.check()
        tasks, began = step(size, seed), time.process_time()
        planned_step = schedule(tasks, tight=True)
        longest = max(longest, time.process_time() - began)
        least = optimum(tasks) if step is halves else planned_step.bound
        ratios[f"{name} of {size}"] = max(ratios.get(f"{name} of {size}", 0.0), planned_step.seconds / least)
    told = ", ".join(f"{name} {worst:.4f}" for name, worst in ratios.items())
    return Measured(max(ratios.values()), f"{told}; at most {longest:.1f} processor seconds")


def ratio_of_stages(deadline: Deadline) -> Measured:
    """The largest ratio of a found order of a pipeline's tasks to the bound, which knows one stage at a time."""
    ratios = dict[int, float]()
    for size, seed in product(SIZES, SEEDS):
        deadline.check()
        ratios[size] = max(ratios.get(size, 0.0), schedule(stages(size, seed), tight=True).ratio)
    return Measured(max(ratios.values()), ", ".join(f"{size} tasks {worst:.4f}" for size, worst in ratios.items()))


def seconds(deadline: Deadline) -> Measured:
    """Processor seconds of an order of the largest steps: those whose orders stay farthest from the bound."""
    times = list[float]()
    for seed in range(FEWEST_ROUNDS):
        deadline.check()
        began = time.process_time()
        schedule(gathered_layers(SIZES[-1], seed), tight=True)
        times.append(time.process_time() - began)
    return of_median(times, f"at most {max(times):.1f} s")


# -- programs of ranks -------------------------------------------------------------------------------------------------


def equal(deadline: Deadline) -> Measured:
    """The largest difference of programs with every possible message in tiles from one rank."""
    off, count = dict[str, float](), 0
    for name, case in SMALL_CASES.items():
        step, model, batch = case.real()
        book, values, draw = RuleBook(2), real_values(step, model, *batch), random.Random(0)
        whole = run_whole(step, values)
        inputs = [values[node] for node in step.module.graph.nodes if node.op == "placeholder"]
        for tiles, _ in product(TILES, range(PLANS)):
            deadline.check()
            program, rules = rank_program(step, random_plan(step, book, draw), 2), RuleBook(tiles)
            first = [next(regions_of(begun, rules, 2), None) for begun in program.messages]
            regions = [region for region in first if region is not None]
            count += len(regions)
            computed = run_lockstep(tiled(program, regions), inputs)
            off[name] = max(off.get(name, 0.0), difference(computed, whole))
    told = "; ".join(f"{name} {value:.1g}" for name, value in off.items())
    return Measured(max(off.values()), f"{count} messages in tiles; {told}")


def operators(name: str, deadline: Deadline) -> Measured:
    """The part of the exposed communication of searched plans that order and tiles save, as the median over hosts."""
    parts, told = list[float](), list[str]()
    for host, cluster in HOSTS.items():
        deadline.check()
        costs = GraphCosts.of(cluster)
        one = overlap(rank_program(traced(name), planned(name, host, True).rules, costs.ranks), costs)
        saved_seconds = one.traced - one.schedule.seconds  # tiles make computation longer
        parts.append(saved_seconds / one.exposed_traced if one.exposed_traced > 1e-9 * one.traced else 0.0)
        told.append(
            f"{host}: {one.exposed_traced:.3g} s to {one.exposed:.3g} s, {one.traced:.3g} s to "
            f"{one.schedule.seconds:.3g} s in all, "
            f"{one.tiled} messages in tiles, {one.fused} fused, {one.schedule.ratio:.3f} of the bound"
        )
    return Measured(median(parts), "exposed: " + "; ".join(told))


def rows() -> list[Bar]:
    """What the order of messages is worth."""
    most = "part of the exposed communication of a planned step that another order could hide, at most over clusters"
    part = "part of the exposed communication of a planned step that the found order hides, median over clusters"
    inside = "part of the exposed communication of a searched plan that order and tiles save, median over three hosts"
    drawn = f"found order over the lower bound, at most over generated steps of up to {SIZES[-1]} tasks"
    models = "GPT, Llama, ViT and ResNet-50"
    tiles = f"largest relative difference of programs of {models} (small) with messages in tiles from one rank, fp64"
    return [
        *(
            Bar(f"graph.order-{name.lower()}", f"{name}: {most}", "<=", 0.15, partial(saved, name), kind="exact")
            for name in NAMES
        ),
        *(
            Bar(
                f"graph.schedule-exposed-{name.lower()}",
                f"{name}: {part}",
                ">=",
                0.15,
                partial(hidden, name),
                "order of the planned schedule",
                kind="exact",
            )
            for name in NAMES
        ),
        *(
            Bar(
                f"graph.schedule-operators-{name}",
                f"{name}: {inside}",
                ">=",
                0.15,
                partial(operators, name),
                kind="exact",
            )
            for name in ("gpt8", "vit-s", "resnet50")
        ),
        Bar("graph.schedule-bound", f"one rank: {drawn}", "<=", 1.01, ratio, kind="exact"),
        Bar("graph.schedule-bound-stages", f"four stages: {drawn}", "<=", 1.01, ratio_of_stages, kind="exact"),
        Bar(
            "graph.schedule-seconds",
            f"processor seconds of finding the order of a generated step of {SIZES[-1]} tasks",
            "<=",
            10,
            seconds,
        ),
        Bar("graph.tiles-equal", tiles, "<=", 1e-10, equal, kind="exact"),
    ]
