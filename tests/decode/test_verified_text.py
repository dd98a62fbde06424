"""Token and block verification through the settings that a user writes: what is sampled has the model's distribution
under each filter, under the penalty, and under all together, whatever drafts. Planted faults must show."""

import math
from itertools import product

import pytest
import torch
from torch import nn

from shoestring.decode import speculation as module
from shoestring.decode import verification
from shoestring.decode.adapter import Whole
from shoestring.decode.drafters.lookup import PromptLookup
from shoestring.decode.drafters.model import ModelDrafter
from shoestring.decode.engine import Engine, Request
from shoestring.decode.sampling import probabilities
from shoestring.decode.settings.generation import Sampling, Speculation

V, CONTEXT, PROMPT = 6, 40, [0, 1, 2, 0, 1]
RULES, DRAFTERS = ("token", "block"), ("model", "lookup")
NEVER_AGAIN = 2.0**60
"""A penalty that leaves no token a second time, where all logits are negative."""
MODES = {
    "penalty": {"repetition_penalty": NEVER_AGAIN},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.5},
    "min_p": {"min_p": 0.6},
    "temperature": {"temperature": 0.05, "min_p": 1e-3},
    "all": {"temperature": 0.8, "top_k": 4, "top_p": 0.8, "min_p": 0.3, "repetition_penalty": 1.7},
}
MIXED = {"temperature": 0.5, "top_p": 0.97, "repetition_penalty": 1.3}
PENALTY = {"repetition_penalty": 3.0}
SEEDS = 250
"""Texts by which the faults below show."""


def bigram(logits):
    """A model whose logits, all negative, depend on the last token."""
    return nn.Embedding(V, V, _weight=logits)


DRAWN = torch.rand(V, V, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TARGET, DRAFT = bigram(-0.3 - 2.5 * DRAWN), bigram(-0.3 - 2.5 * (1 - DRAWN))  # what one finds likely the other does not


def texts(rule, kind, options, seeds, count):
    speculation = Speculation(draft_length=3, verification=rule)
    drafter = ModelDrafter(Whole(DRAFT, CONTEXT), 16, speculation) if kind == "model" else PromptLookup()
    engine = Engine(Whole(TARGET, CONTEXT), slots=16, room=20, drafter=drafter, speculation=speculation)
    asked = [Request(tokens=PROMPT, max_new=count, sampling=Sampling(seed=seed, **options)) for seed in range(seeds)]
    rows = [engine.submit(request) for request in asked]
    while engine.busy:
        engine.step()
    assert engine.counts.drafts.drafts > 0
    assert not any(row.error for row in rows)
    return [row.text for row in rows]


def next_token(text, options):
    """The distribution of the next token, in plain Python from the definitions of the settings."""
    rules = Sampling(**options)
    logits = TARGET.weight[text[-1]].tolist()
    penalty = rules.repetition_penalty
    logits = [logit * penalty if token in text else logit for token, logit in enumerate(logits)]
    weights = [math.exp((logit - max(logits)) / rules.temperature) for logit in logits]
    likeliest = sorted(range(V), key=lambda token: -weights[token])[: rules.top_k or V]
    total = sum(weights[token] for token in likeliest)
    kept, before = {}, 0.0
    for token in likeliest:
        if before < rules.top_p and weights[token] >= rules.min_p and weights[token] > 0:
            kept[token] = weights[token]
        before += weights[token] / total
    return {token: weight / sum(kept.values()) for token, weight in kept.items()}


def strangers(rule, kind, options, seeds=16, count=4):
    """Tokens of sampled texts that have no probability at their positions; the prompt holds half of the vocabulary."""
    count = min(count, V - 3) if options.get("repetition_penalty") == NEVER_AGAIN else count
    found = 0
    for text in texts(rule, kind, options, seeds, count):
        for position, token in enumerate(text):
            found += token not in next_token([*PROMPT, *text[:position]], options)
    return found


def excess(rule, kind, options, seeds):
    """How far the first two tokens are from their distribution: the statistic of a G-test over its 99.99% quantile."""
    expected = {
        (first, second): chance * other
        for first, chance in next_token(PROMPT, options).items()
        for second, other in next_token([*PROMPT, first], options).items()
    }
    counts = dict.fromkeys(product(range(V), range(V)), 0)
    for text in texts(rule, kind, options, seeds, 4):
        counts[tuple(text[:2])] += 1
    if any(count and pair not in expected for pair, count in counts.items()):
        return math.inf
    found = sum(count * math.log(count / seeds / expected[pair]) for pair, count in counts.items() if count)
    freedom = len(expected) - 1
    quantile = freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3  # Wilson and Hilferty
    return 2 * found / quantile


SLOW = [
    pytest.param(kind, mode, marks=() if kind == "model" and mode in ("penalty", "all") else pytest.mark.slow)
    for kind, mode in product(DRAFTERS, MODES)
    if (kind, mode) != ("lookup", "penalty")  # where nothing comes again, nothing is found to draft
]


@pytest.mark.parametrize(("kind", "mode"), SLOW)
@pytest.mark.parametrize("rule", RULES)
def test_no_token_is_sampled_that_the_settings_rule_out(rule, kind, mode):
    assert strangers(rule, kind, MODES[mode]) == 0


@pytest.mark.parametrize(
    ("rule", "kind", "options"),
    [
        ("token", "lookup", PENALTY),
        ("block", "model", MIXED),
        pytest.param("token", "model", MIXED, marks=pytest.mark.slow),
        pytest.param("block", "lookup", PENALTY, marks=pytest.mark.slow),
    ],
)
def test_two_tokens_have_their_joint_distribution(rule, kind, options):
    assert excess(rule, kind, options, SEEDS) < 1


@pytest.mark.slow
@pytest.mark.share(4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("rule", RULES)
def test_two_tokens_have_their_joint_distribution_in_every_mode(rule, kind, mode):
    assert excess(rule, kind, PENALTY if mode == "penalty" else MODES[mode], 1000) < 1


def without(name):
    """Verification that takes no notice of one setting."""

    def faulty(logits, sampling):
        plain = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}[name]
        return probabilities(logits, Sampling(**{**sampling.__dict__, name: plain}))

    return faulty


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_verification_without_the_penalty_shows(rule, monkeypatch):
    monkeypatch.setattr(module, "penalize", lambda logits, text, penalty: logits)
    assert strangers(rule, "model", MODES["penalty"]) > 3
    assert excess(rule, "lookup", PENALTY, SEEDS) > 1


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_verification_whose_penalty_does_not_see_drafts_shows(rule, monkeypatch):
    penalize = module.penalize

    def blind(logits, text, penalty):
        before = text[: len(text) - len(logits) + 1]
        return torch.cat([penalize(row[None], before, penalty) for row in logits])

    monkeypatch.setattr(module, "penalize", blind)
    assert strangers(rule, "model", MODES["penalty"]) > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p"])
@pytest.mark.parametrize("rule", RULES)
def test_verification_without_a_filter_shows(rule, name, monkeypatch):
    monkeypatch.setattr(module, "probabilities", without(name))
    assert strangers(rule, "model", MODES[name]) > 3


FAULTS = {
    "the correction is drawn from the model's distribution": (
        "_following",
        lambda p, q, accepted, support: p[accepted],
    ),
    "the correction is drawn from the drafter's": (
        "_following",
        lambda p, q, accepted, support: p[accepted] if accepted == len(q) else q[accepted],
    ),
    "the residual is not cut at zero": ("_excess", lambda p, q: (p - q).abs()),
}


@pytest.mark.slow
@pytest.mark.share(3)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("rule", RULES)
def test_verification_with_a_wrong_correction_shows(rule, fault, monkeypatch):
    name, faulty = FAULTS[fault]
    monkeypatch.setattr(verification, name, faulty)
    assert excess(rule, "model", MIXED, 4 * SEEDS) > 1  # of the two tokens only the second is drafted
