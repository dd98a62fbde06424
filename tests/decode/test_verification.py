"""Verification keeps the model's distribution: by enumeration, with faults that must show, and at the borders."""

import pytest
import torch

from benchmarks.decode.enumeration import BLOCK, CERTAIN, MUTANTS, TOKEN, Worlds, enumerate_rule, total_variation
from shoestring.decode.verification import common_prefix, one_hot, verify_block, verify_tokens

RULES = (TOKEN, BLOCK, *CERTAIN)
SMALL = [Worlds(seed, V=3, length=2) for seed in range(3)]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("options", [{}, {"equal": True}, {"zeros": True}], ids=["any", "equal", "zeros"])
def test_the_text_has_the_distribution_of_the_model(rule, options):
    worlds = [Worlds(seed, V=3, length=2, **options) for seed in range(3)] + [Worlds(9, V=3, length=3, **options)]
    assert max(total_variation(rule, world) for world in worlds) <= 1e-12


@pytest.mark.parametrize("rule", MUTANTS, ids=lambda rule: rule.name)
def test_a_planted_fault_shows(rule):
    assert max(total_variation(rule, world) for world in SMALL) > 1e-3


def test_block_verification_accepts_no_fewer_tokens_on_average():
    means = [(enumerate_rule(BLOCK, world)[1], enumerate_rule(TOKEN, world)[1]) for world in SMALL]
    assert all(block >= token - 1e-12 for block, token in means)
    assert any(block > token + 1e-3 for block, token in means)


def test_a_drafter_that_equals_the_model_is_always_accepted():
    for rule in (TOKEN, BLOCK):
        assert enumerate_rule(rule, Worlds(0, V=3, length=3, equal=True))[1] == pytest.approx(3)


@pytest.mark.parametrize("verify", [verify_tokens, verify_block])
def test_an_impossible_token_is_refused_by_any_coin(verify):
    """`<=` in place of `<` accepts it when the coin is 0, and no enumeration shows what has no probability."""
    p = torch.tensor([[0.0, 1.0], [0.5, 0.5]], dtype=torch.float64)
    accepted, following = verify(p, one_hot([0], p), [0], [0.0])
    assert accepted == 0
    assert following.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("verify", [verify_tokens, verify_block])
def test_rounding_that_rejects_where_nothing_is_left_falls_back_to_the_model(verify):
    p = torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    q = p[:1] * (1 + 1e-6)
    accepted, following = verify(p, q, [1], [1 - 1e-9])
    assert accepted == 0
    assert torch.equal(following, p[0])


def test_the_common_prefix_ends_at_the_first_difference():
    assert common_prefix([1, 2, 3], [1, 2, 4, 5]) == 2
    assert common_prefix([1, 2], [1, 2, 4]) == 2
    assert common_prefix([9], [1, 2]) == 0
    assert common_prefix([], [1]) == 0
