"""What ranks compute by their programs is what one rank computes: as built, in tiles, fused, and in other orders."""

from __future__ import annotations

import math
import operator

import pytest
import torch
from torch import fx, nn

from shoestring._torch import without_data
from shoestring.graph.costs import GraphCosts, flop_of, ring
from shoestring.graph.instructions import begin_move, end_move
from shoestring.graph.lockstep import difference, run_whole
from shoestring.graph.overlap import exposed_messages, overlap
from shoestring.graph.placements import WHOLE
from shoestring.graph.program import (
    in_program_order,
    message_kind,
    program_tasks,
    rank_program,
)
from shoestring.graph.rules import RuleBook
from shoestring.graph.running import run_lockstep
from shoestring.graph.search import search
from shoestring.graph.trace import trace
from shoestring.planning.simulate import Task, simulate
from shoestring.testing.pool import Pool
from tests.graph import rank_programs
from tests.graph.rank_programs import changed, costs, in_tiles, program_of, traced
from tests.graph.steps import WithLoss

CLOSE = 1e-10


@pytest.fixture(scope="module", params=rank_programs.STEPS)
def case(request):
    """A step, its inputs in order, and its outputs on one rank."""
    step, values, inputs = traced(request.param)
    return step, inputs, run_whole(step, values)


@pytest.mark.parametrize("plan", ["found", 1])
@pytest.mark.parametrize("how", ["built", "tiles", "order"])
@pytest.mark.parametrize("mesh", [(2,), pytest.param((2, 2), marks=pytest.mark.slow)])
def test_programs_compute_what_one_rank_computes(case, mesh, how, plan):
    step, inputs, whole = case
    program = changed(program_of(step, mesh, plan), how)
    program.graph.lint()
    assert difference(run_lockstep(program, inputs), whole) < CLOSE


@pytest.mark.parametrize("seed", range(3))
def test_programs_of_drawn_plans_on_a_mesh_compute_what_one_rank_computes(case, seed):
    step, inputs, whole = case
    program = program_of(step, (2, 2), seed)
    assert {node.args[-1] for node in program.messages} == {0, 1}
    assert difference(run_lockstep(program, inputs), whole) < CLOSE


@pytest.mark.slow
def test_tiles_reach_into_the_products_beside_a_message():
    """Of split layers, which feed their sums over ranks: the products of rows are computed and sent in tiles."""
    step, values, inputs = traced("gpt")
    program = program_of(step, (2,), 1)
    parted, regions = in_tiles(program, 4, products=1)
    assert len(regions) > len(program.messages) / 2
    assert any(flop_of(node) for region in regions for node in region.rules)
    assert len(parted.messages) == len(program.messages) + 3 * len(regions)
    assert difference(run_lockstep(parted, inputs), run_whole(step, values)) < CLOSE


@pytest.mark.slow
def test_a_wrong_rule_of_tiles_shows():
    """Tiles of a region that joins them in the wrong order."""
    step, values, inputs = traced("gpt")
    parted, _ = in_tiles(program_of(step, (2,), 1), 2)
    joins = [node for node in parted.graph.nodes if "cat" in str(node.target) and len(node.args[0]) == 2]
    assert joins
    for node in joins:
        node.args = (list(reversed(node.args[0])), *node.args[1:])
    assert difference(run_lockstep(parted, inputs), run_whole(step, values)) > 1e-3


def test_messages_of_one_kind_can_be_one_message(case):
    step, inputs, whole = case
    program = program_of(step, (2,), 1)
    tasks = program_tasks(program, costs(2))
    groups, place = list[list[fx.Node]](), {node: index for index, node in enumerate(tasks.nodes)}
    for task, node in zip(tasks.tasks, tasks.nodes, strict=True):  # neighbours that do not wait for each other
        alike = groups and task.kind == "wire" and groups[-1][0].target is begin_move
        alike = alike and message_kind(groups[-1][0]) == message_kind(node)
        if alike and not {place[earlier] for earlier in groups[-1]} & {*task.after}:
            groups[-1].append(node)
        else:
            groups.append([node])
    assert max(map(len, groups)) > 1
    fused = in_program_order(program, groups)
    fused.graph.lint()
    assert difference(run_lockstep(fused, inputs), whole) < CLOSE
    assert len(fused.messages) == len(program.messages) - sum(len(group) - 1 for group in groups)


@pytest.mark.slow
def test_tasks_are_operators_and_messages_that_wait_for_what_they_read():
    step, _, _ = traced("gpt")
    program = program_of(step, (2,), 0)
    made = program_tasks(program, costs(2))
    assert [task.name for task in made.tasks] == [node.name for node in made.nodes]
    assert [task.kind == "wire" for task in made.tasks] == [node.target is begin_move for node in made.nodes]
    assert all(task.seconds > 0 for task in made.tasks)
    assert not {operator.getitem, end_move} & {node.target for node in made.nodes}
    place = {node: index for index, node in enumerate(made.nodes)}
    for task, node in zip(made.tasks, made.nodes, strict=True):
        waits = {place[source] for source in node.all_input_nodes if source in place}
        assert waits <= {*task.after}


@pytest.mark.slow
def test_an_order_is_faster_and_waits_less_where_links_are_neither_fast_nor_slow():
    step, _, _ = traced("gpt")
    program = program_of(step, (2,), 1)
    ordered = overlap(program, costs(2), rounds=5)
    assert ordered.schedule.seconds < ordered.traced < ordered.serial
    assert ordered.schedule.bound <= ordered.schedule.seconds
    assert 0 <= ordered.exposed < ordered.exposed_traced


def test_sums_of_split_layers_are_tiled_where_nothing_else_is_left_to_compute():
    with without_data():
        model = WithLoss(nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)))
        step = trace(model, torch.randn(8192, 1024), torch.randint(1024, (8192,)))
    host = GraphCosts.of(ring(2, latency=1e-6, bandwidth=2e10, flops=2e13, copy=1e12))
    split = {"inner.0.weight": 0, "inner.2.weight": 1}
    plan = search(step, RuleBook(2), host, pinned=lambda name: split.get(name, WHOLE))
    one = overlap(rank_program(step, plan.rules, 2), host)
    assert one.tiled == 1
    assert one.schedule.seconds < one.traced < one.serial
    assert one.exposed < 0.6 * one.exposed_traced
    slow = GraphCosts.of(ring(2, latency=1e-2, bandwidth=2e10, flops=2e13, copy=1e12))  # of which each tile has one
    assert overlap(rank_program(step, plan.rules, 2), slow).tiled == 0


def test_a_message_is_exposed_where_nothing_is_computed_meanwhile():
    tasks = [
        Task("work", "compute", 2.0, "processor"),
        Task("hidden", "wire", 1.0, "link"),
        Task("half", "wire", 2.0, "link"),
        Task("late", "wire", 1.0, "link"),
        Task("rest", "compute", 1.0, "processor", (2,)),
    ]
    assert exposed_messages(simulate(tasks)) == pytest.approx({"hidden": 0.0, "half": 1.0, "late": 0.0})


@pytest.fixture(scope="module")
def pools():
    with Pool(2, timeout=120) as two, Pool(4, timeout=120) as four:
        yield {2: two, 4: four}


@pytest.mark.slow
@pytest.mark.share(3)
@pytest.mark.parametrize("mesh", [(2,), pytest.param((4,), marks=pytest.mark.all_cases), (2, 2)])
@pytest.mark.parametrize("model", rank_programs.STEPS)
@pytest.mark.parametrize(("how", "plan"), [("built", 0), ("tiles", 1), ("order", 1), ("order", "found")])
def test_ranks_of_a_process_group_compute_what_one_rank_computes(pools, mesh, model, how, plan):
    results = pools[math.prod(mesh)].call(rank_programs.off_by, model=model, plan=plan, how=how, mesh=mesh)
    assert max(result["off"] for result in results) < CLOSE
    assert all(result["messages"] == results[0]["messages"] for result in results)
