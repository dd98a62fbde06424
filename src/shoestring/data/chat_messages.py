"""Converts the messages of chat records to the form that templates expect: roles, contents, tool calls, and whether a
message is trained on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shoestring.core.errors import DataError
from shoestring.storage import foreign

Message = dict[str, Any]
_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "model": "assistant", "bing": "assistant", "bard": "assistant", "system": "system", "tool": "tool",
    "observation": "tool", "function_response": "tool", "function_call": "function_call",
}  # fmt: skip
"""Maps ShareGPT's names of speakers, in lower case, to roles."""
_SWITCHES = ("weight", "train", "training", "loss", "mask")
"""Keys of a message that say whether the message is trained on."""


def read_messages(value: Any, where: str, key: str) -> list[Message]:
    """Parse a list of messages; each gets `role` and `content` and keeps its other keys."""
    messages = as_rows(value)
    if not isinstance(messages, list | tuple) or not messages:
        raise DataError(f"{where}: {key!r} is not a list of messages", hint='a message is {"role": …, "content": …}')
    return [_message(message, f"{where}: message {number}") for number, message in enumerate(messages, 1)]


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise DataError(f"{where} is not an object with a role", hint='a message is {"role": "user", "content": "…"}')
    role, content = message.get("role"), message.get("content")
    if role is None and "from" in message:
        role = _ROLES.get(str(message["from"]).lower())
        if role is None:
            raise DataError(f"{where} is from {message['from']!r}", hint=f"known: {', '.join(_ROLES)}")
        content = message.get("value")
    if not isinstance(role, str):
        raise DataError(f"{where} is not an object with a role", hint='a message is {"role": "user", "content": "…"}')
    taken = ("role", "content", "from", "value", "tool_calls", "function_call", *_SWITCHES)
    rest = {key: value for key, value in message.items() if key not in taken}
    calls = read_calls(message, where)
    if role == "function_call":  # ShareGPT's role for a call, or a list of calls, in JSON
        calls = _parsed(content) if isinstance(content, str) else content
        calls = calls if isinstance(calls, list) else [calls]
        if not all(isinstance(call, Mapping) and "name" in call for call in calls):
            hint = 'a call is {"name": …, "arguments": {…}}'
            raise DataError(f"{where} is a function_call that is not a call in JSON", hint=hint)
        calls = [{"type": "function", "function": _with_arguments(call)} for call in calls]
        role, content = "assistant", ""
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if content is not None and not isinstance(content, str):
        raise DataError(f"{where} has content that is not text", hint="images and sound cannot be trained on")
    made = {"role": role, "content": content or "", **rest, **({"tool_calls": calls} if calls else {})}
    if not _is_learnt(message, role, where):
        return silenced(made)
    return made


def read_side(value: Any, role: str, where: str, key: str) -> list[Message]:
    """Parse one side of a record, such as its prompt: a list of messages, a single message, or a text, which becomes a
    message of `role`."""
    if isinstance(value, Mapping):
        value = [value]
    return (
        read_messages(value, where, key) if isinstance(value, list | tuple) else [message_of(role, value, where, key)]
    )


def message_of(role: str, content: Any, where: str, key: str) -> Message:
    return {"role": role, "content": checked_text(content, where, key)}


def silenced(message: Message) -> Message:
    """The message, with a weight of 0 if it is from the assistant, so that it is not trained on."""
    return message | {"weight": 0} if message["role"] == "assistant" else message


def checked_text(value: Any, where: str, key: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: {key!r} is {type(value).__name__}, not text", hint="correct the record")
    return value


def read_calls(message: Mapping[str, Any], where: str) -> list[Any]:
    """Read the tool calls of a message; OpenAI's arguments, which are JSON text, are parsed to the objects that
    templates expect. Arguments that are not the JSON text of an object are left as they are."""
    calls = from_json_text(message.get("tool_calls", []))
    if isinstance(message.get("function_call"), Mapping):  # OpenAI's older key, for a single call
        calls = [{"type": "function", "function": dict(message["function_call"])}]
    if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
        raise DataError(f"{where} has tool calls that are not a list of objects", hint="correct the record")
    return [_with_arguments(call) for call in calls]


def _with_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_arguments(call["function"])}
    arguments = _parsed(call["arguments"]) if isinstance(call.get("arguments"), str) else None
    return {**call, "arguments": arguments} if isinstance(arguments, dict) else dict(call)


# -- what is learnt ----------------------------------------------------------------------------------------------------


def _is_learnt(message: Mapping[str, Any], role: str, where: str) -> bool:
    """Whether a message is trained on, by its own keys such as `weight`."""
    if "train_detail" in message or "training_detail" in message:
        raise DataError(
            f"{where} has a `train_detail`, but answers can only be trained on as a whole",
            hint="split it, or remove it",
        )
    learnt = True
    for key in _SWITCHES:
        if key not in message:
            continue
        switch = as_switch(message[key])
        if switch is None:
            hint = "a weight is 0 or 1; give an answer that counts more several times" if key == "weight" else ""
            raise DataError(f"{where} has a `{key}` of {message[key]!r}, neither 0 nor 1", hint=hint)
        if switch and key in ("train", "training", "loss") and role != "assistant":
            hint = "only messages of the assistant are learnt; remove it"
            raise DataError(f'{where} is of the role "{role}" and has `{key}`', hint=hint)
        learnt = learnt and switch is not (key == "mask")
    return learnt


def is_weighted(values: Mapping[str, Any], where: str) -> bool:
    switch = as_switch(values.get("weight", 1))
    if switch is None:
        hint = "a weight is 0 or 1; give a record that counts more several times"
        raise DataError(f"{where}: a `weight` of {values['weight']!r}, neither 0 nor 1", hint=hint)
    return switch


def is_masked(values: Mapping[str, Any], message: Message, where: str) -> bool:
    """Whether a message is masked by the record's `mask`, which names a speaker."""
    if "mask" not in values:
        return False
    speaker = _ROLES.get(str(values["mask"]).lower())
    if speaker is None:
        raise DataError(f"{where}: a `mask` of {values['mask']!r}", hint=f"known: {', '.join(_ROLES)}")
    return message["role"] == speaker


def as_switch(value: Any) -> bool | None:
    """Convert true, false, 1 or 0 to a bool, whether it is a value or its text (as in a .csv file); None for anything
    else."""
    if isinstance(value, str):
        value = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}.get(value.lower())
    return bool(value) if isinstance(value, bool | int | float) and value in (0, 1) else None


# -- parts of records --------------------------------------------------------------------------------------------------


def read_arguments(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Read the variables of the chat template other than the messages."""
    arguments: dict[str, Any] = {}
    for key in ("tools", "documents"):
        if value := from_json_text(values.get(key)):
            if not isinstance(value, list):
                raise DataError(f"{where}: {key!r} is not a list", hint="correct the record, or leave it out")
            arguments[key] = [from_json_text(entry) for entry in value]
    if functions := from_json_text(values.get("functions")):  # OpenAI's older key for tools
        arguments.setdefault("tools", [{"type": "function", "function": function} for function in functions])
    more = from_json_text(values.get("chat_template_kwargs")) or {}
    if not isinstance(more, Mapping):
        raise DataError(f'{where}: "chat_template_kwargs" is not an object', hint="correct the record, or leave it out")
    return arguments | dict(more)


def from_json_text(value: Any) -> Any:
    """Parse a text that is JSON of a list or an object; any other value is returned unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        parsed = _parsed(value)
        return value if parsed is None else without_nulls(parsed)
    return value


def as_rows(value: Any) -> Any:
    """Convert a value to a list of objects; it may be JSON text, or a dict of columns, to which `datasets` may convert
    such a list."""
    value = from_json_text(value)
    columns = list(value.values()) if isinstance(value, Mapping) else []
    if not columns or not all(isinstance(column, list) and len(column) == len(columns[0]) for column in columns):
        return value
    return [without_nulls(dict(zip(value, row, strict=True))) for row in zip(*columns, strict=True)]


def _parsed(text: str) -> Any:
    try:
        return foreign.parse_json(text)
    except ValueError:
        return None


def without_nulls(value: Any) -> Any:
    """Remove the keys with a null value from all objects in a nested value."""
    if isinstance(value, Mapping):
        return {key: without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [without_nulls(entry) for entry in value] if isinstance(value, list | tuple) else value


def texts_of(value: Any) -> Iterator[str]:
    """Iterate over every text in a nested value, including the keys of objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from texts_of([*value, *value.values()])
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from texts_of(entry)
