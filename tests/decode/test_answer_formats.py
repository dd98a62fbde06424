"""What a client asks of an answer's format and of single tokens, through the server and OpenAI's own client."""

import json
import re
import threading

import openai
import pydantic
import pytest
import torch

from shoestring.decode.adapter import adapt
from shoestring.decode.constraint import Constraint, ConstraintError, Grammars
from shoestring.decode.drafters.lookup import PromptLookup
from shoestring.decode.drafters.model import ModelDrafter
from shoestring.decode.engine import Engine, Request
from shoestring.decode.settings.generation import AnswerFormat, LogitChanges, Sampling, Speculation
from tests.decode import small_server
from tests.decode.calling_templates import TEMPLATES
from tests.decode.small_server import running
from tests.rigs.foreign_tokenizers import KINDS, tokenizer_of

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "animal": {"enum": ["cat", "dog", "größer"]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 8},
        "names": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["animal", "legs", "names"],
    "additionalProperties": False,
}
FORMATS = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}, "schema"),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "schema"),
    ({"structured_outputs": {"regex": "[a-c]{2,5}(x|yz)"}}, "[a-c]{2,5}(x|yz)"),
    ({"structured_outputs": {"choice": ["yes", "no", "ja\n"]}}, "yes|no|ja\n"),
    ({}, "(?s:.*)"),
]


def fits(text, wanted):
    if wanted != "schema":
        return re.fullmatch(wanted, text) is not None
    found = json.loads(text)
    return found["animal"] in ("cat", "dog", "größer") and 0 <= found["legs"] <= 8 and len(found["names"]) <= 2


@pytest.fixture(scope="module")
def server():
    with running(slots=3) as one:
        yield one


def chat(server, **fields):
    body = {"messages": [{"role": "user", "content": "an animal"}], "max_tokens": 150, "seed": 1} | fields
    return server.http.post("/v1/chat/completions", json=body)


def complete(server, **fields):
    return server.http.post("/v1/completions", json={"prompt": "an", "max_tokens": 150, "seed": 1} | fields)


@pytest.mark.slow
@pytest.mark.parametrize("draft_length", [0, 4])
def test_unlike_requests_in_one_batch_have_their_formats_and_are_what_each_is_alone(draft_length):
    with running(slots=5, draft_length=draft_length) as server:
        alone = [chat(server, n=2, max_tokens=80, **fields).json()["choices"] for fields, _ in FORMATS]
        together: list = [None] * len(FORMATS)

        def ask(place):
            together[place] = chat(server, n=2, max_tokens=80, **FORMATS[place][0]).json()["choices"]

        threads = [threading.Thread(target=ask, args=[place]) for place in range(len(FORMATS))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert together == alone
    for (fields, wanted), choices in zip(FORMATS, alone, strict=True):
        for choice in choices:
            text, ended = choice["message"]["content"], choice["finish_reason"] == "stop"
            assert ended or not fields or wanted == "schema"
            assert not ended or fits(text, wanted), text


@pytest.mark.slow
def test_streams_and_responses_have_the_format_too(server):
    fields = FORMATS[2][0]
    whole = complete(server, **fields).json()["choices"][0]["text"]
    answer = complete(server, stream=True, **fields).text
    events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == whole
    assert fits(whole, FORMATS[2][1])
    text = {"format": {"type": "json_schema", "name": "animal", "schema": SCHEMA, "strict": True}}
    body = {"input": "an animal", "text": text, "max_output_tokens": 150, "seed": 3}
    answer = server.http.post("/v1/responses", json=body).json()
    assert answer["text"] == text
    if answer["status"] == "completed":
        assert fits(answer["output"][0]["content"][0]["text"], "schema")


@pytest.mark.slow
def test_openais_client_parses_what_it_asks_for(server):
    class Animal(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=4)
        legs: int = pydantic.Field(ge=0, le=99)

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    messages = [{"role": "user", "content": "an animal"}]
    with client:
        parsed = client.chat.completions.parse(
            model="small", messages=messages, response_format=Animal, seed=1, max_tokens=200
        )
        assert isinstance(parsed.choices[0].message.parsed, Animal)
        plain = client.chat.completions.create(
            model="small", messages=messages, response_format={"type": "json_object"}, seed=1, max_tokens=60
        )
    assert plain.choices[0].message.content.startswith("{")


def test_a_bias_chooses_and_bans_tokens(server):
    assert complete(server, max_tokens=5, logit_bias={str(ord("z")): 100}).json()["choices"][0]["text"] == "zzzzz"
    letters = {str(byte): 20 for byte in b"abc"}  # others are bytes that are no characters by themselves
    greedy = complete(server, max_tokens=20, temperature=0, logit_bias=letters).json()["choices"][0]["text"]
    banned = letters | {str(ord(letter)): -100 for letter in greedy}
    without = complete(server, max_tokens=20, temperature=0, logit_bias=banned).json()["choices"][0]["text"]
    assert set(greedy) <= set("abc") and not set(greedy) & set(without)


def test_penalties_count_what_was_written(server):
    words = {"temperature": 0, "max_tokens": 40, "logit_bias": {str(ord("z")): 9, str(ord("y")): 8.5}}
    assert set(complete(server, **words).json()["choices"][0]["text"]) == {"z"}
    mixed = complete(server, frequency_penalty=0.2, **words).json()["choices"][0]["text"]
    assert 10 < mixed.count("z") < 35 and mixed.count("y") > 5


WRONG = [
    ({"response_format": {"type": "grammar"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": []}}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_object", "more": 1}}, "response_format.more"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "a" * 5000}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": {"$ref": "#"}}}, "structured_outputs"),
    ({"structured_outputs": {"json": {"enum": ["x" * 70_000]}}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": {"minimum": 3, "maximum": 1, "type": "integer"}}}, "structured_outputs"),
    ({"logit_bias": {"259": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"²": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"logit_bias": {"1": "1"}}, "logit_bias.1"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {str(number): 1 for number in range(2000)}}, "logit_bias"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": "0"}, "frequency_penalty"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=[str(number) for number in range(len(WRONG))])
def test_what_is_wrong_is_named(server, fields, param):
    for answer in (chat(server, **fields), complete(server, **fields)):
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param, answer.json()


def test_a_field_of_a_response_is_named(server):
    body = {"input": "x", "text": {"format": {"type": "json_schema", "schema": {"$ref": "#"}}}}
    answer = server.http.post("/v1/responses", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "text.format"


@pytest.mark.slow
def test_a_format_does_not_go_with_tools():
    tools, wanted = [{"type": "function", "function": {"name": "look"}}], {"type": "json_object"}
    with running(template=TEMPLATES["hermes"]) as server:
        answer = chat(server, tools=tools, response_format=wanted)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "response_format"
        other = server.http.post("/v1/responses", json={
            "input": "x", "tools": [{"type": "function", "name": "look"}], "text": {"format": wanted}
        })  # fmt: skip
        assert other.status_code == 400 and other.json()["error"]["param"] == "text"
        assert chat(server, tools=tools, tool_choice="none", response_format=wanted, max_tokens=9).status_code == 200


@pytest.mark.slow
def test_a_model_without_an_end_says_so():
    with running(endless=True) as server:
        answer = complete(server, response_format={"type": "json_object"})
    assert answer.status_code == 400 and "no token that ends a text" in answer.json()["error"]["message"]


def test_a_constraint_that_fails_ends_its_own_text_only(server, monkeypatch):
    real = Constraint.allowed

    def failing(self, text, drafted, width):
        if len(text) == 3:
            raise ConstraintError("the constraint cannot be followed: too much work")
        return real(self, text, drafted, width)

    wanted = complete(server, max_tokens=30).json()["choices"][0]["text"]
    monkeypatch.setattr(Constraint, "allowed", failing)
    answers = {}
    threads = [
        threading.Thread(target=lambda: answers.update(bad=complete(server, **FORMATS[2][0]))),
        threading.Thread(target=lambda: answers.update(good=complete(server, max_tokens=30))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers["bad"].status_code == 500 and answers["bad"].json()["error"]["code"] == "format"
    assert answers["good"].json()["choices"][0]["text"] == wanted


# -- drafts ------------------------------------------------------------------------------------------------------------


def texts(drafter, sampling, verification, format_of):
    tokenizer, model = small_server.tokenizer(), small_server.model()
    grammars = Grammars(tokenizer.engine.to_str(), tokenizer.vocab_size, tokenizer.ends)
    speculation = Speculation(draft_length=3, verification=verification)
    made = {"lookup": PromptLookup, "model": lambda: ModelDrafter(adapt(model), 4, speculation), "": lambda: None}[
        drafter
    ]()
    engine = Engine(model, slots=4, drafter=made, speculation=speculation)
    rows = [
        engine.submit(
            Request(
                tokens=tokenizer.encode("ab ab ab"),
                max_new=60,
                sampling=sampling(seed),
                changes=LogitChanges(bias={97: 1.0}, presence_penalty=0.5, frequency_penalty=-0.1),
                constraint=grammars.compile(format_of[seed]).start() if format_of[seed] else None,
                stop=frozenset(tokenizer.ends),
            )
        )
        for seed in range(4)
    ]
    while engine.busy:
        engine.step()
    engine.close()
    assert not any(row.error for row in rows)
    assert not drafter or sum(engine.counts.drafts.accepted) > 0
    return [row.text for row in rows]


@pytest.mark.parametrize("drafter", ["lookup", "model"])
@pytest.mark.parametrize("greedy", [True, False])
def test_drafts_change_no_text(drafter, greedy):
    formats = [AnswerFormat("regex", "(ab ?)*c"), AnswerFormat("json_schema", json.dumps(SCHEMA)), None, None]

    def sampling(seed):
        return Sampling(seed=seed, temperature=0.0 if greedy else 0.7)

    torch.manual_seed(0)
    assert texts(drafter, sampling, "invariant", formats) == texts("", sampling, "invariant", formats)


# -- tokenizers --------------------------------------------------------------------------------------------------------

READABLE = {"byte-level", "byte-fallback, space before", "byte-fallback", "Unigram, byte-fallback"}


@pytest.mark.slow
@pytest.mark.share(3)
@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("more", [0, 7, -3], ids=["as many", "more", "fewer"])
def test_any_tokenizer_writes_the_format_or_is_refused_in_one_line(kind, begins, more):
    """The model has as many tokens as the tokenizer, more, or fewer."""
    tokens = tokenizer_of(kind, begins)
    built = small_server.model(200, tokens.vocab_size + more)
    with running(slots=2, tokens=tokens, built=built, context=200) as server:
        format = {"json": {**SCHEMA, "required": ["legs"]}}
        answer = complete(server, prompt="the cat", n=4, seed=1, structured_outputs=format)
        if kind not in READABLE:
            error = answer.json()["error"]
            assert (
                answer.status_code == 400
                and "need a byte-level tokenizer" in error["message"]
                and "\n" not in error["message"]
            )
            return
        assert answer.status_code == 200, answer.text
        ended = [each["text"] for each in answer.json()["choices"] if each["finish_reason"] == "stop"]
    assert ended and all(0 <= json.loads(text)["legs"] <= 8 for text in ended)


def test_masks_that_were_begun_are_those_that_are_asked_for():
    """Also where a pass failed in between, where nobody asked, and where the drafts are others than were begun."""
    tokenizer = small_server.tokenizer()
    grammar = Grammars(tokenizer.engine.to_str(), tokenizer.vocab_size, tokenizer.ends).compile(
        AnswerFormat("regex", "ab*c")
    )
    one, other, width = grammar.start(), grammar.start(), tokenizer.vocab_size
    a, b, c = map(ord, "abc")
    begun = [([], [a, b]), ([a], [b, b]), ([a], [c]), ([a, b], []), ([a, b, c], [])]
    asked = [([], [a, b]), ([a], [b]), ([a], [b]), ([a, b], []), ([a, b, c], [tokenizer.end_of_text])]
    for first, then in zip(begun, asked, strict=True):
        one.begin(*first, width)
        one.begin(*first, width)
        assert torch.equal(one.allowed(*then, width), other.allowed(*then, width))
        assert torch.equal(one.allowed(*then, width), other.allowed(*then, width))
    one.begin([a, b, c, c], [], width)
    with pytest.raises(ConstraintError, match="does not follow"):
        one.allowed([a, b, c, c], [], width)
