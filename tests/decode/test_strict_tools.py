"""Strict functions: whatever a model would like to write, its calls follow the schemas, in every form of calls."""

import json
import random
from functools import cache

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.data.chat_template import template_source
from shoestring.decode.constraint import Grammars
from shoestring.decode.serve import asking
from shoestring.decode.serve.call_grammars import call_grammar
from shoestring.decode.serve.errors import RequestError
from shoestring.decode.serve.fields import RequestFields
from shoestring.decode.serve.served import describe
from shoestring.decode.serve.tool_calls import FORMS, ToolCall
from shoestring.decode.serve.tool_fields import read_tools
from shoestring.decode.settings.generation import AnswerFormat
from tests.decode.calling_models import calling_server
from tests.decode.calling_templates import TEMPLATES, tokenizer
from tests.decode.test_tool_calls import loaded, written

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "unit": {"enum": ["m", "größer"]}, "far": {"type": "boolean"}},
    "required": ["n", "unit"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "walk", "strict": True, "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop-2"}},
]
CHOICES = ["auto", "required", {"type": "function", "function": {"name": "walk"}}]


@cache
def grammars(form):
    tokens = tokenizer(form)
    end = tokens.engine.token_to_id("<|im_end|>")
    return tokens, end, Grammars(tokens.engine.to_str(), tokens.vocab_size, [end])


def compiled(form, choice="auto", parallel=True, tools=TOOLS):
    tokens, _, known = grammars(form)
    asked = read_tools(RequestFields({"tools": tools, "tool_choice": choice, "parallel_tool_calls": parallel}, ""))
    assert asked.constrained
    calling = asked.calling(template_source(tokens))
    source = call_grammar(calling, template_source(tokens), asked.schemas, tokens)
    return calling, known.compile(AnswerFormat("grammar", source))


def drawn(form, grammar, seed, length=400):
    """A text that a model of random weights writes under a grammar; it prefers ASCII, ends, and marks."""
    tokens, end, _ = grammars(form)
    constraint, text, draw = grammar.start(), [], random.Random(seed)
    while len(text) < length:
        allowed = constraint.allowed(text, [], tokens.vocab_size)[0].nonzero()[:, 0].tolist()
        liked = [token for token in allowed if 32 <= token < 127 or token > 256]
        token = draw.choice(liked if liked and draw.random() < 0.9 else allowed)
        if token == end:
            return text, True
        text.append(token)
    return text, False


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.sampled_from(list(TEMPLATES)), st.sampled_from(CHOICES), st.booleans(), st.integers(0, 10**6))
def test_every_call_that_can_be_written_follows_its_schema(form, choice, parallel, seed):
    calling, grammar = compiled(form, choice, parallel)
    text, ended = drawn(form, grammar, seed)
    tokens = grammars(form)[0]
    parser = FORMS[calling.form](calling)
    stream, parts = tokens.stream([], True, parser.marks()), []
    for piece in [*map(stream.add, text), stream.rest()]:
        parts += parser.add(piece) if not parser.finished else []
    parts += parser.end()
    calls = [part for part in parts if isinstance(part, ToolCall)]
    for call in calls:
        assert call.name in ("walk", "stop-2")
        arguments = json.loads(call.arguments)
        assert isinstance(arguments, dict)
        if call.name == "walk":
            jsonschema.validate(arguments, SCHEMA)
    if choice != "auto" and ended:
        assert calls and not "".join(part for part in parts if isinstance(part, str)).strip()
    if choice != "auto" and choice != "required" and calls:
        assert calls[0].name == "walk"


@pytest.mark.parametrize("form", TEMPLATES)
@pytest.mark.parametrize("count", [1, 2])
def test_what_the_template_writes_may_be_written(form, count):
    tokens, end, _ = grammars(form)
    calls = [("walk", {"n": -3, "unit": "größer"}), ("stop-2", {"any": [1, {}]})][:count]
    alone = FORMS[loaded(form)[0]].starts_inside
    text = written(loaded(form)[1], "" if alone else "Let me\nsee.", calls)
    _, grammar = compiled(form)
    ids = tokens.encode_prompt(text, parse_special=True, add_special_tokens=False)
    allowed = grammar.start().allowed([], [*ids, end], tokens.vocab_size)
    assert [bool(allowed[place, token]) for place, token in enumerate([*ids, end])] == [True] * (len(ids) + 1)


@pytest.mark.slow
def test_a_model_that_would_damage_a_call_cannot():
    damaged = '<tool_call>\n{"name": "walk", "arguments": {"n": "three", "unit": "m"}}\n</tool_call>'
    with calling_server("hermes", slots=1) as server:
        body = {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS, "seed": 1, "max_tokens": 200}
        server.model.answers = [damaged]
        choice = server.http.post("/v1/chat/completions", json=body).json()["choices"][0]
        for call in choice["message"].get("tool_calls", []):
            jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
        loose = [TOOLS[0] | {"function": TOOLS[0]["function"] | {"strict": False}}]
        answer = server.http.post("/v1/chat/completions", json=body | {"tools": loose}).json()
    call = answer["choices"][0]["message"]["tool_calls"][0]
    assert json.loads(call["function"]["arguments"])["n"] == "three"  # as it was written


def test_a_schema_that_no_grammar_expresses_is_named():
    served = describe("small", tokenizer("hermes"), 4096)
    impossible = {"type": "object", "properties": {"a": {"$ref": "https://elsewhere.example/schema"}}}
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": impossible}}
    with pytest.raises(RequestError, match=r"tools\[0\].function.parameters.*strict"):
        asking.chat({"messages": [{"role": "user", "content": "a"}], "tools": [tool]}, served)
