"""Calls of tools in texts: what a chat template writes is parsed back, in pieces as in whole, and what is damaged is
text."""

import json
import random
import re
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.data.chat_template import ChatTemplate, template_source
from shoestring.decode.serve.tool_calls import FORMS, Calling, ToolCall, find_form
from tests.decode.calling_templates import BEGIN, TEMPLATES, tokenizer

NAMES = ("weather", "f", "read_file-2")
ALONE = ("llama", "json")
"""Forms in which calls stand alone, without text before them."""


def parsed(form, text, pieces=(), **calling):
    """Texts, joined where they are neighbours, and calls, of a text that arrives in pieces that end at `pieces`."""
    parser = FORMS[form](Calling(form=form, names=NAMES, **calling))
    parts = []
    for start, end in zip([0, *pieces], [*pieces, len(text)], strict=True):
        parts += parser.add(text[start:end]) if not parser.finished else []
    parts += parser.end()
    joined = []
    for part in parts:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part if isinstance(part, str) else (part.name, json.loads(part.arguments)))
    calls = [part for part in parts if isinstance(part, ToolCall)]
    assert [call.index for call in calls] == list(range(len(calls)))
    assert len({call.id for call in calls}) == len(calls)
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", call.id) for call in calls)
    return joined


def written(template, content, calls):
    """What a chat template writes for an answer of the model with text and calls."""
    entries = [
        {"id": f"{number:09}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": content, "tool_calls": entries}
    rendered = template.render([{"role": "user", "content": "a"}, message], {}, ask=False)
    return rendered.split(BEGIN)[1].removesuffix("<|im_end|>\n")


@cache
def loaded(name):
    """A form of calls, and the chat template that writes calls in it."""
    tokens = tokenizer(name)
    source = template_source(tokens)
    return find_form(source), ChatTemplate(tokens, source)


@pytest.fixture(params=TEMPLATES)
def form(request):
    return loaded(request.param)


def test_the_form_is_found_by_the_template():
    assert set(FORMS) == {name.partition(",")[0] for name in TEMPLATES}
    assert find_form(TEMPLATES["mistral, newer"]) == "mistral"
    assert find_form("{{ tools | tojson }}") == "json"
    assert [find_form(TEMPLATES[name]) for name in FORMS] == list(FORMS)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
hard = st.sampled_from(
    ["</tool_call>", "<tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", '"}', "\\", '\\"', "}]", '{"name": "f"']
)
call_lists = st.lists(
    st.tuples(st.sampled_from(NAMES), st.dictionaries(st.text() | hard, values | hard, max_size=3)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=30)
@given(form=st.sampled_from(list(TEMPLATES)), calls=call_lists, draw=st.randoms(use_true_random=False))
def test_calls_are_what_was_written_wherever_the_text_is_cut(form, calls, draw):
    name, template = loaded(form)
    content = "" if name in ALONE else draw.choice(["", "Let me look [1].", "a < b {", "<tool", "x\n\ny"])
    text = written(template, content, calls)
    whole = parsed(name, text)
    assert whole == ([content] if content else []) + calls
    for _ in range(3):
        pieces = sorted(draw.sample(range(len(text) + 1), min(draw.randint(1, 9), len(text))))
        assert parsed(name, text, pieces) == whole
    assert parsed(name, text, range(1, len(text))) == whole


def test_a_text_may_be_cut_at_every_place(form):
    name, template = form
    text = written(template, "", [("weather", {"city": "Köln", "at": [1, {"x": '"}'}]}), ("f", {})]) + "\n"
    whole = parsed(name, text)
    assert [part[0] for part in whole] == ["weather", "f"]
    for place in range(len(text)):
        assert parsed(name, text, [place]) == whole


def conversations(count, seed=0):
    """Random answers with calls: their texts, and their calls."""
    draw = random.Random(seed)
    words = ["a", "Köln", "it's", '"quoted"', "line\nbreak", "{", "}", "[1]", "</tool_call>", "漢字", "\\n", ""]

    def value(depth=0):
        kinds = [lambda: draw.choice(words), lambda: draw.random(), lambda: draw.randint(-(10**20), 10**20)]
        kinds += [lambda: draw.choice([None, True, False])]
        if depth < 3:
            kinds += [lambda: [value(depth + 1) for _ in range(draw.randint(0, 3))]]
            kinds += [lambda: {draw.choice(words): value(depth + 1) for _ in range(draw.randint(0, 3))}]
        return draw.choice(kinds)()

    for _ in range(count):
        calls = [
            (draw.choice(NAMES), {draw.choice(words): value() for _ in range(draw.randint(0, 4))})
            for _ in range(draw.randint(1, 3))
        ]
        yield draw.choice(["", "I will look.", "First this,\nthen {that}."]), calls


def test_two_hundred_conversations_are_parsed_as_the_template_writes_them(form):
    name, template = form
    for content, calls in conversations(200):
        content = "" if name in ALONE else content
        assert parsed(name, written(template, content, calls)) == ([content] if content else []) + calls


def damaged(text, draw):
    """A text from which characters were taken, to which some were added, or in which some have changed places."""
    for _ in range(draw.randint(1, 3)):
        at, length = draw.randrange(len(text) + 1), draw.randint(1, 12)
        kind = draw.randrange(4)
        if kind == 0:
            text = text[:at]
        elif kind == 1:
            text = text[:at] + text[at + length :]
        elif kind == 2:
            text = text[:at] + draw.choice(['"', "{", "}", "]", "\\", "<tool_call>", "[TOOL_CALLS]", "é"]) + text[at:]
        else:
            text = text[:at] + text[at : at + length][::-1] + text[at + length :]
    return text


def test_a_thousand_damaged_calls_are_calls_or_come_back_as_text(form):
    name, template = form
    draw = random.Random(1)
    kept = 0
    for content, calls in conversations(200, seed=1):
        content = "" if name in ALONE else content
        original = written(template, content, calls)
        for _ in range(5):
            text = damaged(original, draw)
            whole = parsed(name, text)
            pieces = sorted(draw.sample(range(len(text) + 1), min(5, len(text))))
            assert parsed(name, text, pieces) == whole
            assert all(part[0] in NAMES and isinstance(part[1], dict) for part in whole if not isinstance(part, str))
            if not any(isinstance(part, tuple) for part in whole):
                assert "".join(whole) == text
                kept += 1
            for part in whole:  # nothing is made up
                assert part in text if isinstance(part, str) and len(whole) < 3 else True
    assert kept > 100


MARKED = {
    "hermes": ('<tool_call>{"name": "f", "arguments": %s}</tool_call>', '<tool_call>{"name": %s, "arguments": {}}'),
    "mistral": ('[TOOL_CALLS] [{"name": "f", "arguments": %s}]', '[TOOL_CALLS][{"name": %s, "arguments": {}}]'),
    "llama": ('<|python_tag|>{"name": "f", "parameters": %s}', '{"name": %s, "parameters": {}}'),
    "json": ('{"name": "f", "arguments": %s}', '[{"name": %s, "arguments": {}}]'),
}


@pytest.mark.parametrize("name", FORMS)
def test_what_is_no_call_is_text(name):
    arguments, called = MARKED[name]
    for wrong in (
        "1",
        "[]",
        "null",
        '"a"',
        '"[]"',
        "NaN",
        '{"a": NaN}',
        "{'a': 1}",
        '{"a": 1,}',
        '"{\\"a\\": \\"\\ud800\\"}"',
    ):
        text = arguments % wrong
        assert parsed(name, text) == [text]
    for wrong in ("1", "null", '"g"', '["f"]', '"F"', '""'):
        text = called % wrong
        assert parsed(name, text) == [text]
    deep = arguments % ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}")
    assert parsed(name, deep) == [deep]
    for text in ("", " ", "Hello", "[1, 2]", '{"a": 1}', "{", "\\", '{"name": "f"}', "<tool_", "[TOOL_CALLS", "\n\n"):
        assert parsed(name, text) == ([text] if text else [])


@pytest.mark.parametrize("name", FORMS)
def test_other_spellings_of_a_call_are_understood(name):
    arguments, _ = MARKED[name]
    call = ("f", {"a": "é"})
    for spelled in ('{"a": "é"}', ' {"a" : "\\u00e9"} ', '"{\\"a\\": \\"é\\"}"'):
        assert parsed(name, arguments % spelled) == [call]
        other = "arguments" if name == "llama" else "parameters"
        assert parsed(name, re.sub("arguments|parameters", other, arguments % spelled)) == [call]
    nested = re.sub(r"\{.*\}", '{"type": "function", "function": {"name": "f", "arguments": {"a": "é"}}}', arguments)
    assert parsed(name, nested) == [call]


def test_text_may_stand_around_calls():
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert parsed("hermes", f"One \n{call}\n two {call}{call}.") == ["One", ("f", {}), "two", ("f", {}), ("f", {}), "."]
    assert parsed("hermes", f"<tool_call>\n{call}") == [("f", {})]
    assert parsed("hermes", f"<tool_call>no</tool_call> {call}") == ["<tool_call>no</tool_call>", ("f", {})]
    assert parsed("hermes", call.removesuffix("_call>")) == [("f", {})]
    assert parsed("mistral", 'a [TOOL_CALLS]f[CALL_ID]x1[ARGS]{"b": 1} c') == ["a", ("f", {"b": 1}), "c"]
    assert parsed("mistral", "[TOOL_CALLS]g[ARGS]{}[TOOL_CALLS]f[ARGS]{}") == ["[TOOL_CALLS]g[ARGS]{}", ("f", {})]
    assert parsed("mistral", "[TOOL_CALLS]f[ARGS]{}f[ARGS]{no}") == [("f", {}), "f[ARGS]{no}"]
    assert parsed("llama", '{"name": "f", "parameters": {}} done') == [("f", {}), "done"]
    assert parsed("llama", '{"name": "f", "parameters": {}}; {"name": ') == [("f", {}), '{"name": ']


def test_a_text_that_may_have_one_call_is_over_after_it(form):
    name, template = form
    text = written(template, "", [("f", {"a": 1}), ("weather", {})])
    assert parsed(name, text, single=True) == [("f", {"a": 1})]
    assert parsed(name, text, range(1, len(text)), single=True) == [("f", {"a": 1})]


def test_an_opening_begins_a_call_as_the_template_writes_it(form):
    name, template = form
    text = written(template, "", [("weather", {"city": "Köln"})])
    if name == "json":  # the template writes a list, of which the model may leave out the brackets
        text = text.removeprefix("[").removesuffix("]")
    for function in ("weather", None):
        opening = FORMS[name].opening(template_source(template.tokenizer), function)
        assert text.startswith(opening)
        assert ("weather" in opening) == (function is not None)
        assert parsed(name, text.removeprefix(opening), opening=opening) == [("weather", {"city": "Köln"})]
        assert parsed(name, "no", opening=opening) == [opening + "no"]
