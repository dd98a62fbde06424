"""Filters of the sampling distribution match their definitions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.models.sampling import distribution


def brute_force(logits, temperature, top_k, top_p):
    weights = [2.718281828459045 ** (value / temperature) for value in logits]
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))[: top_k or None]
    total, seen, kept = sum(weights[i] for i in order), 0.0, []
    for i in order:
        kept.append(i)
        seen += weights[i] / total
        if seen >= top_p:
            break
    mass = sum(weights[i] for i in kept)
    return [weights[i] / mass if i in kept else 0.0 for i in range(len(weights))]


@settings(deadline=None)
@given(
    logits=st.permutations([0.0, 0.5, 1.1, 1.8, 2.6, 3.5, -4.0, -0.7]),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.integers(0, 10),
    top_p=st.sampled_from([0.05, 0.33, 0.61, 0.9, 1.0]),
)
def test_top_k_and_top_p_match_their_definition(logits, temperature, top_k, top_p):
    got = distribution(torch.tensor(logits), temperature, top_k, top_p)
    assert got.tolist() == pytest.approx(brute_force(logits, temperature, top_k, top_p), abs=1e-6)


def test_of_equally_likely_tokens_exactly_k_are_kept():
    assert distribution(torch.zeros(5), 1.0, top_k=2).tolist() == [0.5, 0.5, 0.0, 0.0, 0.0]
