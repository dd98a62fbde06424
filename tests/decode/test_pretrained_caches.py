"""Every family of transformers: the text of its own generation, for one text, for several at once, and with drafts."""

import pytest
import torch

from benchmarks.models import zoo
from shoestring.decode.adapter import OwnCached, Whole, adapt
from shoestring.decode.drafters.base import Drafter, DraftTokens
from shoestring.decode.drafters.model import ModelDrafter
from shoestring.decode.engine import Engine, generate
from shoestring.decode.request import Request
from shoestring.decode.settings.generation import Sampling, Speculation

transformers = pytest.importorskip("transformers")

GREEDY = Sampling(temperature=0)
NEW = 32
TIE = 1e-5
"""Difference of two logits below which rounding decides."""
WITHOUT_CACHE = {"openai-gpt"}

CASES = {zoo.family(name): name for name in zoo.CASES if name not in zoo.missing()}
"""The last case of each family; `benchmarks.models` has them all."""
QUICK = ("mistral", "gpt_neo", "phi3, longrope")
"""A window in our cache and in a cache of its own, and a rope that switches."""


def prompt_of(length):
    return torch.randint(3, 200, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def theirs(model, prompt):
    config = transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=zoo.END)
    model.generation_config = config
    return model.generate(torch.tensor([prompt]), generation_config=config)[0, len(prompt) :].tolist()


def check_same(model, prompt, tokens, wanted):
    """Check that two texts are equal, or differ first where the two best tokens are as good as equal."""
    place = next((at for at, pair in enumerate(zip(tokens, wanted, strict=True)) if len(set(pair)) > 1), None)
    if place is not None:
        last = model(torch.tensor([[*prompt, *wanted[:place]]])).logits[0, -1].double()
        assert abs(float(last[wanted[place]] - last[tokens[place]])) < TIE, f"another token at {place}"


@torch.no_grad()
def check_texts(name):
    model = zoo.build(name)
    adapter = adapt(model)
    assert isinstance(adapter, Whole) is (zoo.family(name) in WITHOUT_CACHE)
    prompts = [prompt_of(length) for length in (5, 2, 31, 1)]
    alone = [list(generate(adapter, prompt, max_new=NEW, sampling=GREEDY)) for prompt in prompts]
    check_same(model, prompts[0], alone[0], theirs(model, prompts[0]))
    engine = Engine(adapter, slots=3, room=90, chunk=7)  # one text waits for a slot that another has used
    rows = [engine.submit(Request(tokens=prompt, max_new=NEW, sampling=GREEDY)) for prompt in prompts]
    while engine.busy:
        engine.step()
    for row, prompt, single in zip(rows, prompts, alone, strict=True):
        assert row.error is None
        check_same(model, prompt, row.history[len(prompt) :], single)


@pytest.mark.parametrize("name", QUICK)
def test_texts_are_those_of_transformers_alone_and_beside_others(name):
    check_texts(name)


@pytest.mark.parametrize("name", ["recurrent_gemma", "phi3, longrope", "llama, dynamic", "mamba"])
@torch.no_grad()
def test_what_is_made_of_a_model_that_was_used_begins_anew(name):
    """Some models keep the state of a text in themselves; that of one token reads it."""
    model, prompts = zoo.build(name), [prompt_of(1), prompt_of(30)]
    texts = [list(generate(model, prompt, max_new=NEW, sampling=GREEDY)) for prompt in prompts * 2]
    assert texts[:2] == texts[2:]


@pytest.mark.slow
@pytest.mark.share(3)
@pytest.mark.parametrize("name", [name for name in (*CASES.values(), "llama, dynamic") if name not in QUICK])
def test_texts_of_all_families_are_those_of_transformers(name):
    check_texts(name)


class Knowing(Drafter):
    """Drafts the text that is to come, in every other draft with a wrong token in it."""

    def __init__(self, texts):
        self.texts, self.rounds = texts, 0

    def draft(self, rows, counts):
        self.rounds += 1
        drafts = []
        for row, count in zip(rows, counts, strict=True):
            text = next(text for text in self.texts if text[: len(row.request.tokens)] == list(row.request.tokens))
            tokens = text[len(row.history) :][: min(count, 4)]
            if self.rounds % 2 and tokens:
                tokens[len(tokens) // 2] = (tokens[len(tokens) // 2] + 1) % 200
            drafts.append(DraftTokens(tokens))
        return drafts


def texts_with(adapter, drafter, prompts):
    engine = Engine(adapter, slots=2, room=90, drafter=drafter, speculation=Speculation(max_draft_length=4))
    rows = [engine.submit(Request(tokens=prompt, max_new=NEW, sampling=GREEDY)) for prompt in prompts]
    while engine.busy:
        engine.step()
    counts = engine.counts.drafts
    assert 0 < sum(counts.accepted) < sum(counts.drafted)
    assert [row.error for row in rows] == [None, None]
    return [row.history[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]


@pytest.mark.parametrize(
    "name", ["mamba2", *(pytest.param(name, marks=pytest.mark.slow) for name in (*QUICK[1:], "llama, dynamic"))]
)
@torch.no_grad()
def test_drafts_that_are_rejected_leave_nothing_in_a_cache_of_transformers_own(name):
    model, prompts = zoo.build(name), [prompt_of(5), prompt_of(21)]
    adapter = adapt(model)
    assert isinstance(adapter, OwnCached)
    wanted = [theirs(model, prompt) for prompt in prompts]
    drafter = Knowing([prompt + text for prompt, text in zip(prompts, wanted, strict=True)])
    for prompt, text, plain in zip(prompts, texts_with(adapter, drafter, prompts), wanted, strict=True):
        check_same(model, prompt, text, plain)


@pytest.mark.slow
@torch.no_grad()
def test_a_recurrent_model_drafts_for_one_that_differs():
    model, prompts = zoo.build("mamba2"), [prompt_of(5), prompt_of(21)]
    other = zoo.build("mamba2").float()
    generator = torch.Generator().manual_seed(0)
    for parameter in other.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.01)
    drafter = ModelDrafter(adapt(other), 2, Speculation(max_draft_length=4))
    for prompt, text in zip(prompts, texts_with(adapt(model), drafter, prompts), strict=True):
        check_same(model, prompt, text, theirs(model, prompt))


@pytest.mark.slow
def test_what_is_not_continued_in_one_piece_is_read_again_as_it_was():
    """A prefix in common with an earlier text is taken over only where the text cannot depend on it."""
    for name in ("mamba2", "llama, dynamic"):
        model = zoo.build(name)
        adapter, prompt = adapt(model), prompt_of(40)
        engine, texts = Engine(adapter, slots=1, room=95, chunk=9), []
        for start in (prompt[:38], prompt):
            row = engine.submit(Request(tokens=start, max_new=10, sampling=GREEDY))
            while engine.busy:
                engine.step()
            texts.append(row.history[len(start) :])
        with torch.no_grad():
            check_same(model, prompt, texts[1], theirs(model, prompt)[:10])


def test_a_text_longer_than_the_context_rolls_on():
    model = zoo.build("mamba2")
    adapter = adapt(model, 32)
    tokens = list(generate(adapter, prompt_of(20), max_new=40, sampling=GREEDY))
    assert tokens == list(generate(Whole(model, 32), prompt_of(20), max_new=40, sampling=GREEDY))
