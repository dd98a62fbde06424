"""Steps on meshes: costs along an axis, plans along two of them, and what they are never worse than."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from shoestring.core.errors import ConfigError
from shoestring.graph.costs import GraphCosts, ring
from shoestring.graph.explain import explain
from shoestring.graph.lockstep import difference, real_values, run_whole
from shoestring.graph.meshes import search_mesh
from shoestring.graph.placements import SUM, WHOLE, divide_over, join_over
from shoestring.graph.program import DividedStep
from shoestring.graph.rules import RuleBook
from shoestring.graph.running import run_lockstep
from shoestring.graph.search import SplitSearch, fixed_plans, search
from shoestring.graph.trace import trace
from shoestring.models.gpt import tiny
from tests.graph.steps import WithLoss, texts

LINKS = {"latency": 1e-6, "bandwidth": 5e10, "flops": 9e12, "copy": 3e11}
FOUR = GraphCosts.of(ring(4, **LINKS))


@pytest.fixture(scope="module")
def narrow():
    """A step whose sizes are multiples of two and not of four."""
    torch.manual_seed(0)
    model = WithLoss(nn.Sequential(nn.Linear(514, 2050), nn.ReLU(), nn.Linear(2050, 514))).double()
    batch = torch.randn(6, 514, dtype=torch.float64), torch.randint(514, (6,))
    return trace(model, *batch), model, batch


@pytest.mark.parametrize("placements", [*itertools.product([WHOLE, SUM, 0, 1], repeat=2)])
def test_parts_of_a_mesh_make_the_whole(placements):
    tensor = torch.randn(6, 12, dtype=torch.float64)
    parts = divide_over(tensor, placements, (2, 3))
    assert len(parts) == 6
    assert torch.equal(join_over(parts, placements, (2, 3)), tensor)


@pytest.mark.parametrize("fewer", [2, 3])
def test_costs_along_an_axis_are_those_of_a_ring_of_its_ranks(fewer):
    measured = GraphCosts.of(ring(6, **LINKS))
    axes = measured.over((fewer, 6 // fewer))
    for axis, ranks in zip(axes, (fewer, 6 // fewer), strict=True):
        own = GraphCosts.of(ring(ranks, **LINKS))
        for source, target, nbytes in itertools.product((SUM, 0), (WHOLE, 1), (1e3, 1e6, 1e9)):
            assert axis.move(source, target, nbytes) == pytest.approx(own.move(source, target, nbytes), rel=1e-9)
    assert axes[1].along(0) is axes[0] and axes[1].along(1) is axes[1]


def test_measured_sizes_shrink_with_the_ranks():
    points = ((1e3, 5e-6), (1e6, 3e-4))
    exact = {kind: replace(one, points=points) for kind, one in FOUR.collectives.items()}
    axis = replace(FOUR, collectives=exact).over((2, 2))[0]
    assert 0 < axis.move(SUM, WHOLE, 1e6) < 3e-4
    assert replace(FOUR, collectives=exact).over((4,))[0].collectives == exact


@pytest.mark.parametrize("mesh", [(2, 3), (4, 1), (1, 4)])
def test_a_mesh_of_other_ranks_is_refused(mesh):
    with pytest.raises(ConfigError, match=f"a mesh of {mesh[0]} × {mesh[1]} ranks"):
        FOUR.over(mesh)


def test_a_mesh_divides_what_one_axis_of_all_ranks_cannot(narrow):
    step, model, batch = narrow
    slow = GraphCosts.of(ring(4, latency=1e-6, bandwidth=5e10, flops=9e9, copy=3e11))
    line, plan = search(step, RuleBook(4), slow), search_mesh(step, slow.over((2, 2)))
    assert plan.objective < 0.6 * line.objective
    values = real_values(step, model, *batch)
    inputs = [values[node] for node in step.graph.nodes if node.op == "placeholder"]
    assert difference(run_lockstep(plan.divided.program(), inputs), run_whole(step, values)) < 1e-10


def test_one_axis_is_searched_as_without_a_mesh(narrow):
    step, book = narrow[0], RuleBook(2)
    costs = GraphCosts.of(ring(2, **LINKS))
    assert search_mesh(step, costs.over((2,))).objective == search(step, book, costs).objective


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.scale = nn.Linear(8, 8), torch.arange(8.0)

    def forward(self, x):
        return self.inner(x) * self.scale


@pytest.mark.parametrize("mesh", [(4,), (2, 2)])
def test_constants_stay_whole_in_plans_that_are_explained(mesh):
    """Training by such a plan is refused."""
    host = ring(4, latency=1e-9, bandwidth=1e12, flops=1e6, copy=1e6)
    explained = explain(WithLoss(Scaled()), torch.randn(8, 8), torch.randint(8, (8,)), cluster=host, mesh=mesh)
    constants = [node for node in explained.step.graph.nodes if node.op == "get_attr"]
    assert constants and all(explained.plan.axes[0].rules[node].outputs == (WHOLE,) for node in constants)
    assert any("in the order found" in line for line in explained.lines())


@pytest.mark.slow
def test_no_two_usual_plans_are_better():
    """One along each axis."""
    torch.manual_seed(0)
    step = trace(WithLoss(tiny(vocab_size=64, context=16, dim=32, layers=2, hidden=64)), *texts(64, 16))
    first, second = FOUR.over((2, 2))
    plan, settings = search_mesh(step, (first, second)), SplitSearch(merge=False)
    for outer, inner in itertools.product(fixed_plans(step).values(), repeat=2):
        along = search(step, RuleBook(2), first, pinned=outer)
        divided = DividedStep.whole(step).divided(along.rules, 2)
        assert plan.objective <= search(divided.step, RuleBook(2), second, settings, inner).objective * (1 + 1e-6)


def test_memory_is_a_constraint_of_all_axes_together(narrow):
    step = narrow[0]
    slow = GraphCosts.of(ring(4, **LINKS | {"latency": 0.1})).over((2, 2))  # ranks would rather exchange nothing
    weights = sum(node.meta["val"].nbytes for node in step.nodes.parameters.values())
    room = 1.2 * 4 * weights / 4  # a quarter of the weights, their gradients and AdamW's averages
    assert search_mesh(step, slow).memory > 3 * room
    assert search_mesh(step, slow, SplitSearch(memory=room)).memory <= room * (1 + 1e-6)
    with pytest.raises(ConfigError, match="no plan fits"):
        search_mesh(step, slow, SplitSearch(memory=0.1 * room))


def test_frozen_weights_stay_whole_along_every_axis(narrow):
    step = narrow[0]
    plan = search_mesh(step, FOUR.over((2, 2)), pinned=lambda name: WHOLE if name == "inner.0.weight" else None)
    assert plan.divided.placements(step)[step.nodes.parameters["inner.0.weight"]] == (WHOLE, WHOLE)
    assert math.prod(plan.divided.mesh) == 4
