"""Scores of continuations: those of each text read alone, whatever else is in its batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shoestring.core.errors import ConfigError
from shoestring.decode.adapter import adapt
from shoestring.decode.harness.scoring import score
from shoestring.models.gpt import GPT, GPTConfig

VOCABULARY, CONTEXT = 11, 12


class Plain(nn.Module):
    """The same model as one that takes no cache."""

    def __init__(self, model):
        super().__init__()
        self.model, self.config = model, type("Config", (), {"context": CONTEXT, "vocab_size": VOCABULARY})()

    def forward(self, tokens):
        return self.model(tokens)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = GPTConfig(
        vocab_size=VOCABULARY, dim=16, layers=2, heads=2, kv_heads=1, hidden=24, context=CONTEXT, init_std=0.4
    )
    return GPT(config).double().eval()


@torch.no_grad()
def one_by_one(model, context, continuation):
    """Each token's log-probability from a pass over what precedes it in its window."""
    text, total, greedy = [*context, *continuation], 0.0, True
    for place in range(len(context), len(text)):
        end = min(len(text), len(context) + ((place - len(context)) // CONTEXT + 1) * CONTEXT)
        logits = model(torch.tensor([text[max(0, end - CONTEXT - 1) : place]]))[0, -1]
        total += float(logits.log_softmax(-1)[text[place]])
        greedy = greedy and int(logits.argmax()) == text[place]
    return total, greedy


tokens = st.integers(0, VOCABULARY - 1)
few = st.lists(st.lists(tokens, min_size=1, max_size=20), min_size=1, max_size=2)  # so that texts share contexts
continuations = st.lists(st.tuples(st.integers(0, 1), st.lists(tokens, max_size=30)), max_size=7)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["own", "whole"])
@given(contexts=few, chosen=continuations, batch=st.integers(1, 5))
@settings(max_examples=25, deadline=None)
def test_scores_are_those_of_each_text_alone_at_any_batch_size(model, form, contexts, chosen, batch):
    pairs = [(contexts[index % len(contexts)], continuation) for index, continuation in chosen]
    adapter = adapt(model if form == "own" else Plain(model))
    done = []
    scores = score(adapter, pairs, batch, done.append)
    assert sum(done) == sum(bool(continuation) for _, continuation in pairs)
    for pair, (logprob, greedy) in zip(pairs, scores, strict=True):
        expected = one_by_one(model, *pair)
        assert logprob == pytest.approx(expected[0], abs=1e-9)
        assert greedy == expected[1]


def test_choices_read_their_question_once(model):
    read = []

    class Counting(type(adapt(model))):
        def read(self, tokens, cache, *, counts=None, **more):
            read.append(sum(counts))
            return super().read(tokens, cache, counts=counts, **more)

    question = [1, 2, 3, 4, 5, 6]
    score(Counting(model, CONTEXT), [(question, [choice]) for choice in range(8)], 4)
    assert sum(read) == len(question)  # choices of one token need nothing more
    read.clear()
    score(Counting(model, CONTEXT), [(question, [choice, 1]) for choice in range(4)], 4)
    assert sum(read) == len(question) - 1 + 4 * 2


def test_a_token_beyond_the_vocabulary_is_refused(model):
    with pytest.raises(ConfigError, match=f"the text holds token {VOCABULARY}, but the model has {VOCABULARY} tokens"):
        score(adapt(model), [([1], [VOCABULARY])], 2)
