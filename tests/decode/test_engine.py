"""Generation: what is cached, shared, padded or reused changes no text; seeds decide everything."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shoestring.core.errors import ConfigError, NonFiniteError
from shoestring.decode.adapter import OwnModel, Whole
from shoestring.decode.engine import Engine, Request, generate
from shoestring.decode.settings.generation import Sampling
from shoestring.decode.window import window_start
from shoestring.models.cache import KVCache
from shoestring.models.gpt import GPT, GPTConfig

SHAPE = {"vocab_size": 50, "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 48}
GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return GPT(GPTConfig(**SHAPE, context=16, init_std=0.3)).double()


@pytest.fixture(scope="module")
def long():
    torch.manual_seed(1)
    return GPT(GPTConfig(**SHAPE, context=200, init_std=0.3)).double()


class Uncached(nn.Module):
    """The same function without a cache, its logits in an object as transformers returns them."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, tokens):
        return SimpleNamespace(logits=self.inner(tokens))


def by_hand(model, prompt, count):
    """The likeliest tokens, each from a forward pass over everything."""
    history = list(prompt)
    for _ in range(count):
        history.append(int(model(torch.tensor([history]))[0, -1].argmax()))
    return history[len(prompt) :]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_cache_and_the_full_forward_give_the_same_text_also_when_the_window_slides(model, temperature):
    options = {"max_new": 40, "sampling": Sampling(temperature=temperature, seed=3)}
    cached = list(generate(model, [1, 2, 3], **options))
    assert cached == list(generate(Uncached(model), [1, 2, 3], context=16, **options))
    assert len(cached) == 40


def test_a_prompt_longer_than_the_context_is_cut_to_the_window(model):
    prompt = torch.arange(30)
    start = window_start(30, 16)
    assert 0 < 30 - start <= 16
    whole = list(generate(model, prompt, max_new=1, sampling=GREEDY))
    assert whole == list(generate(model, prompt[start:], max_new=1, sampling=GREEDY))


@given(length=st.integers(0, 300), window=st.integers(1, 40))
def test_the_window_is_never_overfull_and_never_goes_back(length, window):
    start = window_start(length, window)
    assert start <= window_start(length + 1, window)
    assert length - start <= window
    assert start == 0 or length - start > window - max(1, window // 4)


def test_seeds_decide(model):
    def text(seed):
        return list(generate(model, [5], max_new=12, sampling=Sampling(seed=seed)))

    state = torch.get_rng_state()
    assert text(1) == text(1)
    assert text(1) != text(2)
    assert torch.equal(state, torch.get_rng_state())


def test_greedy_takes_the_likeliest_token_of_the_full_forward(model):
    assert list(generate(model, [7, 8], max_new=10, sampling=GREEDY)) == by_hand(model, [7, 8], 10)


def test_it_stops_at_a_stop_token_without_yielding_it(model):
    text = list(generate(model, [5], max_new=12, sampling=Sampling(seed=1)))
    stopped = list(generate(model, [5], max_new=12, sampling=Sampling(seed=1), stop=[text[4]]))
    assert stopped == text[: text.index(text[4])]


def test_tokens_stream_and_the_mode_comes_back(model):
    model.train()
    frozen = next(model.children()).eval()
    stream = generate(model, [5], max_new=10**9)
    next(stream)
    assert not any(module.training for module in model.modules())
    stream.close()
    assert [module for module in model.modules() if not module.training] == list(frozen.modules())
    model.train()


def test_draws_follow_the_distribution():
    class Constant(nn.Module):
        def forward(self, tokens):
            return torch.tensor([0.5, 0.3, 0.2]).log().expand(1, tokens.shape[1], 3)

    drawn = torch.tensor(list(generate(Constant(), [0], max_new=1500, context=1)))
    assert (drawn.bincount() / 1500).tolist() == pytest.approx([0.5, 0.3, 0.2], abs=0.04)


@pytest.mark.parametrize("wrong", [{"max_new": -1}, {"context": 17}])
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


# -- several texts -----------------------------------------------------------------------------------------------------


def requests(count, seed=0):
    """Prompts and lengths that all differ."""
    numbers = torch.Generator().manual_seed(seed)
    for index in range(count):
        length = int(torch.randint(1, 60, (1,), generator=numbers))
        yield Request(
            tokens=torch.randint(50, (length,), generator=numbers).tolist(),
            max_new=int(torch.randint(1, 40, (1,), generator=numbers)),
            sampling=Sampling(temperature=float(index % 2), seed=index),
        )


def run(engine, rows):
    while engine.busy:
        engine.step()
    engine.close()
    return [row.text for row in rows]


def alone(model, request):
    return list(generate(model, request.tokens, max_new=request.max_new, sampling=request.sampling))


@pytest.mark.parametrize("slots", [1, 3, 8])
def test_what_else_is_in_the_batch_changes_no_text(long, slots):
    asked = list(requests(12))
    engine = Engine(long, slots=slots, chunk=7)
    texts = run(engine, [engine.submit(request) for request in asked])
    assert texts == [alone(long, request) for request in asked]
    assert engine.counts.generated == sum(map(len, texts))


def test_texts_that_come_later_and_are_cancelled_change_none_of_the_others(long):
    asked = list(requests(9, seed=1))
    engine = Engine(long, slots=4, chunk=16)
    rows = []
    for index, request in enumerate(asked):
        rows.append(engine.submit(request))
        engine.step()
        engine.step()
        if index % 3 == 2:
            engine.cancel(rows[index - 1])
    run(engine, rows)
    for row, request in zip(rows, asked, strict=True):
        whole = alone(long, request)
        assert row.text == whole[: len(row)]
        assert row.ending in ("length", "cancelled")
        assert len(row) == len(whole) or row.ending == "cancelled"
    assert engine.seated == [None] * 4


def test_decoding_is_not_starved_by_a_long_prompt(long):
    engine = Engine(long, slots=2, chunk=10)
    short = engine.submit(Request(tokens=[1], max_new=50, sampling=GREEDY))
    engine.step()
    engine.submit(Request(tokens=[2] * 100, max_new=1, sampling=GREEDY))
    for _ in range(20):
        engine.step()
    assert len(short) >= 10


@pytest.mark.parametrize("chunk", [1, 5, 16, 64, 512])
def test_prompts_that_share_passes_give_each_text_as_alone(long, chunk):
    asked = list(requests(16, seed=2))
    engine = Engine(long, slots=6, chunk=chunk)
    rows = [engine.submit(request) for request in asked]
    assert run(engine, rows) == [alone(long, request) for request in asked]
    if chunk == 512:
        assert engine.counts.chunks < 16  # without sharing, each prompt of more than one token takes a pass
    again = Engine(long, slots=6, chunk=chunk, pass_seconds=1e-9)
    assert run(again, [again.submit(request) for request in asked]) == [row.text for row in rows]


def test_a_context_that_is_read_again_in_several_passes_reports_each_token_once(model):
    engine = Engine(model, slots=3, chunk=5)
    rows = [
        engine.submit(Request(tokens=[seed, 2, 3], max_new=40, sampling=Sampling(seed=seed), rolling=True))
        for seed in range(3)
    ]
    reported = {row: [] for row in rows}
    while engine.busy:
        for row in engine.step():
            reported[row] += row.fresh
    for seed, row in enumerate(rows):
        assert reported[row] == row.text
        assert row.text == list(generate(model, [seed, 2, 3], max_new=40, sampling=Sampling(seed=seed)))


def test_long_prompts_leave_slots_and_passes_to_short_ones(long):
    """Four long prompts and four slots: a short text that comes then is complete before any of the long ones is."""
    engine = Engine(long, slots=4, chunk=4)
    longs = [engine.submit(Request(tokens=[seed] * 150, max_new=1, sampling=GREEDY)) for seed in range(4)]
    for _ in range(5):
        engine.step()
    short = engine.submit(Request(tokens=[1, 2, 3], max_new=3, sampling=GREEDY))
    for _ in range(8):
        engine.step()
    assert short.ending == "length"
    run(engine, longs)
    assert {row.ending for row in longs} == {"length"}


def test_clients_get_slots_in_turn(long):
    engine, order = Engine(long, slots=1), []
    rows = [
        engine.submit(Request(tokens=[1, 2], max_new=2, client=client, sampling=GREEDY))
        for client in ("flood",) * 6 + ("quiet",) * 2
    ]
    while engine.busy:
        order += [row.request.client for row in engine.step() if row.ending is not None]
    assert order[:4].count("quiet") == 2
    assert all(row.ending == "length" for row in rows)


def test_a_prompt_pass_that_fails_is_repeated_text_by_text(long):
    class Faulty(OwnModel):
        def logits(self, tokens, cache, place, last):
            if (tokens == 49).any():
                raise RuntimeError("planted")
            return super().logits(tokens, cache, place, last)

    asked = [[1, 2, 3], [4, 49, 5], [6, 7, 8, 9]]
    engine = Engine(Faulty(long, 200), slots=3)
    rows = [engine.submit(Request(tokens=prompt, max_new=5, sampling=GREEDY)) for prompt in asked]
    assert {*engine.step()} == {*rows}
    assert engine.counts.chunks == 2
    run(engine, rows)
    assert [row.ending for row in rows] == ["length", "failed", "length"]
    assert [rows[0].text, rows[2].text] == [by_hand(long, asked[0], 5), by_hand(long, asked[2], 5)]


def test_a_prompt_that_was_read_before_is_not_read_again(long):
    shared = torch.randint(50, (40,), generator=torch.Generator().manual_seed(5)).tolist()
    engine = Engine(long, slots=3)
    first = engine.submit(Request(tokens=[*shared, 1], max_new=5, sampling=GREEDY))
    engine.step()
    copied = engine.submit(Request(tokens=[*shared, 2], max_new=5, sampling=GREEDY))
    run(engine, [])
    again = engine.submit(Request(tokens=[*shared, 1], max_new=5, sampling=GREEDY))
    texts = run(engine, [first, copied, again])
    assert [row.reused for row in (first, copied, again)] == [0, 40, 40]
    assert (engine.counts.read, engine.counts.reused) == (43, 80)  # the last token of each prompt is always read
    assert texts == [by_hand(long, [*shared, last], 5) for last in (1, 2, 1)]


def test_a_text_that_reaches_the_context_ends_and_a_prompt_beyond_it_is_refused(model):
    engine = Engine(model, slots=2)
    full = engine.submit(Request(tokens=[1] * 10, max_new=100, sampling=GREEDY))
    beyond = engine.submit(Request(tokens=[1] * 17, max_new=1))
    assert beyond in engine.step()
    run(engine, [])
    assert (full.ending, len(full)) == ("length", 7)
    assert beyond.ending == "failed"
    assert "the prompt has 17 tokens, and the context is 16" in str(beyond.error)


def test_a_text_whose_logits_are_not_finite_fails_alone(long):
    class Broken(OwnModel):
        def logits(self, tokens, cache, place, last):
            logits = super().logits(tokens, cache, place, last)
            logits[(tokens == 49).any(1)] = float("nan")
            return logits

    engine = Engine(Broken(long, 200), slots=3)
    rows = [engine.submit(Request(tokens=[token], max_new=3, sampling=GREEDY)) for token in (1, 49, 3)]
    run(engine, [])
    assert [row.ending for row in rows] == ["length", "failed", "length"]
    assert isinstance(rows[1].error, NonFiniteError)


# -- the cache ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [OwnModel, Whole])
def test_rows_of_unlike_length_with_padding_and_forgotten_tokens_equal_the_full_forward(long, kind):
    adapter = kind(long, 200)
    tokens = torch.randint(50, (3, 30), generator=torch.Generator().manual_seed(0))
    cache = adapter.new_cache(4, 40)
    for row, length in enumerate((5, 9, 1)):
        adapter.read(tokens[row : row + 1, :length], cache, rows=slice(row, row + 1))
    adapter.read((tokens[:, :6] + 1) % 50, cache, rows=slice(0, 3), counts=[2, 6, 0])  # a draft …
    cache.lengths = [5, 9, 1, 0]  # … that is rejected
    counts = [4, 2, 6]
    pieces = torch.stack([tokens[row, start : start + 6] for row, start in enumerate((5, 9, 1))])
    got = adapter.read(pieces, cache, rows=slice(0, 3), counts=counts)
    whole = long(tokens)
    for row, (start, count) in enumerate(zip((5, 9, 1), counts, strict=True)):
        torch.testing.assert_close(got[row, :count], whole[row, start : start + count], rtol=0, atol=1e-12)
    assert cache.lengths == [9, 11, 7, 0]


def test_padding_behind_a_full_row_does_no_harm(long):
    adapter = OwnModel(long, 200)
    tokens = torch.randint(50, (2, 8), generator=torch.Generator().manual_seed(0))
    cache = adapter.new_cache(2, 8)
    adapter.read(tokens[:, :7], cache, counts=[7, 3])
    got = adapter.read(torch.stack([tokens[0, [7] * 5], tokens[1, 3:8]]), cache, counts=[1, 5])
    whole = long(tokens)
    torch.testing.assert_close(got[0, 0], whole[0, 7], rtol=0, atol=1e-12)
    torch.testing.assert_close(got[1], whole[1, 3:], rtol=0, atol=1e-12)
    with pytest.raises(ConfigError, match="9 tokens exceed the 8"):
        adapter.read(tokens[:, :1], cache)


def test_memory_is_taken_by_layers_that_write():
    cache = KVCache(2, 15)
    place = cache.place(3, torch.device("cpu"))
    cache.append(4, torch.ones(2, 1, 3, 8), torch.ones(2, 1, 3, 8), place)
    assert list(cache.layers) == [4]
    assert cache.nbytes == 2 * 2 * 16 * 8 * 4


# -- log-probabilities -------------------------------------------------------------------------------------------------


def log_softmax_by_hand(model, history):
    return model(torch.tensor([history]))[0].log_softmax(-1).detach()


@pytest.mark.parametrize("chunk", [4, 512])
def test_logprobs_are_the_models_own_whatever_is_sampled_and_however_the_prompt_is_read(long, chunk):
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    engine = Engine(long, slots=2, chunk=chunk)
    run(engine, [engine.submit(Request(tokens=prompt, max_new=3, sampling=GREEDY))])  # leaves a prefix to reuse
    asked = Request(
        tokens=prompt, max_new=4, sampling=Sampling(temperature=0.3, top_k=3), logprobs=2, prompt_logprobs=True
    )
    row, found = engine.submit(asked), []
    other = engine.submit(Request(tokens=[1], max_new=9))
    while row.ending is None:
        if row in engine.step():
            found += row.logprobs
    assert row.reused == 0
    assert other.logprobs == []
    expected = log_softmax_by_hand(long, row.history)[:-1]
    got = [*row.prompt_logprobs, *found]
    assert [entry.token for entry in got] == row.history[1:]
    for entry, wanted in zip(got, expected, strict=True):
        assert entry.logprob == pytest.approx(float(wanted[entry.token]), abs=1e-9)
        best = wanted.topk(2)
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-9)


@pytest.mark.parametrize("length", [1, 2, 8, 9])
def test_logprobs_of_a_prompt_alone_generate_nothing_and_free_the_slot(long, length):
    engine = Engine(long, chunk=8)
    row = engine.submit(Request(tokens=list(range(length)), max_new=0, prompt_logprobs=True))
    run(engine, [row])
    assert (row.ending, row.text, engine.seated) == ("length", [], [None])
    assert [(entry.token, entry.top) for entry in row.prompt_logprobs] == [(token, []) for token in range(1, length)]
