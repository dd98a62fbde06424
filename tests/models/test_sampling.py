"""Streaming generation: the cache changes nothing, seeds decide everything, filters match their definitions."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shoestring.core.errors import ConfigError, NonFiniteError
from shoestring.models.gpt import GPT, GPTConfig
from shoestring.models.sampling import distribution, generate, window_start


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    shape = {"vocab_size": 50, "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 48, "context": 16}
    return GPT(GPTConfig(**shape, init_std=0.3))


class Uncached(nn.Module):
    """The same function without a cache, its logits in an object as transformers returns them."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, tokens):
        return SimpleNamespace(logits=self.inner(tokens))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_cache_and_the_full_forward_give_the_same_text_also_when_the_window_slides(model, temperature):
    options = {"max_new": 40, "temperature": temperature, "seed": 3}
    cached = list(generate(model, [1, 2, 3], **options))
    assert cached == list(generate(Uncached(model), [1, 2, 3], context=16, **options))
    assert len(cached) == 40


def test_a_prompt_longer_than_the_context_is_cut_to_the_window(model):
    prompt = torch.arange(30)
    start = window_start(30, 16)
    assert 0 < 30 - start <= 16
    whole = list(generate(model, prompt, max_new=1, temperature=0))
    assert whole == list(generate(model, prompt[start:], max_new=1, temperature=0))


@given(length=st.integers(0, 300), window=st.integers(1, 40))
def test_the_window_is_never_overfull_and_never_goes_back(length, window):
    start = window_start(length, window)
    assert start <= window_start(length + 1, window)
    assert length - start <= window
    assert start == 0 or length - start > window - max(1, window // 4)


def test_seeds_decide(model):
    def text(seed):
        return list(generate(model, [5], max_new=12, seed=seed))

    state = torch.get_rng_state()
    assert text(1) == text(1)
    assert text(1) != text(2)
    assert torch.equal(state, torch.get_rng_state())


def test_greedy_takes_the_likeliest_token_of_the_full_forward(model):
    history = [7, 8]
    for token in generate(model, history, max_new=10, temperature=0):
        assert token == int(model(torch.tensor([history]))[0, -1].argmax())
        history = [*history, token]


def test_it_stops_at_a_stop_token_without_yielding_it(model):
    text = list(generate(model, [5], max_new=12, seed=1))
    stopped = list(generate(model, [5], max_new=12, seed=1, stop={text[4]}))
    assert stopped == text[: text.index(text[4])]


def test_tokens_stream_and_the_mode_comes_back(model):
    model.train()
    stream = generate(model, [5], max_new=10**9)
    next(stream)
    assert not model.training
    stream.close()
    assert model.training


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


def test_draws_follow_the_distribution():
    class Constant(nn.Module):
        def forward(self, tokens):
            return torch.tensor([0.5, 0.3, 0.2]).log().expand(1, tokens.shape[1], 3)

    drawn = torch.tensor(list(generate(Constant(), [0], max_new=1500, context=1)))
    assert (drawn.bincount() / 1500).tolist() == pytest.approx([0.5, 0.3, 0.2], abs=0.04)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_new": -1},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"context": 17},
    ],
)
def test_arguments_out_of_range_are_refused_at_the_call(model, wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        generate(model, [1], **{"max_new": 1, **wrong})


def test_an_empty_prompt_an_unknown_context_and_nan_are_named(model):
    with pytest.raises(ConfigError, match="no tokens"):
        generate(model, [], max_new=1)
    with pytest.raises(ConfigError, match="Uncached"):
        generate(Uncached(model), [1], max_new=1)
    broken = nn.Sequential(nn.Embedding(4, 4))
    nn.init.constant_(broken[0].weight, float("nan"))
    with pytest.raises(NonFiniteError, match="after 2 tokens"):
        list(generate(broken, [1, 2], max_new=1, context=4))
