"""Searched plans: never worse than the usual ones, within the memory, and nearly as good when operators are merged."""

import math

import pytest
import torch
from torch import nn

from shoestring.core.errors import ConfigError
from shoestring.graph.costs import GraphCosts, ring, saved_tensors
from shoestring.graph.descent import Descent
from shoestring.graph.lockstep import difference, real_values, run_divided, run_whole
from shoestring.graph.placements import SUM, WHOLE
from shoestring.graph.rules import RuleBook
from shoestring.graph.search import MERGED_FROM, SplitSearch, _Program, fixed_plans, search
from shoestring.graph.trace import trace
from shoestring.models.gpt import tiny
from tests.graph.steps import Convolutional, WithLoss, texts

SLOW = GraphCosts.of(ring(2, latency=2e-4, bandwidth=1.25e8, flops=2e10, copy=4e9))
FAST = GraphCosts.of(ring(2, latency=1e-6, bandwidth=5e10, flops=9e12, copy=3e11))


@pytest.fixture(scope="module")
def gpt():
    torch.manual_seed(0)
    model = WithLoss(tiny(vocab_size=64, context=16, dim=32, layers=2, hidden=64)).double()
    batch = texts(64, 16)
    return trace(model, *batch), model, batch


def test_no_usual_plan_is_better(gpt):
    step, book = gpt[0], RuleBook(2)
    plan, merged = search(step, book, FAST), search(step, book, FAST, SplitSearch(merge=True))
    for pinned in list(fixed_plans(step).values())[1:]:
        usual = search(step, book, FAST, SplitSearch(merge=False), pinned)
        assert plan.objective <= usual.objective * (1 + 1e-6)
        assert merged.objective <= usual.objective * 1.005


@pytest.mark.parametrize(("merge", "smallest", "merges"), [
    (None, 1, True), (None, MERGED_FROM, False), (True, MERGED_FROM, True), (False, 1, False),
])  # fmt: skip
def test_large_steps_are_merged_and_others_if_asked(gpt, merge, smallest, merges, monkeypatch):
    assert len(gpt[0].operators) < MERGED_FROM
    monkeypatch.setattr("shoestring.graph.search.MERGED_FROM", smallest)
    plan = search(gpt[0], RuleBook(2), FAST, SplitSearch(merge=merge))
    assert (plan.reduction > 4) == merges


@pytest.mark.slow
def test_merging_reduces_and_loses_little(gpt):
    whole = search(gpt[0], RuleBook(2), SLOW, SplitSearch(merge=False))
    merged = search(gpt[0], RuleBook(2), SLOW, SplitSearch(merge=True))
    assert whole.deciders == merged.deciders >= whole.groups > 0.9 * whole.deciders
    assert merged.reduction > 4
    assert merged.variables < whole.variables / 1.5
    assert whole.objective * (1 - 1e-6) <= merged.objective <= whole.objective * 1.005


def test_a_found_plan_computes_what_one_rank_computes(gpt):
    step, model, batch = gpt
    values = real_values(step, model, *batch)
    plan = search(step, RuleBook(2), FAST)
    assert difference(run_divided(step, plan.rules, values, 2), run_whole(step, values)) < 1e-10


def test_large_weights_on_small_batches_are_split():
    model = WithLoss(nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)))
    step = trace(model, torch.randn(2, 512), torch.randint(512, (2,)))
    plan = search(step, RuleBook(2), SLOW)
    placements = {name: plan.rules[node].outputs[0] for name, node in step.nodes.parameters.items()}
    assert placements["inner.0.weight"] >= 0
    assert placements["inner.2.weight"] >= 0


def test_batch_norms_are_split_by_samples_where_links_are_fast():
    model = WithLoss(Convolutional(channels=64))
    step = trace(model, torch.randn(32, 3, 64, 64), torch.randint(4, (32,)))
    plan = search(step, RuleBook(2), FAST)
    norms = [plan.rules[node] for node in step.operators if "batch_norm" in str(node.target)]
    assert all(rule.exchange is not None for rule in norms)


def test_memory_is_a_constraint():
    model = WithLoss(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)))
    step = trace(model, torch.randn(8, 64), torch.randint(64, (8,)))
    free = search(step, RuleBook(2), SLOW)
    tight = search(step, RuleBook(2), SLOW, SplitSearch(memory=free.memory * 0.7))
    assert tight.memory <= free.memory * 0.7 * (1 + 1e-6)
    assert tight.objective >= free.objective
    with pytest.raises(ConfigError, match="no plan fits") as caught:
        search(step, RuleBook(2), SLOW, SplitSearch(memory=free.memory / 10))
    assert "the smallest takes" in str(caught.value)


def test_moves_cost_what_their_collectives_take():
    costs = GraphCosts.of(ring(4, latency=1.0, bandwidth=1.0, flops=1.0, copy=1.0))
    assert costs.move(WHOLE, 0, 8.0) == costs.move(1, 1, 8.0) == 0
    assert costs.move(0, WHOLE, 8.0) == 3 + 6  # three hops, three quarters of 8 bytes
    assert costs.move(SUM, WHOLE, 8.0) == 2 * (3 + 6)
    assert costs.move(SUM, 0, 8.0) == 3 + 6
    assert costs.move(0, 1, 8.0) == 3 + 1.5
    assert math.isinf(costs.move(0, SUM, 8.0))


def test_a_cluster_of_several_hosts_is_refused():
    from dataclasses import replace

    cluster = ring(2, latency=1.0, bandwidth=1.0, flops=1.0, copy=1.0)
    apart = replace(cluster, devices=(cluster.devices[0], replace(cluster.devices[1], host="other")))
    with pytest.raises(ConfigError, match="2 hosts"):
        GraphCosts.of(apart)
    with pytest.raises(ConfigError, match="no measured"):
        GraphCosts.of(replace(cluster, collectives=()))


def test_saved_tensors_are_those_that_the_backward_pass_reads():
    model = WithLoss(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)))
    step = trace(model, torch.randn(2, 4), torch.randint(4, (2,)))
    saved = {str(node.target) for node in saved_tensors(step)}
    assert {"aten.addmm.default", "aten.gelu.default", "aten._log_softmax.default"} <= saved
    assert not any("view" in name or "aten.t." in name for name in saved)


@pytest.mark.slow
@pytest.mark.parametrize("share", [math.inf, 0.2])
def test_a_descent_gets_back_what_merging_has_lost(gpt, share):
    """From a bad plan, and within a memory of this share between the best plan's and the bad one's."""
    step, book, whole = gpt[0], RuleBook(2), SplitSearch(merge=False)
    best = search(step, book, SLOW, whole)
    start = search(step, book, SLOW, whole, fixed_plans(step)["sharded weights (FSDP)"])
    room = share if math.isinf(share) else start.memory + share * (best.memory - start.memory)
    program = _Program(step, book, SLOW, lambda name: None, merge=False)
    choices = {node: program.choices(node, book, merge=False) for node in program.deciders}

    def descended(plan):
        own = {"objective": plan.objective, "memory": plan.memory}
        descent = Descent(step, SLOW, plan.rules, choices, program.classes, **own)
        descent.run(room)
        return descent

    descent = descended(start)
    assert best.objective * (1 - 1e-9) <= descent.objective < start.objective
    assert descent.memory <= room
    indices = {program.classes[node]: choices[node].index(rule) for node, rule in descent.rules.items()}
    assert descent.memory == pytest.approx(program.memory_of(indices))
    placements = {name: descent.rules[node].outputs[0] for name, node in step.nodes.parameters.items()}
    exact = search(step, book, SLOW, whole, placements.get)
    assert exact.objective <= descent.objective * (1 + 1e-9)
    if math.isinf(room):
        assert descended(best).objective == pytest.approx(best.objective, rel=1e-9)
