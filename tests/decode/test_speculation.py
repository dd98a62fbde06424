"""Speculative decoding end to end: no drafter, batch, length of drafts or rollback changes what is generated."""

import pytest
import torch

from benchmarks.decode.exactness import CONTEXT, close_pair, difference, differences, drafters
from shoestring.core.errors import NonFiniteError
from shoestring.decode.adapter import OwnModel
from shoestring.decode.drafters.base import Drafter, DraftTokens
from shoestring.decode.drafters.model import ModelDrafter
from shoestring.decode.engine import Engine, Request, generate
from shoestring.decode.settings.generation import Sampling, Speculation


@pytest.fixture(scope="module")
def pair():
    return close_pair()


def requests(count, *, temperature=None, seed=0, stop=frozenset(), **options):
    numbers = torch.Generator().manual_seed(seed)
    for index in range(count):
        length = int(torch.randint(1, 30, (1,), generator=numbers))
        heat = float(index % 2) if temperature is None else temperature
        yield Request(
            tokens=torch.randint(12, (length,), generator=numbers).tolist(),
            max_new=int(torch.randint(1, 40, (1,), generator=numbers)),
            sampling=Sampling(temperature=heat, seed=index, **options),
            stop=stop,
        )


class Mixed(Drafter):
    """Drafts of every length, right and wrong, that do not depend on the text."""

    def __init__(self):
        self.numbers = torch.Generator().manual_seed(0)

    def draft(self, rows, counts):
        lengths = [int(torch.randint(count + 1, (1,), generator=self.numbers)) for count in counts]
        return [DraftTokens(torch.randint(12, (length,), generator=self.numbers).tolist()) for length in lengths]


def drafter_of(kind, pair, slots, speculation):
    return Mixed() if kind == "mixed" else drafters(pair[1], slots, speculation)[kind]


def texts_of(model, asked, *, slots, **options):
    engine = Engine(model, slots=slots, chunk=16, **options)
    rows = [engine.submit(request) for request in asked]
    while engine.busy:
        engine.step()
    engine.close()
    return [row.text for row in rows], engine


@pytest.mark.parametrize("kind", ["model", "lookup", "skip", "mixed"])
@pytest.mark.parametrize("slots", [1, 8])
@pytest.mark.parametrize("length", [0, 5])
def test_no_drafter_changes_a_text(pair, kind, slots, length):
    """Greedy and sampled, with a penalty that sees drafts, and a stop token that may be drafted."""
    asked = [*requests(5), *requests(3, seed=1, repetition_penalty=1.3, top_p=0.9, stop=frozenset({3}))]
    speculation = Speculation(draft_length=length)
    drafter = drafter_of(kind, pair, slots, speculation)
    texts, engine = texts_of(pair[0], asked, slots=slots, drafter=drafter, speculation=speculation)
    plain, without = texts_of(pair[0], asked, slots=slots)
    assert texts == plain
    if length:
        assert engine.counts.drafts.drafts > 0
        assert engine.counts.passes <= without.counts.passes


@pytest.mark.parametrize("verification", ["token", "block"])
def test_greedy_text_is_the_same_by_every_verification(pair, verification):
    asked = list(requests(10, temperature=0.0))
    speculation = Speculation(draft_length=4, verification=verification)
    drafter = drafter_of("model", pair, 4, speculation)
    assert (
        texts_of(pair[0], asked, slots=4, drafter=drafter, speculation=speculation)[0]
        == texts_of(pair[0], asked, slots=4)[0]
    )


def test_log_probabilities_are_those_of_decoding_without_drafts(pair):
    request = Request(tokens=[1, 2], max_new=30, sampling=Sampling(seed=4), stop=frozenset({7}), logprobs=2)

    def logprobs(**options):
        engine = Engine(pair[0], **options)
        row, found = engine.submit(request), []
        while engine.busy:
            engine.step()
            found += row.logprobs
        return row.text, found

    speculation = Speculation(draft_length=5)
    drafter = ModelDrafter(OwnModel(pair[1], CONTEXT), 1, speculation)
    (text, mine), (_, plain) = logprobs(drafter=drafter, speculation=speculation), logprobs()
    assert [each.token for each in mine] == [each.token for each in plain]
    assert [each.token for each in mine][: len(text)] == text
    assert [each.logprob for each in mine] == pytest.approx([each.logprob for each in plain])


def test_the_window_slides_at_the_same_token_with_and_without_drafts():
    target, draft = close_pair(context=16)
    for temperature in (0.0, 1.0):
        options = {"max_new": 60, "sampling": Sampling(temperature=temperature, seed=2)}
        speculation = Speculation(draft_length=5)
        drafter = ModelDrafter(OwnModel(draft, 16), 1, speculation)
        drafted = list(generate(target, [1, 2, 3], drafter=drafter, speculation=speculation, **options))
        assert drafted == list(generate(target, [1, 2, 3], **options))


@pytest.mark.slow
def test_a_good_drafter_saves_passes_and_one_that_is_the_model_is_always_accepted(pair):
    asked = list(requests(8))
    speculation = Speculation(draft_length=4)
    for drafts_by, least in ((pair[1], 0.3), (pair[0], 1.0)):
        drafter = ModelDrafter(OwnModel(drafts_by, CONTEXT), 2, speculation)
        drafts = texts_of(pair[0], asked, slots=2, drafter=drafter, speculation=speculation)[1].counts.drafts
        assert drafts.accepted[0] >= least * drafts.drafted[0] > 0
        assert drafts.accepted == drafts.drafted or least < 1


@pytest.mark.parametrize("kind", ["model", "mixed"])
def test_the_caches_after_rollback_are_those_of_a_fresh_prefill(pair, kind):
    """Of the model and of the drafter, after every pass."""
    speculation = Speculation(draft_length=4)
    drafter = drafter_of(kind, pair, 3, speculation)
    engine = Engine(pair[0], slots=3, chunk=16, drafter=drafter, speculation=speculation)
    rows = [engine.submit(request) for request in requests(3)]
    checked = 0
    while engine.busy:
        engine.step()
        for row in rows:
            if row.ending is None and (length := engine.cache.lengths[row.slot]):
                assert length <= len(row.history)
                assert difference(engine.model, engine.cache, row.slot, row.history[:length]) < 1e-10
                if kind == "model" and row.drafted:
                    assert max(differences(engine, drafter, row)) < 1e-10
                checked += 1
    assert checked > 20


@pytest.mark.slow
@pytest.mark.parametrize("verification", ["token", "block"])
def test_the_first_tokens_have_the_joint_distribution_of_the_model(pair, verification):
    """Three tokens over a vocabulary of 12, filtered to 3 at a time, across rounds that end in between.

    99.99% quantile of chi-squared with 26 degrees of freedom: 62.
    """
    prompt, sampling = [1, 2, 3], Sampling(top_k=3, temperature=1.2)
    expected = joint(pair[0], prompt, sampling, 3)
    speculation = Speculation(draft_length=2, verification=verification)
    drafter = ModelDrafter(OwnModel(pair[1], CONTEXT), 64, speculation)
    engine = Engine(pair[0], slots=64, room=8, drafter=drafter, speculation=speculation)
    counts = dict.fromkeys(expected, 0)
    rows = [
        engine.submit(Request(tokens=prompt, max_new=3, sampling=Sampling(top_k=3, temperature=1.2, seed=seed)))
        for seed in range(20_000)
    ]
    while engine.busy:
        engine.step()
    for row in rows:
        counts[tuple(row.text)] += 1
    statistic = 2 * sum(
        count * torch.tensor(count / (20_000 * expected[text])).log().item() for text, count in counts.items() if count
    )
    assert statistic < 62


def joint(model, prompt, sampling, count):
    from shoestring.decode.sampling import probabilities

    texts = {(): 1.0}
    for _ in range(count):
        longer = {}
        for text, weight in texts.items():
            with torch.no_grad():
                p = probabilities(model(torch.tensor([[*prompt, *text]]))[0, -1], sampling)
            for token in p.nonzero().flatten().tolist():
                longer[(*text, token)] = weight * float(p[token])
        texts = longer
    return texts


def test_logits_that_are_not_finite_behind_a_rejected_draft_fail_nothing(pair):
    class Broken(OwnModel):
        def logits(self, tokens, cache, place, last):
            logits = super().logits(tokens, cache, place, last)
            return logits.masked_fill((tokens == 11)[..., None], float("nan")) if last is None else logits

    class Elevens(Drafter):
        def draft(self, rows, counts):
            return [DraftTokens([11] * count) for count in counts]

    sampling = Sampling(temperature=0)
    options = {"max_new": 20, "sampling": sampling, "drafter": Elevens(), "speculation": Speculation(draft_length=2)}
    text = list(generate(pair[0], [1, 2], max_new=20, sampling=sampling))
    got = generate(Broken(pair[0], CONTEXT), [1, 2], **options)
    if 11 in text:
        with pytest.raises(NonFiniteError):
            list(got)
    else:
        assert list(got) == text
