"""Generated conversations with tools, in the messages of OpenAI's API.

A user asks for up to three things in a message. Where tools for them are offered, the assistant calls them, in parallel
if there are several, is told the results and repeats them; small talk it answers, and what no offered tool does it
declines. So the right answer to each message is known, and depends on the tools that are offered. Arguments are of all
types of JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any, NamedTuple

Message = dict[str, Any]

_CITIES = ("Köln", "Rome", "Oslo", "Lima", "Cairo", "Zürich", "Delhi", "Kyoto", "Perth", "New York", "Cape Town")
_ROOMS = ("kitchen", "hall", "office", "attic", "bath", "garage")
_GOODS = ("tea", "rice", "salt", "bread", "milk", "soap", "figs", "nuts")
_STREETS = ("Lake", "Hill", "Mill", "Park", "Main", "River")
_WORDS = ("call", "water", "plants", "mother", "feed", "cat", "pay", "rent", "bake", "cake")
_CURRENCIES = ("EUR", "USD", "JPY", "CHF")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
SMALL_TALK = {
    "Hello!": "Hello! What can I do?",
    "Who are you?": "I am a small model with tools.",
    "Thank you.": "You are welcome.",
    "What is a tool?": "A function that I can call.",
}
DECLINED = "I have no tool for that."


class Task(NamedTuple):
    """What a user asks for, the arguments of the call that does it, and its result."""

    sentence: str
    arguments: dict[str, Any]
    result: str


@dataclass(frozen=True)
class Tool:
    """A function, and tasks for it."""

    description: str
    properties: Mapping[str, Mapping[str, Any]]
    """Schemas of the parameters, all of which are required."""
    draw: Callable[[Random], Task]


def _weather(draw: Random) -> Task:
    city = draw.choice(_CITIES)
    return Task(f"What is the weather in {city}?", {"city": city}, f"{draw.randint(-9, 39)} °C in {city}")


def _convert(draw: Random) -> Task:
    amount, currency = draw.randint(11, 299) / 10, draw.choice(_CURRENCIES)
    result = f"{draw.randint(1, 99)} {currency}"
    return Task(f"Convert {amount} to {currency}.", {"amount": amount, "currency": currency}, result)


def _remind(draw: Random) -> Task:
    text, minutes = " ".join(draw.sample(_WORDS, draw.randint(1, 3))), draw.randint(1, 99)
    result = f"reminder {draw.randint(1, 99)}"
    return Task(f"Remind me in {minutes} minutes to {text}.", {"text": text, "minutes": minutes}, result)


def _light(draw: Random) -> Task:
    room, on = draw.choice(_ROOMS), draw.random() < 0.5
    state = "on" if on else "off"
    return Task(f"Switch {state} the light in the {room}.", {"room": room, "on": on}, f"{room} {state}")


def _order(draw: Random) -> Task:
    goods, street, number = draw.sample(_GOODS, draw.randint(1, 3)), draw.choice(_STREETS), draw.randint(1, 99)
    arguments = {"items": goods, "address": {"street": street, "number": number}}
    return Task(f"Order {', '.join(goods)} to {number} {street} Street.", arguments, f"order {draw.randint(10, 99)}")


def _search(draw: Random) -> Task:
    code = f"{draw.choice(_LETTERS)}{draw.randint(10, 99)}"
    limit = draw.choice((None, draw.randint(2, 50)))
    wanted = f"all parts {code}" if limit is None else f"{limit} parts {code}"
    return Task(f"Search {wanted}.", {"code": code, "limit": limit}, f"{draw.randint(0, 60)} parts {code}")


_STRING, _INTEGER = {"type": "string"}, {"type": "integer"}
_ADDRESS = {
    "type": "object",
    "properties": {"street": _STRING, "number": _INTEGER},
    "required": ["street", "number"],
    "additionalProperties": False,
}
TOOLS: Mapping[str, Tool] = {
    "weather": Tool("The weather in a city.", {"city": _STRING}, _weather),
    "convert": Tool("Converts money.", {"amount": {"type": "number"}, "currency": _STRING}, _convert),
    "remind": Tool("Reminds the user.", {"text": _STRING, "minutes": _INTEGER}, _remind),
    "light": Tool("Switches a light.", {"room": _STRING, "on": {"type": "boolean"}}, _light),
    "order": Tool("Orders goods.", {"items": {"type": "array", "items": _STRING}, "address": _ADDRESS}, _order),
    "search": Tool("Searches parts.", {"code": _STRING, "limit": {"anyOf": [_INTEGER, {"type": "null"}]}}, _search),
}
"""The tools by name."""


def definition(name: str, strict: bool = False) -> dict[str, Any]:
    """The definition of a tool as OpenAI's API takes it."""
    tool = TOOLS[name]
    parameters = {"type": "object", "properties": tool.properties, "required": list(tool.properties)}
    function = {"name": name, "description": tool.description, "strict": strict}
    return {"type": "function", "function": function | {"parameters": parameters | {"additionalProperties": False}}}


@dataclass(frozen=True)
class Conversation:
    """Messages, the last of which is the assistant's, and the tools that are offered."""

    messages: list[Message]
    tools: list[dict[str, Any]]

    @property
    def turns(self) -> list[int]:
        """The places of the assistant's messages."""
        return [place for place, message in enumerate(self.messages) if message["role"] == "assistant"]

    @property
    def line(self) -> str:
        """The record as a line of a training file."""
        return json.dumps({"messages": self.messages, "tools": self.tools}, ensure_ascii=False) + "\n"


def conversation(draw: Random) -> Conversation:
    """Draw a conversation of one or two questions."""
    offered = draw.sample(list(TOOLS), draw.randint(1, 3))
    messages: list[Message] = [{"role": "system", "content": "Be brief."}] if draw.random() < 0.5 else []
    ids = (f"call{number:05}" for number in count())
    for _ in range(draw.choice((1, 1, 1, 2))):
        messages += _question(offered, ids, draw)
    return Conversation(messages, [definition(name) for name in offered])


def _question(offered: list[str], ids: Iterator[str], draw: Random) -> list[Message]:
    """A message of the user, and all that follows until the assistant has answered it."""
    kind = draw.random()
    if kind < 0.05:
        return _plain(*draw.choice(list(SMALL_TALK.items())))
    if kind < 0.12:
        return _repeated(draw)
    if kind < 0.3:
        other = draw.choice([name for name in TOOLS if name not in offered])
        return _plain(TOOLS[other].draw(draw).sentence, DECLINED)
    names = draw.choices(offered, k=draw.choice((1, 1, 1, 1, 2, 3)))
    tasks = [TOOLS[name].draw(draw) for name in names]
    calls = [
        {"id": next(ids), "type": "function", "function": {"name": name, "arguments": _json(task.arguments)}}
        for name, task in zip(names, tasks, strict=True)
    ]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": task.result}
        for call, task in zip(calls, tasks, strict=True)
    ]
    return [
        {"role": "user", "content": " ".join(task.sentence for task in tasks)},
        {"role": "assistant", "content": "", "tool_calls": calls},
        *results,
        {"role": "assistant", "content": answer_to([task.result for task in tasks])},
    ]


def _repeated(draw: Random, most: int = 5) -> list[Message]:
    """Up to `most` words that the user wants to be repeated."""
    known = (_CITIES, _ROOMS, _GOODS, _STREETS, _WORDS, _CURRENCIES, _LETTERS)
    words = (draw.choice((*map(draw.choice, known), str(draw.randint(0, 99)))) for _ in range(draw.randint(2, most)))
    text = draw.choice((" ", ", ", "; ")).join(words)
    return _plain(f"Repeat: {text}", text)


def _plain(sentence: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": sentence}, {"role": "assistant", "content": answer}]


def answer_to(results: list[str]) -> str:
    """The assistant's answer once it has been told the results of its calls."""
    return "; ".join(results) + "."


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def repetition(draw: Random) -> Conversation:
    """Draw a conversation without tools, in which the assistant repeats what the user has said."""
    return Conversation(_repeated(draw, most=9), [])


def conversations(
    number: int,
    seed: int,
    draw_one: Callable[[Random], Conversation] = conversation,
    without: frozenset[str] = frozenset(),
) -> list[Conversation]:
    """Draw unlike conversations, none of whose lines is in `without`."""
    draw, drawn = Random(f"conversations {seed}"), dict[str, Conversation]()
    while len(drawn) < number:
        one = draw_one(draw)
        if one.line not in without:
            drawn.setdefault(one.line, one)
    return list(drawn.values())
