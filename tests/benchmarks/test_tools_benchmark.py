"""The benchmark of tools: its conversations, its templates, and that it tells right answers from wrong ones."""

import json

import openai
import pytest

from benchmarks.serving import tools
from benchmarks.serving.conversations import DECLINED, TOOLS, Conversation, conversations, definition
from benchmarks.serving.taught import TEMPLATES
from shoestring.data.chat_template import ChatTemplate
from shoestring.decode.serve.tool_calls import FORMS, Calling, ToolCall, find_form
from tests.decode.calling_models import calling_server
from tests.decode.calling_templates import tokenizer

jsonschema = pytest.importorskip("jsonschema")


@pytest.fixture(scope="module")
def drawn():
    return conversations(300, seed=3)


def calls_of(one):
    return [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for message in one.messages
        for call in message.get("tool_calls", [])
    ]


def test_arguments_follow_the_schemas_of_the_offered_tools(drawn):
    for one in drawn:
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in one.tools}
        for name, arguments in calls_of(one):
            jsonschema.Draft202012Validator(schemas[name]).validate(arguments)


def test_arguments_are_of_all_types_of_json_and_calls_are_parallel(drawn):
    values = [value for one in drawn for _, arguments in calls_of(one) for value in arguments.values()]
    assert {type(value) for value in values} == {str, int, float, bool, list, dict, type(None)}
    assert {len(message.get("tool_calls", [])) for one in drawn for message in one.messages} == {0, 1, 2, 3}


def test_every_call_has_its_result_and_what_no_tool_does_is_declined(drawn):
    for one in drawn:
        numbers = [call["id"] for message in one.messages for call in message.get("tool_calls", [])]
        assert [message["tool_call_id"] for message in one.messages if message["role"] == "tool"] == numbers
        assert len(set(numbers)) == len(numbers) and one.messages[-1]["role"] == "assistant"
    declined = [one for one in drawn if one.messages[-1]["content"] == DECLINED]
    assert declined and all(len(one.tools) < len(TOOLS) for one in declined)


def test_conversations_are_unlike_and_not_those_that_were_trained_on(drawn):
    lines = {one.line for one in drawn}
    assert len(lines) == len(drawn)
    assert not lines & {one.line for one in conversations(300, seed=3, without=frozenset(lines))}


@pytest.mark.parametrize("form", TEMPLATES)
def test_what_the_templates_write_is_parsed_back(form, drawn):
    source = TEMPLATES[form]
    template = ChatTemplate(tokenizer(source), source)
    assert find_form(source) == form
    for one in drawn:
        before = template.render([{"role": "user", "content": "a"}], {"tools": one.tools})
        assert all(f"{tool['function']['name']} (" in before for tool in one.tools)
        for message in one.messages:
            calls = [
                {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
                for call in message.get("tool_calls", [])
            ]
            whole = template.render(
                [{"role": "user", "content": "a"}, message | {"tool_calls": calls}], {"tools": one.tools}, ask=False
            )
            written = whole.removeprefix(before).rpartition("<|im_end|>")[0]
            if message["role"] == "assistant":
                parser = FORMS[form](Calling(form=form, names=list(TOOLS)))
                parts = [*parser.add(written), *parser.end()]
                called = [(part.name, json.loads(part.arguments)) for part in parts if isinstance(part, ToolCall)]
                assert called == [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
                assert "".join(part for part in parts if isinstance(part, str)) == message["content"]


CALL = '<tool_call>\n{"name": "light", "arguments": {"room": "hall", "on": true}}\n</tool_call>'
LIGHT = Conversation(
    [
        {"role": "user", "content": "Switch on the light in the hall."},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "call00000",
                    "type": "function",
                    "function": {"name": "light", "arguments": '{"room": "hall", "on": true}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call00000", "content": "hall on"},
        {"role": "assistant", "content": "hall on."},
    ],
    [definition("light")],
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answers", "judged"),
    [
        ([CALL, "hall on."], tools.Judged(1, 1, True, 0)),
        ([CALL.replace("true", "false"), "hall on."], tools.Judged(1, 0, False, 0)),
        ([CALL + "\n" + CALL, "hall on."], tools.Judged(1, 0, False, 0)),
        ([CALL, "hall off."], tools.Judged(1, 1, False, 0)),
        (["hall on.", "hall on."], tools.Judged(1, 0, False, 0)),
    ],
)
def test_right_answers_are_told_from_wrong_ones(answers, judged):
    with (
        calling_server("hermes") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        server.model.answers = answers
        assert tools.judge(client, "small", LIGHT) == judged


@pytest.mark.slow
def test_a_stream_that_differs_is_counted(monkeypatch):
    said = tools._said_in_response
    monkeypatch.setattr(tools, "_said_in_response", lambda response: said(response)._replace(text="other"))
    with (
        calling_server("hermes") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        server.model.answers = [CALL, "hall on."]
        assert tools.judge(client, "small", LIGHT).differ == 4
