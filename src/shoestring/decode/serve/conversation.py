"""Parses the messages of a request, and renders them to tokens with the chat template; does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoestring.core.errors import ConfigError, DataError
from shoestring.data.chat_messages import read_calls, texts_of
from shoestring.data.chat_template import ChatTemplate
from shoestring.decode.serve.errors import RequestError, too_long
from shoestring.decode.serve.fields import RequestFields, is_text
from shoestring.decode.serve.served import Served
from shoestring.decode.serve.tool_fields import find_problem

ROLES = ("system", "developer", "user", "assistant", "tool")
_PARTS = {"messages": ("text",), "input": ("text", "input_text", "output_text")}
"""Types of content parts that hold text, by the field that holds the conversation."""

Message = dict[str, Any]


@dataclass
class Conversation:
    """The messages of a conversation, in the form that chat templates expect."""

    messages: list[Message] = field(default_factory=list)
    _unanswered: dict[str, str] = field(default_factory=dict)
    """Names of the called functions by call identifier, for the calls that have no result yet."""

    def add(self, role: str, content: str, name: str | None = None) -> None:
        named = {} if name is None else {"name": name}
        self.messages.append({"role": "system" if role == "developer" else role, "content": content, **named})

    def add_calls(self, calls: Sequence[Message]) -> None:
        """Add calls to the last message, which must be from the assistant."""
        self.messages[-1].setdefault("tool_calls", []).extend(calls)
        self._unanswered |= {call["id"]: call["function"]["name"] for call in calls}

    def add_result(self, fields: RequestFields, key: str, content: str) -> None:
        """Add the result of the call whose identifier is in the field `key`.

        Raises:
            RequestError: there is no such call, or the call already has a result.
        """
        number = fields.text(key)
        if number is None or number not in self._unanswered:
            raise fields.wrong(key, "does not name a preceding tool call that has no result so far")
        name = self._unanswered.pop(number)
        self.messages.append({"role": "tool", "content": content, "tool_call_id": number, "name": name})


def read_messages(fields: RequestFields, served: Served) -> list[Message]:
    """Parse the field `messages` of a chat.

    Raises:
        RequestError: a message is wrong, or there are more messages than the context has room for.
    """
    conversation = Conversation()
    for number, content in enumerate(_listed(fields, "messages", served)):
        message = RequestFields(content, f"messages[{number}]")
        role = message.get("role")
        if role not in ROLES:
            raise message.wrong("role", f"is not one of {', '.join(ROLES)}")
        calls = _calls(message) if role == "assistant" else []
        text = "" if calls and message.get("content") is None else _text(message, "content", "messages")
        if role == "tool":
            conversation.add_result(message, "tool_call_id", text)
            message.ignore("name")  # the name in the call is used instead
        else:
            conversation.add(role, text, message.text("name"))
        if calls:
            conversation.add_calls(calls)
        if role != "assistant":
            message.only("tool_calls", [[]], "only messages of the assistant hold calls")
        for other in ("function_call", "audio"):
            message.only(other, [[]], "messages hold text and `tool_calls` alone")
        message.ignore("refusal", "annotations", "parsed")
        message.finish()
    return conversation.messages


def read_items(fields: RequestFields, served: Served) -> list[Message]:
    """Parse the fields `instructions` and `input` of a request to /v1/responses.

    Raises:
        RequestError: an item is wrong, or there are more items than the context has room for.
    """
    conversation = Conversation()
    if (instructions := fields.text("instructions")) is not None:
        conversation.add("system", instructions)
    if isinstance(fields.get("input"), str):
        conversation.add("user", _text(fields, "input", "input"))
        return conversation.messages
    for number, content in enumerate(_listed(fields, "input", served)):
        item = RequestFields(content, f"input[{number}]")
        kind = item.get("type") or "message"
        if kind == "message":
            role = item.get("role")
            if role not in ROLES[:-1]:
                raise item.wrong("role", f"is not one of {', '.join(ROLES[:-1])}")
            text, last = _text(item, "content", "input"), conversation.messages[-1] if conversation.messages else {}
            if role == "assistant" and "tool_calls" in last:  # text that the model has written after its calls
                last["content"] += text
            else:
                conversation.add(role, text)
            item.ignore("phase")
        elif kind == "function_call":
            call = _call(item, "call_id", item)
            if not conversation.messages or conversation.messages[-1]["role"] != "assistant":
                conversation.add("assistant", "")
            conversation.add_calls([call])
        elif kind == "function_call_output":
            conversation.add_result(item, "call_id", _text(item, "output", "input"))
        else:
            kinds = "message, function_call and function_call_output"
            raise item.wrong("type", f"is not supported: items of the types {kinds} are")
        item.ignore("id", "status", "parsed_arguments")
        item.finish()
    return conversation.messages


def check_length(messages: Sequence[Message], arguments: Mapping[str, Any], name: str, served: Served) -> None:
    """Refuse a conversation with more characters than the context has room for, before it is rendered.

    Args:
        arguments: variables of the chat template.
        name: the field of the request that holds the conversation.
    """
    if (length := sum(map(len, texts_of([*messages, arguments])))) > served.characters:
        raise too_long(served.context, f"{length} characters", name)


def encode(
    messages: Sequence[Message],
    arguments: Mapping[str, Any],
    opening: str,
    fields: RequestFields,
    name: str,
    served: Served,
) -> list[int]:
    """Render a conversation to tokens.

    Args:
        arguments: variables of the chat template.
        opening: text with which the answer begins.
        name: the field of the request that holds the conversation.

    Raises:
        RequestError: the template refuses the conversation, or ignores tools or calls in it.
    """
    try:
        template = served.template
        assert template is not None
        _check_shown(template, messages, arguments, fields, name)
        tokens = template.encode(messages, arguments, served.characters, opening) or list(served.tokenizer.ends)
    except DataError as error:
        raise RequestError(500, str(error), param=name, code="chat_template") from error
    except ConfigError as error:
        raise fields.wrong(name, f"is not accepted: {error}") from error
    if not tokens:
        raise fields.wrong(name, "are rendered to no tokens by the chat template")
    if max(tokens) >= served.vocabulary:
        raise fields.wrong(name, f"has token {max(tokens)}, but the model has {served.vocabulary} tokens")
    return tokens


def _check_shown(
    template: ChatTemplate,
    messages: Sequence[Message],
    arguments: Mapping[str, Any],
    fields: RequestFields,
    name: str,
) -> None:
    """Refuse tools, calls and results that the chat template leaves out, because the model would not see them."""
    without_calls = [{key: value for key, value in message.items() if key != "tool_calls"} for message in messages]
    without_results = [message for message in messages if message["role"] != "tool"]
    shown: str | None = None
    for what, other, variables in (
        ("tools", messages, {key: value for key, value in arguments.items() if key != "tools"}),
        ("tool calls", without_calls, arguments),
        ("tool results", without_results, arguments),
    ):
        if list(other) == list(messages) and variables == arguments:
            continue
        shown = template.render(messages, arguments) if shown is None else shown
        try:
            ignored = template.render(other, variables) == shown
        except ConfigError:  # the template fails without the tools, so it does not ignore them
            continue
        if ignored:
            raise fields.wrong("tools" if what == "tools" else name, f"the model's chat template ignores {what}")


def _listed(fields: RequestFields, name: str, served: Served) -> list[Any]:
    """The list of messages or items in a field."""
    value = fields.get(name)
    if not isinstance(value, list) or not value:
        raise fields.wrong(name, f"is not a list of at least one {'message' if name == 'messages' else 'item'}")
    if len(value) > served.context:
        raise too_long(served.context, f"{len(value)} messages", name)
    return value


def _calls(message: RequestFields) -> list[Message]:
    """Parse the tool calls of a message of the assistant; their arguments become objects, as templates expect."""
    value = message.get("tool_calls")
    if value is not None and not isinstance(value, list):
        raise message.wrong("tool_calls", "is not a list")
    calls = []
    for number, content in enumerate(value or []):
        call = RequestFields(content, f"{message.where}.tool_calls[{number}]")
        if call.get("type") not in (None, "function"):
            raise call.wrong("type", "is not `function`, the only type of calls that is supported")
        function = RequestFields(call.get("function"), f"{call.where}.function")
        calls.append(_call(call, "id", function))
        call.ignore("index")
        function.ignore("parsed_arguments")
        function.finish()
        call.finish()
    return calls


def _call(call: RequestFields, key: str, function: RequestFields) -> Message:
    """Check a call, and convert it to the form that templates expect.

    Args:
        call: the object whose field `key` is the call's identifier.
        function: the object with the name and the arguments.
    """
    number, name, arguments = call.text(key), function.text("name"), function.text("arguments")
    if not number:
        raise call.wrong(key, "is missing")
    if not name:
        raise function.wrong("name", "is missing")
    spelled = {"name": name, "arguments": (arguments or "").strip() or "{}"}
    (converted,) = read_calls({"tool_calls": [{"id": number, "type": "function", "function": spelled}]}, call.where)
    value = converted["function"]["arguments"]
    if not isinstance(value, dict):
        raise function.wrong("arguments", "is not the JSON text of an object")
    if (problem := find_problem(value)) is not None:
        raise function.wrong("arguments", problem)
    return converted


def _text(fields: RequestFields, name: str, conversation: str) -> str:
    """The text of a field that holds a string or a list of content parts."""
    value = fields.get(name)
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list):
        raise fields.wrong(name, "is neither a text nor a list of parts")
    return "".join(_part(part, fields, name, _PARTS[conversation]) for part in parts)


def _part(part: Any, fields: RequestFields, name: str, kinds: Sequence[str]) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") in kinds else part
    if not isinstance(text, str) or not is_text(text):
        raise fields.wrong(name, "holds a part that is not text")
    return text
