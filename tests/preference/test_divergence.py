"""The KL divergence from the reference against torch's, and in evaluations of jobs against passes of each answer."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import shoestring as ss
from shoestring.core.job import attachments_of
from shoestring.memory import LoRA
from shoestring.optim import SGD
from shoestring.preference import DPO, KTO, SimPO
from shoestring.preference.divergence import Predictions, divergence
from tests.preference.test_objective import LENGTH, RECORDS, Off, batch, model


@given(st.integers(0, 9), st.integers(1, 12), st.sampled_from([1e-6, 1.0, 300.0]), st.booleans(), st.booleans())
@settings(max_examples=60)
def test_it_is_that_of_torch(places, tokens, scale, bias, ruled_out):
    generator = torch.Generator().manual_seed(places)
    draw = lambda *shape: scale * torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    hidden, other, weight, offset = draw(places, 4), draw(places, 4), draw(6, 4), draw(6) if bias else None
    logits, others = F.linear(hidden, weight, offset), F.linear(other, weight, offset)
    if ruled_out and places:  # by both, and by the policy alone
        logits[:, 0] = others[:, 0] = logits[:, 1] = -torch.inf
        ours, theirs = Predictions(logits), Predictions(others)
    else:
        ours, theirs = Predictions(hidden, weight, offset), Predictions(other, weight, offset)
    p, q = logits.log_softmax(-1), others.log_softmax(-1)
    terms = torch.where(p.isinf(), 0, p.exp() * (p - q))
    found = divergence(ours, theirs, tokens)
    torch.testing.assert_close(found, terms.sum(-1).clamp_min(0), check_dtype=places > 0)
    assert (found >= 0).all()
    assert not divergence(ours, ours, tokens).any()


def test_it_is_infinite_where_the_reference_rules_out_what_the_policy_says():
    policy, reference = torch.zeros(1, 3), torch.tensor([[0.0, 0.0, -torch.inf]])
    assert divergence(Predictions(policy), Predictions(reference), 1).isinf().all()
    assert divergence(Predictions(policy), Predictions(policy), 1) == 0


def by_hand(net, base, kinds):
    """The mean over the tokens of answers to their own prompts, from a pass for each."""
    values = []
    with torch.no_grad():
        for prompt, sides in (record for row in RECORDS for record in row):
            for kind in kinds:
                text = torch.tensor([[*prompt, *sides[kind]]])
                ours, theirs = (read(text)[0].log_softmax(-1) for read in (net, base))
                places = slice(len(prompt) - 1, len(prompt) - 1 + len(sides[kind]))
                values.append((ours.exp() * (ours - theirs)).sum(-1)[places])
    return float(torch.cat(values).mean())


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("feature", [DPO(cache_folder="", tokens=3), KTO(cache_folder="", tokens=3)])
def test_evaluations_measure_it(feature, adapters):
    net, kinds = model(), (0, 2) if isinstance(feature, KTO) else (0, 1)
    features = [LoRA(rank=2), feature] if adapters else [feature]
    with ss.compose(ss.Job(net), [*features, SGD(lr=0.5, momentum=0.0, nesterov=False)]) as job:
        for _ in range(2):
            job.step(batch(kinds=kinds))
            assert "kl_per_token" not in job.numbers
        base = Off(net) if adapters else model()
        for _ in range(2):  # and again, over as many batches as there are
            job.evaluate([batch(kinds=kinds)] * 2)
            expected = by_hand(net, base, [kind for kind in kinds if kind != 2])
            assert expected > 1e-3
            assert attachments_of(job).evaluated_means()["kl_per_token"] == pytest.approx(expected, rel=1e-9)
        before = float(job.step(batch(kinds=kinds)))
        assert before == before  # training goes on after an evaluation


def test_it_is_not_measured_where_it_is_not_wanted_or_there_is_no_reference(tmp_path):
    for feature in (SimPO(), DPO(cache_folder=str(tmp_path), held_out_kl=False)):
        with ss.compose(ss.Job(model()), [feature, SGD(lr=0.5, momentum=0.0, nesterov=False)]) as job:
            job.step(batch())
            objective = attachments_of(job).loss.__self__
            calls = []
            if objective.frozen is not None:
                objective.frozen.register_forward_hook(lambda *_, calls=calls: calls.append(1))
            job.evaluate([batch()])
            assert "kl_per_token" not in attachments_of(job).evaluated_means() and not calls


def in_rows(records=RECORDS, kinds=(0, 1)):
    """A batch with each answer in a row of its own, (records, kinds, T)."""
    flat = [record for row in records for record in row]
    shape = len(flat), len(kinds), LENGTH // 4
    inputs, labels, answers = torch.zeros(shape, dtype=torch.int64), torch.full(shape, -100), torch.full(shape, -1)
    for number, (prompt, sides) in enumerate(flat):
        for row, kind in enumerate(kinds):
            text = torch.tensor([*prompt, *sides[kind]])
            inputs[number, row, : len(text)], answers[number, row, : len(text)] = text, kind
            labels[number, row, len(prompt) : len(text)] = text[len(prompt) :]
    return {"input_ids": inputs, "labels": labels, "answers": answers}


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("feature", [DPO, KTO, SimPO])
def test_answers_in_rows_of_their_own_learn_what_packed_ones_do(feature, adapters, tmp_path):
    kinds = (0, 2) if feature is KTO else (0, 1)

    def losses(samples, folder):
        net = model()
        chosen = feature() if feature is SimPO else feature(cache_folder=str(tmp_path / folder))
        features = [LoRA(rank=2), chosen] if adapters else [chosen]
        with ss.compose(ss.Job(net), [*features, SGD(lr=0.5, momentum=0.0, nesterov=False)]) as job:
            trained = [float(job.step(samples)) for _ in range(3)]
            held_out = job.evaluate([samples])
            return trained, held_out, attachments_of(job).evaluated_means()

    for one, other in zip(losses(batch(kinds=kinds), "packed"), losses(in_rows(kinds=kinds), "rows"), strict=True):
        assert other == pytest.approx(one, rel=1e-6)
