"""Losses of preferences against their formulas in plain floating point, and log-probabilities against torch's."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from shoestring.core.task import IGNORED
from shoestring.preference.log_probabilities import sums_by_answer, target_log_probabilities
from shoestring.preference.losses import AnswerScores, dpo, kto, orpo, simpo

LOGS = st.floats(-300, -1e-6)
PAIR = st.tuples(LOGS, LOGS, LOGS, LOGS, st.integers(1, 50), st.integers(1, 50))


def sides(pair):
    chosen, rejected, base_chosen, base_rejected, long, short = pair
    make = lambda *values: AnswerScores(*(torch.tensor([float(value)], dtype=torch.float64) for value in values))  # noqa: E731
    return make(chosen, long, base_chosen), make(rejected, short, base_rejected)


def log_sigmoid(x):
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


@given(PAIR, st.floats(0.01, 5), st.floats(0, 0.49))
@settings(max_examples=60)
def test_each_loss_is_its_formula(pair, beta, smoothing):
    w, loser, rw, rl, m, n = pair
    chosen, rejected = sides(pair)
    h, mean = (w - rw) - (loser - rl), (w - rw) / m - (loser - rl) / n
    smooth = lambda x: -(1 - smoothing) * log_sigmoid(x) - smoothing * log_sigmoid(-x)  # noqa: E731
    expected = {
        "sigmoid": smooth(beta * h),
        "normalized": smooth(beta * mean),
        "ipo": (mean - 1 / (2 * beta)) ** 2,
        "hinge": max(0.0, 1 - beta * h),
    }
    for variant, value in expected.items():
        found = dpo(chosen, rejected, beta=beta, variant=variant, smoothing=smoothing)
        assert float(found) == pytest.approx(value, rel=1e-9, abs=1e-12), variant
    gap = beta * (w / m - loser / n) - 0.7
    assert float(simpo(chosen, rejected, beta=beta, margin=0.7, smoothing=smoothing)) == pytest.approx(smooth(gap))
    odds = (w / m - loser / n) - (math.log(-math.expm1(w / m)) - math.log(-math.expm1(loser / n)))
    assert float(orpo(chosen, rejected, weight=beta)) == pytest.approx(-w / m - beta * log_sigmoid(odds), rel=1e-9)
    z = abs(h)
    good, bad = kto(chosen, rejected, torch.tensor(z, dtype=torch.float64), beta=beta)
    assert float(good) == pytest.approx(1 - math.exp(log_sigmoid(beta * (w - rw - z))), abs=1e-9)
    assert float(bad) == pytest.approx(1 - math.exp(log_sigmoid(beta * (z - (loser - rl)))), abs=1e-9)


@given(PAIR)
def test_gradients_are_finite_and_push_the_chosen_answer_up(pair):
    chosen, rejected = sides(pair)
    for loss in (
        lambda a, b: dpo(a, b, beta=0.1, variant="sigmoid", smoothing=0.0),
        lambda a, b: simpo(a, b, beta=2.0, margin=1.0, smoothing=0.0),
        lambda a, b: orpo(a, b, weight=0.1),
    ):
        up, down = (side.policy.clone().requires_grad_() for side in (chosen, rejected))
        loss(chosen._replace(policy=up), rejected._replace(policy=down)).sum().backward()
        assert torch.isfinite(up.grad).all() and torch.isfinite(down.grad).all()
        assert float(up.grad) <= 0 <= float(down.grad)


@pytest.mark.parametrize("tokens", [1, 3, 100])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("counted", [0, 1, 9])
def test_log_probabilities_and_their_gradients_are_those_of_torch(tokens, bias, counted):
    generator = torch.Generator().manual_seed(counted)
    hidden, weight, offset = (
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((3, 4, 5), (7, 5), (7,))
    )
    inputs = [tensor.requires_grad_() for tensor in ((hidden, weight, offset) if bias else (hidden, weight))]
    targets = torch.randint(7, (3, 4), generator=generator)
    targets.view(-1)[torch.randperm(12, generator=generator)[counted:]] = IGNORED
    values = target_log_probabilities(hidden, weight, offset if bias else None, targets, tokens)
    logits = F.linear(hidden, weight, offset if bias else None)
    expected = torch.where(targets >= 0, logits.log_softmax(-1).gather(-1, targets.clamp_min(0)[..., None])[..., 0], 0)
    torch.testing.assert_close(values, expected)
    factors = torch.randn(3, 4, generator=generator, dtype=torch.float64)  # each token has a gradient of its own
    ours, theirs = (torch.autograd.grad((each * factors).sum(), inputs) for each in (values, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(0, 3)), max_size=3), min_size=1, max_size=3
    )
)
@settings(max_examples=60)
def test_sums_by_answer_are_those_of_a_loop(rows):
    """Rows of records, each with an answer of each kind of this many tokens, and padding behind."""
    length = max(2, *(sum(map(sum, records)) + 1 for records in rows))
    generator = torch.Generator().manual_seed(length)
    values = torch.randn(len(rows), length, generator=generator, dtype=torch.float64)
    answers, targets = torch.full((len(rows), length), -1), torch.full((len(rows), length), IGNORED)
    expected = {}
    for b, records in enumerate(rows):
        at = 0
        for n, counts in enumerate(records):
            for kind, count in enumerate(counts):
                answers[b, at : at + count], targets[b, at : at + count] = 3 * n + kind, 1
                if count > 1:  # a prompt's token
                    targets[b, at] = IGNORED
                start = at + (count > 1)
                expected[b, n, kind] = (float(values[b, start : at + count].sum()), count - (count > 1))
                at += count
    sums = sums_by_answer(values, targets, answers, 3)
    for (b, n, kind), (total, count) in expected.items():
        assert float(sums.log_probability[b, n, kind]) == pytest.approx(total)
        assert float(sums.tokens[b, n, kind]) == count
    assert float(sums.tokens.sum()) == sum(count for _, count in expected.values())
