"""Rules of operators: what ranks compute by them, joined, is what one rank computes."""

import random

import pytest
import torch
from torch import nn

from shoestring.graph.lockstep import (
    check_rules,
    difference,
    divide,
    join,
    random_plan,
    real_values,
    run_divided,
    run_whole,
)
from shoestring.graph.own_rules import OWN
from shoestring.graph.placements import SUM, WHOLE, ShardingRule
from shoestring.graph.rules import RuleBook
from shoestring.graph.trace import trace
from shoestring.models.gpt import tiny
from tests.graph.steps import Convolutional, WithLoss, texts

aten = torch.ops.aten


def gpt():
    model = WithLoss(tiny(vocab_size=32, context=8, dim=16, layers=2, heads=2, kv_heads=2, hidden=32)).double()
    return model, texts(32, 8)


def pictures():
    model = WithLoss(Convolutional()).double().train()
    return model, (torch.randn(4, 3, 8, 8, dtype=torch.float64), torch.randint(4, (4,)))


STEPS = {"gpt": gpt, "pictures": pictures}


@pytest.fixture(params=STEPS)
def case(request):
    torch.manual_seed(0)
    model, batch = STEPS[request.param]()
    step = trace(model, *batch)
    return step, real_values(step, model, *batch)


@pytest.mark.slow
def test_every_rule_computes_what_one_rank_computes(case):
    step, values = case
    checks = check_rules(step, RuleBook(2), values)
    wrong = [str(check) for check in checks if not check.error <= 1e-5]
    assert not wrong
    assert sum(check.rule.divides for check in checks) > 60


@pytest.mark.slow
def test_drawn_plans_compute_what_one_rank_computes(case):
    step, values = case
    whole, book, draw = run_whole(step, values), RuleBook(2), random.Random(0)
    for _ in range(3):
        plan = random_plan(step, book, draw)
        assert sum(rule.divides for rule in plan.values()) > len(plan) / 4
        assert difference(run_divided(step, plan, values, 2), whole) < 1e-10


def wrong_relu(x):
    yield ShardingRule((SUM,), (SUM,))  # not linear


def wrong_mean(x, dims, *args, **kwargs):
    yield ShardingRule((1,), (2,))  # the mean over a shard is not a shard of the means


@pytest.mark.parametrize("wrong", [{aten.relu.default: wrong_relu}, {aten.mean.dim: wrong_mean}])
def test_a_users_wrong_rule_is_found(wrong):
    torch.manual_seed(0)
    model, batch = pictures()
    step = trace(model, *batch)
    checks = check_rules(step, RuleBook(2, {**OWN, **wrong}), real_values(step, model, *batch))
    targets = {check.node.target for check in checks if not check.error <= 1e-5}
    assert targets == wrong.keys()


def test_batch_norm_over_a_sharded_batch_exchanges_its_statistics():
    model, batch = pictures()
    step, book = trace(model, *batch), RuleBook(4)
    norms = [node for node in step.operators if "batch_norm" in str(node.target)]
    assert len(norms) == 4
    for node in norms:
        (rule,) = [rule for rule in book[node].rules if rule.exchange]
        assert rule.inputs[0] == 0
        assert rule.outputs[0] == 0
        assert set(rule.outputs[1:]) == {WHOLE}
        assert rule.exchange.nbytes == 2 * 8 * 8


@pytest.mark.slow
def test_an_operator_without_a_rule_has_a_reason():
    step = trace(*(lambda model, batch: (model, *batch))(*gpt()))
    book = RuleBook(2)
    sets = [book[node] for node in step.operators]
    assert all(bool(rules.reason) == (len(rules.rules) == 1) for rules in sets)
    assert len(book) < len(step.operators)


def test_tensors_are_joined_again():
    tensor, noise = torch.randn(4, 6, dtype=torch.float64), torch.Generator().manual_seed(0)
    for placement in (WHOLE, SUM, 0, 1):
        assert difference([join(divide(tensor, placement, 2, noise), placement)], [tensor]) < 1e-15
    assert all(float(shard.abs().max()) > 0 for shard in divide(tensor, SUM, 2, noise))


def test_random_numbers_are_not_checked():
    model = WithLoss(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))).double()
    batch = torch.randn(4, 4, dtype=torch.float64), torch.randint(4, (4,))
    step = trace(model, *batch)
    checks = check_rules(step, RuleBook(2), real_values(step, model, *batch))
    assert checks
    assert not [check for check in checks if check.node.target is aten.native_dropout.default]
