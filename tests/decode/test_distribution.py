"""From logits to probabilities: filters against their definitions, and the penalty that sees drafts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoestring.decode import sampling as module
from shoestring.decode.sampling import penalize, probabilities
from shoestring.decode.settings.generation import Sampling

LOGITS = [2.0, 1.0, 0.5, 0.0, -1.0, -3.0]


def defined(logits, sampling):
    """The definitions, in plain Python; logits are distinct."""
    chances = (torch.tensor(logits, dtype=torch.float64) / sampling.temperature).softmax(-1).tolist()
    order = sorted(range(len(chances)), key=lambda token: -chances[token])
    order = order[: sampling.top_k or None]
    total = sum(chances[token] for token in order)
    kept, before = [], 0.0
    for token in order:
        if before < sampling.top_p and chances[token] >= sampling.min_p * chances[order[0]]:
            kept.append(token)
        before += chances[token] / total
    total = sum(chances[token] for token in kept)
    return [chances[token] / total if token in kept else 0.0 for token in range(len(chances))]


@given(
    st.permutations(LOGITS),
    st.builds(
        Sampling,
        temperature=st.sampled_from([0.5, 1.0, 2.0]),
        top_k=st.integers(0, 7),
        top_p=st.sampled_from([0.3, 0.77, 0.95, 1.0]),
        min_p=st.sampled_from([0.0, 0.2, 1.0]),
    ),
)
def test_every_combination_of_filters_follows_its_definition(logits, sampling):
    got = probabilities(torch.tensor(logits, dtype=torch.float64), sampling)
    if sampling.greedy:
        assert got.tolist() == [float(value == 2.0) for value in logits]
    else:
        assert got.tolist() == pytest.approx(defined(logits, sampling))


def test_top_p_is_the_same_where_the_first_tokens_do_not_reach(monkeypatch):
    logits = torch.randn(3, 400, generator=torch.Generator().manual_seed(0))
    sampling = Sampling(top_p=0.95)
    whole = probabilities(logits, sampling)
    monkeypatch.setattr(module, "NUCLEUS", 8)
    assert torch.equal(probabilities(logits, sampling), whole)
    assert 8 < int((whole > 0).sum(-1).min()) < 400


def test_tokens_as_likely_as_the_last_one_stay_with_it():
    assert probabilities(torch.zeros(5), Sampling(top_k=2)).tolist() == pytest.approx([0.2] * 5)


@pytest.mark.parametrize(("given_as", "kept_as"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_the_precision_is_float32_or_that_of_float64_logits(given_as, kept_as):
    logits = torch.tensor(LOGITS, dtype=given_as)
    for sampling in (Sampling(), Sampling(temperature=0), Sampling(top_p=0.9)):
        assert probabilities(logits, sampling).dtype == kept_as


def test_the_penalty_of_a_position_sees_what_is_before_it_and_nothing_else():
    logits = torch.tensor([1.0, -1.0, 2.0, 4.0]).expand(3, 4)
    got = penalize(logits, [0, 3, 1], 2.0)
    assert got.tolist() == [[0.5, -1.0, 2.0, 4.0], [0.5, -1.0, 2.0, 2.0], [0.5, -2.0, 2.0, 2.0]]
    for position in range(3):  # each as if nothing were drafted after it
        alone = penalize(logits[: position + 1], [0, 3, 1][: position + 1], 2.0)
        assert torch.equal(alone, got[: position + 1])
    assert penalize(logits, [0, 3, 1], 1.0) is logits


def test_the_penalty_is_that_of_the_whole_vocabulary_where_tokens_repeat():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    text = [7, 3, 7, 7, 9, 3, 11]  # the last two are drafted
    for position, row in enumerate(penalize(logits, text, 1.3)):
        seen = torch.zeros(50, dtype=torch.bool).index_fill_(0, torch.tensor(text[: 5 + position]), True)
        before = logits[position]
        assert torch.equal(row, torch.where(seen, torch.where(before > 0, before / 1.3, before * 1.3), before))


def test_sorted_chances_are_those_of_torch():
    chances = torch.rand(4, 300, generator=torch.Generator().manual_seed(0)).round(decimals=2)
    assert torch.equal(module._descending(chances), chances.sort(-1, descending=True).values)
