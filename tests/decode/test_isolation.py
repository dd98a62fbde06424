"""An error of one text is that text's alone: the others are what they would have been, bit by bit."""

import json
from threading import Thread

import pytest
import torch

from benchmarks.decode.exactness import CONTEXT, close_pair, drafters
from shoestring.core.errors import ConfigError
from shoestring.decode.adapter import OwnModel
from shoestring.decode.engine import Engine, Request, generate
from shoestring.decode.sampling import penalize, probabilities
from shoestring.decode.settings.generation import Sampling, Speculation
from tests.decode.small_server import running
from tests.waiting import until

QUICK = [("none", "invariant"), ("model", "block"), ("lookup", "token")]
DRAFTING = [
    pytest.param(kind, rule, marks=[] if (kind, rule) in QUICK else pytest.mark.slow)
    for kind in ("none", "model", "lookup", "skip")
    for rule in (("invariant",) if kind == "none" else ("invariant", "token", "block"))
]


@pytest.fixture(scope="module")
def pair():
    return close_pair()


class Faulty(OwnModel):
    """Raises in every pass with the row `bad` in it, once that has `after` tokens."""

    bad, after = None, 0

    def logits(self, tokens, cache, place, last):
        bad = self.bad
        reads = bad is not None and bad.ending is None and bad.slot in range(*place.rows.indices(99))
        if reads and len(bad.history) >= self.after:
            raise RuntimeError("planted")
        return super().logits(tokens, cache, place, last)


def victims():
    for index, rule in enumerate(({}, {"top_p": 0.8}, {"repetition_penalty": 1.3}, {"temperature": 0.0})):
        tokens = [(index + step * step) % 12 for step in range(32 if index == 1 else 3)]
        yield Request(tokens=tokens, max_new=8, sampling=Sampling(seed=index, **rule))


def drafting_engine(pair, kind, rule, model=None, slots=5):
    speculation = Speculation(draft_length=0 if kind == "none" else 3, verification=rule)
    drafter = None if kind == "none" else drafters(pair[1], slots, speculation)[kind]
    engine = Engine(model or pair[0], slots=slots, chunk=16, drafter=drafter, speculation=speculation)
    if kind == "skip":  # which sublayers it skips depends on the first text that is long enough
        run(engine, [engine.submit(Request(tokens=[index % 12 for index in range(32)], max_new=4))])
    return engine


def run(engine, rows):
    while engine.busy:
        engine.step()
    engine.close()
    return [row.text for row in rows]


def fault(kind, engine, adapter):
    """A request beside the victims, and what makes it fail."""
    prompt = [5] * 20 if "prompt" in kind else [5, 6, 5]
    asked = {
        "a number": {"sampling": Sampling(top_k=2.5)},
        "log-probabilities": {"logprobs": 2.5},
        "log-probabilities of the prompt": {"logprobs": 2.5, "prompt_logprobs": True},
        "an unknown token": {"tokens": [5, 99]},
        "an unknown token alone": {"tokens": [99]},
        "a negative token": {"tokens": [-1, 5]},
    }.get(kind, {})
    row = engine.submit(Request(**{"tokens": prompt, "max_new": 30, "sampling": Sampling(seed=9)} | asked))
    if kind.startswith("a pass"):
        adapter.bad, adapter.after = row, 20 if "prompt" in kind else 6
    if kind == "the drafter":
        drafter, draft = engine.speculator.drafter, engine.speculator.drafter.draft

        def faulty(rows, counts):
            found = draft(rows, counts)  # its own cache has changed by then
            if row in rows and len(row.history) >= 6:
                raise RuntimeError("planted")
            return found

        drafter.draft = faulty
    return row


FAULTS = (
    "a number",
    "log-probabilities",
    "log-probabilities of the prompt",
    "an unknown token",
    "an unknown token alone",
    "a negative token",
    "a pass over the prompt",
    "a pass over generated tokens",
    "the drafter",
)


@pytest.mark.parametrize(("kind", "rule"), DRAFTING)
def test_a_fault_of_one_text_changes_no_other(pair, kind, rule):
    plain = drafting_engine(pair, kind, rule)
    wanted = run(plain, [plain.submit(request) for request in victims()])
    for what in FAULTS:
        if kind == "none" and what == "the drafter":
            continue
        adapter = Faulty(pair[0], CONTEXT)
        engine = drafting_engine(pair, kind, rule, adapter)
        rows = [engine.submit(request) for request in victims()]
        bad = fault(what, engine, adapter)
        assert run(engine, rows) == wanted, what
        assert {row.ending for row in rows} == {"length"}
        assert (bad.ending, bad.error is not None) == ("failed", True), what
        assert engine.seated == [None] * 5


def test_a_pass_that_fails_for_all_together_alone_loses_no_text(pair):
    """As when memory is short for a large batch."""

    class Small(OwnModel):
        def logits(self, tokens, cache, place, last):
            if len(tokens) > 1:
                raise MemoryError("planted")
            return super().logits(tokens, cache, place, last)

    plain = drafting_engine(pair, "model", "block")
    engine = drafting_engine(pair, "model", "block", Small(pair[0], CONTEXT))
    wanted = run(plain, [plain.submit(request) for request in victims()])
    assert run(engine, [engine.submit(request) for request in victims()]) == wanted
    assert engine.counts.failed > 0


def test_what_a_model_raises_reaches_whoever_generates_one_text(pair):
    model = Faulty(pair[0], CONTEXT)
    model.bad = type("Row", (), {"slot": 0, "history": [], "ending": None})
    with pytest.raises(RuntimeError, match="planted"):
        list(generate(model, [1, 2], max_new=3))
    with pytest.raises(ConfigError, match="holds token 12, but the model has 12 tokens"):
        list(generate(pair[0], [1, 12], max_new=3))


# -- numbers in the type that uses them --------------------------------------------------------------------------------

TINY = (5e-324, 1e-300, 1e-46, 1e-45, 1.4e-45, 1e-40, 1e-38, 1.18e-38, 1e-30, 1e-20, 1e-9)
LOGITS = [[1.0, 2.0, 400.0, -3.0], [-1e4, -1e4 - 1, -2e4, -3e4], [0.0, -1e-3, -torch.inf, -5.0], [7.0, 7.0, 1.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("value", TINY)
def test_tiny_numbers_have_the_effect_of_their_limit(value, dtype):
    logits = torch.tensor(LOGITS, dtype=dtype)
    likeliest = (logits == logits.amax(-1, keepdim=True)).double()
    likeliest /= likeliest.sum(-1, keepdim=True)
    for sampling in (Sampling(temperature=value), Sampling(top_p=value), Sampling(temperature=value, top_p=value)):
        if sampling.temperature > 1e-6 or value < 1e-8 or sampling.top_p < 1:
            torch.testing.assert_close(probabilities(logits, sampling).double(), likeliest, rtol=1e-6, atol=1e-6)
    least = probabilities(logits, Sampling(min_p=value)).double()
    torch.testing.assert_close(least, probabilities(logits, Sampling()).double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": 1e39},
        {"temperature": 10**309},
        {"temperature": float("nan")},
        {"repetition_penalty": 1e-46},
        {"repetition_penalty": 1e-38},
        {"repetition_penalty": 1e39},
        {"top_p": 0.0},
        {"min_p": 1.0000001},
    ],
    ids=str,
)
def test_numbers_that_are_not_finite_in_float32_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Sampling(**wrong)


@pytest.mark.parametrize("penalty", [2.0**-64, 0.01, 100.0, 2.0**64])
@pytest.mark.parametrize("temperature", [5e-324, 1e-38, 1e-6, 2.0**-20, 1.0, 3e38])
def test_every_allowed_pair_of_penalty_and_temperature_leaves_a_distribution(penalty, temperature):
    logits = penalize(torch.tensor([[1e4, -1e4, 0.0, -torch.inf, 3.0]]), [0, 1, 2, 3], penalty)
    found = probabilities(logits, Sampling(temperature=temperature, top_p=0.9, min_p=1e-46))
    assert found.isfinite().all()
    assert float(found.sum()) == pytest.approx(1)


def test_a_row_of_logits_that_are_not_numbers_raises_nothing():
    logits = torch.tensor([[float("nan")] * 4, LOGITS[0]])
    found = probabilities(logits, Sampling(top_p=0.5, min_p=0.1))
    assert found[1].tolist() == [0, 0, 1, 0]


# -- through the server ------------------------------------------------------------------------------------------------

ODD = [
    {"top_p": 5e-324},
    {"top_p": 1e-46},
    {"top_p": 1e-40},
    {"temperature": 1e-300},
    {"temperature": 1e-45},
    {"temperature": 1e-38},
    {"min_p": 1.0, "temperature": 100},
    {"min_p": 5e-324},
    {"repetition_penalty": 0.01, "prompt": "a" * 60},
    {"repetition_penalty": 100, "temperature": 1e-6},
    {"top_k": 2**31},
    {"top_p": 1e-45, "min_p": 1.0, "temperature": 1e-38, "top_k": 1},
    {"logprobs": 20, "temperature": 1e-30},
    {"top_p": 0},
    {"seed": -(2**63)},
    {"seed": 2**64},
]


@pytest.mark.parametrize("drafts", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_no_numbers_of_one_client_end_the_texts_of_others(drafts):
    with running(slots=4, endless=True, draft_length=drafts) as server:
        found = {}

        def victim(seed):
            asked = {"prompt": "abab", "max_tokens": 60, "seed": seed, "stream": bool(seed)}
            found[seed] = server.http.post("/v1/completions", json=asked).text

        threads = [Thread(target=victim, args=(seed,)) for seed in (0, 1)]
        for thread in threads:
            thread.start()
        until(lambda: server.app.worker.engine.counts.generated > 4)
        for odd in ODD:
            answer = server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2, "seed": 1} | odd)
            assert answer.status_code == 200, (odd, answer.text)
        for thread in threads:
            thread.join()
        assert json.loads(found[0])["choices"][0]["text"] == endless(server, 0)
        assert streamed(found[1]) == endless(server, 1)
        assert server.app.worker.engine.counts.failed == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_that_fails_or_cannot_be_written_is_an_error_of_its_client_alone(stream, caplog):
    with running(slots=3, endless=True) as server:
        engine, form = server.app.worker.engine, server.tokenizer
        inner, stream_of = engine.model.logits, form.stream
        answers = {}

        def client(prompt):
            asked = {"prompt": prompt, "max_tokens": 40, "seed": 1, "stream": stream}
            answers[prompt] = server.http.post("/v1/completions", json=asked).text

        def faulty(tokens, cache, place, last):
            for row in engine.seated[place.rows]:
                if row is not None and row.history[0] == ord("x") and len(row) > 10:
                    raise RuntimeError("planted")
            return inner(tokens, cache, place, last)

        class Unwritable:
            def __init__(self, inner):
                self.inner, self.count = inner, 0

            def add(self, token):
                self.count += 1
                if self.count > 20:
                    raise ValueError("planted")
                return self.inner.add(token)

        engine.model.logits = faulty
        threads = [Thread(target=client, args=(prompt,)) for prompt in ("a", "x")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        form.stream = lambda: Unwritable(stream_of())
        client("y")
        form.stream = stream_of
        for prompt in "xy":
            last = answers[prompt].strip().split("\n\n")[-1].removeprefix("data: ")
            assert json.loads(last)["error"]["code"] == "failed"
        text = streamed(answers["a"]) if stream else json.loads(answers["a"])["choices"][0]["text"]
        assert text == endless(server, 1, "a", 40)
        assert "planted" in caplog.text
        assert server.http.post("/v1/completions", json={"prompt": "a"}).status_code == 200


def endless(server, seed, prompt="abab", count=60):
    stream = server.tokenizer.stream()
    tokens = generate(server.model, list(prompt.encode()), max_new=count, sampling=Sampling(seed=seed))
    return "".join(map(stream.add, tokens)) + stream.rest()


def streamed(answer):
    events = [json.loads(line[6:]) for line in answer.split("\n\n") if line.startswith("data: {")]
    assert "[DONE]" in answer
    return "".join(event["choices"][0]["text"] for event in events)
