"""Formats of chat records: recognises a record's format by its keys and converts the record to messages.

The keys of each format, and the libraries that use it:

- messages: `messages`, a list of objects with `role` and `content` (OpenAI, transformers).
- sharegpt: `conversations` or `conversation`, a list of objects with `from` and `value`, and optionally `system`
  (LLaMA-Factory, axolotl).
- alpaca: `instruction`, `input`, `output`, `system`, `history` (LLaMA-Factory).
- prompt-completion: `prompt` and `completion`, texts or lists of messages; the prompt is not trained on (TRL).
- text: `text`.
- preference: `chosen` and `rejected`, and also `prompt` unless both begin with the prompt (TRL, LLaMA-Factory).
- rated: `prompt`, `completion` and `label` (TRL's KTO).

Records of all formats may also have `tools`, `documents`, `chat_template_kwargs` and a `weight` of 0 or 1. Lists and
objects may be given as JSON text, as in a cell of a .csv file. A null value is treated as an absent key, because
Parquet and `datasets` write null for absent keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shoestring.core.errors import DataError, nearest
from shoestring.data.chat_messages import (
    Message,
    as_rows,
    as_switch,
    checked_text,
    from_json_text,
    is_masked,
    is_weighted,
    message_of,
    read_arguments,
    read_messages,
    read_side,
    silenced,
    texts_of,
    without_nulls,
)

KEYS = (
    "messages", "conversations", "conversation", "instruction", "input", "output", "system", "history", "prompt",
    "completion", "text", "chosen", "rejected", "label", "tools", "functions", "documents", "chat_template_kwargs",
    "weight", "mask",
)  # fmt: skip
"""Keys that are read from records; other columns of a table are ignored."""


@dataclass(frozen=True)
class ChatRecord:
    """A conversation; a message that is not trained on has a `weight` of 0."""

    format: str
    messages: list[Message]
    arguments: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template besides the messages: tools, documents, and the entries of
    `chat_template_kwargs`."""
    learnt: bool = True
    """False if the record has a weight of 0."""


@dataclass(frozen=True)
class TextRecord:
    """Plain text."""

    text: str
    format: str = "text"


@dataclass(frozen=True)
class PreferencePair:
    """Two answers to the same conversation, of which the first is preferred."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]
    arguments: dict[str, Any] = field(default_factory=dict)
    format: str = "preference"


@dataclass(frozen=True)
class RatedAnswer:
    """An answer that is labelled as desirable or undesirable."""

    prompt: list[Message]
    completion: list[Message]
    desirable: bool
    arguments: dict[str, Any] = field(default_factory=dict)
    format: str = "rated"


Parsed = ChatRecord | TextRecord | PreferencePair | RatedAnswer


def parse_record(record: Mapping[str, Any], name: str, where: str) -> Parsed:
    """Parse a record of any format.

    Args:
        name: the setting `data.field`. If empty, the format is recognised by the keys. Otherwise, `name` is the name of
            the field that holds the messages, or a mapping such as `prompt=question, completion=answer` for keys with
            other names.
        where: the record's place, for error messages.

    Raises:
        DataError: the format is unknown, or a part of the record is invalid.
    """
    if names := field_names(name):
        for other in names.values():
            if other not in record:
                raise DataError(f"{where}: no field {other!r}", hint=f"data.field: {nearest(other, record)}")
        # Of the other fields, only those that all formats share are read.
        common = ("tools", "functions", "documents", "chat_template_kwargs", "weight", "mask", "system")
        record = {key: record[key] for key in common if key in record} | {key: record[n] for key, n in names.items()}
    values = {key: value for key, value in without_nulls(record).items() if value is not None}
    known = format_of(values)
    if not known:
        listed = ", ".join(f"`{key}`" for key in list(values)[:8]) or "none"
        hint = (
            "keys of known formats: `messages`, `conversations`, `instruction` and `output`, `prompt` and `completion`;"
        )
        raise DataError(
            f"{where}: not a known chat format; its keys are {listed}",
            hint=f"{hint} map other keys by data.field, such as prompt=question, completion=answer",
        )
    parsed = _FORMATS[known](values, where)
    for text in texts_of(list(vars(parsed).values())):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"{where}: half a surrogate pair", hint="repair the escape \\u....") from error
    return parsed


def parse_chat(record: Mapping[str, Any], name: str, where: str) -> ChatRecord:
    """Parse a record that must be a conversation with answers.

    Raises:
        DataError: as for `parse_record`, or the record holds plain text or preferences.
    """
    parsed = parse_record(record, name, where)
    if isinstance(parsed, TextRecord):
        raise DataError(f"{where}: plain text, not a chat", hint='set data.form = "text" to train on all of the text')
    if isinstance(parsed, PreferencePair | RatedAnswer):
        what = "a preference pair (`chosen` and `rejected`)" if isinstance(parsed, PreferencePair) else "a rated answer"
        hint = 'chats are learnt from answers alone; name the field of these by data.field, such as "messages"'
        raise DataError(f"{where}: {what}, not a chat", hint=hint)
    return parsed


def format_of(record: Mapping[str, Any]) -> str:
    """Name of a record's format, recognised by its keys; empty if no format fits."""
    keys = {key for key, value in record.items() if value is not None}
    if {"chosen", "rejected"} <= keys:
        return "preference"
    if "label" in keys and ({"prompt", "completion"} <= keys) and as_switch(record["label"]) is not None:
        return "rated"
    for key in ("messages", "conversations", "conversation"):
        if key in keys:
            messages = as_rows(record[key])
            speaks = isinstance(messages, list) and messages and isinstance(messages[0], Mapping)
            return "sharegpt" if speaks and messages[0].get("from") is not None else "messages"
    if {"instruction", "output"} <= keys:
        return "alpaca"
    if {"prompt", "completion"} <= keys:
        return "prompt-completion"
    return "text" if "text" in keys else ""


def field_names(name: str) -> dict[str, str]:
    """Parse the setting `data.field` to a mapping from keys of a format to names of fields in the data.

    Raises:
        DataError: the setting maps an unknown key.
    """
    if "=" not in name:
        return {"messages": name} if name else {}
    names = {key.strip(): other.strip() for key, _, other in (part.partition("=") for part in name.split(","))}
    for key, other in names.items():
        if key not in KEYS or not other:
            raise DataError(f"data.field maps `{key}` to `{other}`", hint=nearest(key, KEYS))
    return names


def columns_of(name: str) -> tuple[str, ...]:
    """Columns of a table that `parse_record` may read, where `name` is the setting `data.field`."""
    return (*KEYS, *field_names(name).values())


# -- formats -----------------------------------------------------------------------------------------------------------


def _from_messages(values: Mapping[str, Any], where: str) -> ChatRecord:
    key = next(key for key in ("messages", "conversations", "conversation") if key in values)
    messages = read_messages(values[key], where, key)
    if values.get("system") and messages[0]["role"] != "system":
        messages.insert(0, message_of("system", values["system"], where, "system"))
    messages = [silenced(message) if is_masked(values, message, where) else message for message in messages]
    return ChatRecord(format_of(values), messages, read_arguments(values, where), is_weighted(values, where))


def _from_alpaca(values: Mapping[str, Any], where: str) -> ChatRecord:
    messages = _alpaca_prompt(values, where)
    messages.append(message_of("assistant", values["output"], where, "output"))
    return ChatRecord("alpaca", messages, read_arguments(values, where), is_weighted(values, where))


def _alpaca_prompt(values: Mapping[str, Any], where: str) -> list[Message]:
    """The messages before the answer; instruction and input are joined by a line break, as LLaMA-Factory does."""
    messages = [message_of("system", values["system"], where, "system")] if values.get("system") else []
    history = from_json_text(values.get("history", []))
    if not isinstance(history, list) or not all(isinstance(turn, list | tuple) and len(turn) == 2 for turn in history):
        raise DataError(f'{where}: "history" is not a list of pairs', hint="a pair is [question, answer]")
    for question, answer in history:
        messages += [message_of("user", question, where, "history"), message_of("assistant", answer, where, "history")]
    parts = [checked_text(values.get(key, ""), where, key) for key in ("instruction", "input")]
    return [*messages, {"role": "user", "content": "\n".join(filter(None, parts))}]


def _from_prompt(values: Mapping[str, Any], where: str) -> ChatRecord:
    system = [message_of("system", values["system"], where, "system")] if values.get("system") else []
    prompt = [silenced(message) for message in read_side(values["prompt"], "user", where, "prompt")]
    completion = read_side(values["completion"], "assistant", where, "completion")
    return ChatRecord(
        "prompt-completion", [*system, *prompt, *completion], read_arguments(values, where), is_weighted(values, where)
    )


def _from_preference(values: Mapping[str, Any], where: str) -> PreferencePair:
    """Parse the two conversations of a preference pair. If `prompt` is absent, the common beginning of the two
    conversations is the prompt (TRL's implicit form)."""
    chosen, rejected = (read_side(values[key], "assistant", where, key) for key in ("chosen", "rejected"))
    if "prompt" in values:
        prompt = read_side(values["prompt"], "user", where, "prompt")
        for key, side in (("chosen", chosen), ("rejected", rejected)):  # some data sets repeat the prompt
            if len(side) > len(prompt) and side[: len(prompt)] == prompt:
                chosen, rejected = (side[len(prompt) :], rejected) if key == "chosen" else (chosen, side[len(prompt) :])
    elif {"messages", "conversations", "conversation"} & values.keys():
        prompt = _from_messages(values, where).messages
    elif "instruction" in values:
        prompt = _alpaca_prompt(values, where)
    else:
        same = next(
            (n for n, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b),
            min(len(chosen), len(rejected)) - 1,
        )
        prompt, chosen, rejected = chosen[:same], chosen[same:], rejected[same:]
    if not (prompt and chosen and rejected):
        hint = "give a `prompt`, or conversations that begin alike"
        raise DataError(f"{where}: a preference pair without a prompt or an answer", hint=hint)
    return PreferencePair(prompt, chosen, rejected, read_arguments(values, where))


def _from_rated(values: Mapping[str, Any], where: str) -> RatedAnswer:
    label = as_switch(values["label"])
    assert label is not None  # `format_of` chooses this format only if the label is valid
    prompt = read_side(values["prompt"], "user", where, "prompt")
    completion = read_side(values["completion"], "assistant", where, "completion")
    return RatedAnswer(prompt, completion, label, read_arguments(values, where))


_FORMATS: dict[str, Callable[[Mapping[str, Any], str], Parsed]] = {
    "messages": _from_messages,
    "sharegpt": _from_messages,
    "alpaca": _from_alpaca,
    "prompt-completion": _from_prompt,
    "text": lambda values, where: TextRecord(checked_text(values["text"], where, "text")),
    "preference": _from_preference,
    "rated": _from_rated,
}
