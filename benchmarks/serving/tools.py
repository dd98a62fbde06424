"""Tools: tiny models that were taught to call them, asked by OpenAI's clients over `shoestring serve`.

Models answer greedily. Functions are not strict, so no grammar keeps a model from a wrong call.
"""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from benchmarks.decode.server import served
from benchmarks.harness import Deadline
from benchmarks.intervals import of_share
from benchmarks.machine import ROOT
from benchmarks.rows import Bar, Measured, NotRun
from benchmarks.serving.clients import EXAMPLES, EXPECTED, Client
from benchmarks.serving.conversations import Conversation, Message
from benchmarks.serving.taught import TEMPLATES, data, teach, teach_to_repeat

CLIENTS = 4
SCRIPT = ROOT / "tests" / "clients" / "openai_client.mjs"
"""Examples of OpenAI's client for JavaScript."""
CITY = {"city": "Köln"}
_TOLD = {"calls": [["weather", CITY]], "answer": "30 °C in Köln."}
_ASKED = {"asked": ["Köln"], "answer": "30 °C in Köln."}
JAVASCRIPT = {
    "toolsByHand": _TOLD | {"finish_reason": "tool_calls"},
    "toolsByRunner": _ASKED,
    "toolsByStreamedRunner": _ASKED,
    "toolsInResponses": _TOLD,
    "toolsInStreamedResponses": _TOLD,
}
"""What its examples print for a taught model."""


class Said(NamedTuple):
    """A message of the assistant."""

    text: str
    calls: list[tuple[str, Any]]
    """Names of functions, with their arguments."""


@dataclass(frozen=True)
class Judged:
    """How the answers in a conversation were."""

    calls: int = 0
    right_calls: int = 0
    right: bool = True
    """Whether all messages of the assistant were right, with their texts and calls."""
    differ: int = 0
    """Answers, streamed or of /v1/responses, that were not those of whole chats."""


@contextmanager
def client_of(folder: Path) -> Iterator[Client]:
    """OpenAI's client, connected to a server of the model in a folder."""
    openai = importlib.import_module("openai")
    with served(folder, "--temperature", "0") as process:
        host, port = process.address
        with openai.OpenAI(base_url=f"http://{host}:{port}/v1", api_key="none", max_retries=0) as client:
            yield client


# -- conversations -----------------------------------------------------------------------------------------------------


def judge(client: Client, model: str, conversation: Conversation) -> Judged:
    """Ask for each message of the assistant, behind the right ones before it, in all four ways."""
    calls = right_calls = differ = 0
    right = True
    for place in conversation.turns:
        whole, *others = _in_all_ways(client, model, conversation.messages[:place], conversation.tools)
        wanted = _said(conversation.messages[place])
        calls += len(wanted.calls)
        if len(whole.calls) == len(wanted.calls):
            right_calls += sum(one == other for one, other in zip(whole.calls, wanted.calls, strict=True))
        right &= whole == wanted
        differ += sum(other != whole for other in others)
    return Judged(calls, right_calls, right, differ)


def _in_all_ways(client: Client, model: str, messages: list[Message], tools: list[Any]) -> list[Said]:
    chat = {"model": model, "messages": messages, "tools": tools}
    flat = [{"type": "function", "strict": False, **tool["function"]} for tool in tools]
    response = {"model": model, "input": _items(messages), "tools": flat}
    with client.chat.completions.stream(**chat) as events:
        streamed = events.get_final_completion()
    with client.responses.stream(**response) as events:
        streamed_response = events.get_final_response()
    whole = client.chat.completions.create(**chat)
    completions = [one.choices[0].message.model_dump() for one in (whole, streamed)]
    responses = [client.responses.create(**response), streamed_response]
    return [*map(_said, completions), *map(_said_in_response, responses)]


def _items(messages: list[Message]) -> list[Any]:
    """The messages of a chat as the items of a response."""
    items = list[Any]()
    for message in messages:
        if message["role"] == "tool":
            number, output = message["tool_call_id"], message["content"]
            items.append({"type": "function_call_output", "call_id": number, "output": output})
            continue
        if message["content"]:
            items.append({"role": message["role"], "content": message["content"]})
        items += [
            {"type": "function_call", "call_id": call["id"], **call["function"]}
            for call in message.get("tool_calls", [])
        ]
    return items


def _said(message: Message) -> Said:
    functions = [call["function"] for call in message.get("tool_calls") or []]
    calls = [(function["name"], json.loads(function["arguments"])) for function in functions]
    return Said(message["content"] or "", calls)


def _said_in_response(response: Any) -> Said:
    calls = [item for item in response.output if item.type == "function_call"]
    return Said(response.output_text, [(call.name, json.loads(call.arguments)) for call in calls])


@cache
def _judged(form: str) -> list[Judged]:
    """All conversations that were held out."""
    with client_of(_taught(form)) as client, ThreadPoolExecutor(CLIENTS) as clients:
        model = client.models.list().data[0].id
        return list(clients.map(lambda one: judge(client, model, one), data()[1]))


@cache
def _home() -> TemporaryDirectory[str]:
    """Folder of the models; removed at the end of the process."""
    return TemporaryDirectory()


@cache
def _repeating() -> Path:
    return teach_to_repeat(Path(_home().name))


@cache
def _taught(form: str) -> Path:
    return teach(form, _repeating() if form == "hermes" else _taught("hermes"), Path(_home().name))


def right(form: str, _: Deadline) -> Measured:
    """Share of the conversations in which all was right."""
    judged = _judged(form)
    calls, right_calls = sum(one.calls for one in judged), sum(one.right_calls for one in judged)
    return of_share(sum(one.right for one in judged), len(judged), f"{right_calls} of {calls} calls are right")


def differ(_: Deadline) -> Measured:
    """Answers that are not those of whole chats."""
    judged = [one for form in TEMPLATES for one in _judged(form)]
    return Measured(sum(one.differ for one in judged), f"in {len(judged)} conversations")


# -- examples ----------------------------------------------------------------------------------------------------------


def failed(client: Client) -> list[str]:
    """The examples that do not end as they should: those in Python, and those in JavaScript."""
    wrong = [name for name, run in EXAMPLES.items() if run(client) != EXPECTED]
    return wrong + [name for name, wanted in JAVASCRIPT.items() if in_javascript(client, name) != wanted]


def in_javascript(client: Client, name: str) -> Any:
    """What an example prints; None if it fails."""
    address, model = str(client.base_url).removesuffix("/v1/"), client.models.list().data[0].id
    done = subprocess.run(["node", str(SCRIPT), address, name, model], capture_output=True, text=True, timeout=60)
    return json.loads(done.stdout) if done.returncode == 0 else None


def examples(_: Deadline) -> Measured | NotRun:
    """Examples that do not end as they should."""
    if find_spec("agents") is None:
        return NotRun("openai-agents is not installed: pip install openai-agents")
    if shutil.which("node") is None or not (SCRIPT.parent / "node_modules").exists():
        return NotRun("OpenAI's client for JavaScript is not installed: npm install --prefix tests/clients")
    wrong = list[str]()
    for form in TEMPLATES:
        with client_of(_taught(form)) as client:
            wrong += [f"{form}: {name}" for name in failed(client)]
    return Measured(len(wrong), f"of {len(TEMPLATES) * (len(EXAMPLES) + len(JAVASCRIPT))}; {', '.join(wrong)}")


def rows() -> Iterator[Bar]:
    """Every bar of tools."""
    peers = ("openai", "openai-agents")
    for form in TEMPLATES:
        what = f"share of 200 held-out conversations whose calls and answers are all right, form {form}"
        yield Bar(f"serving.tools-{form}", what, ">=", 0.9, partial(right, form), kind="drawn", peers=peers)
    what = "answers, streamed or of /v1/responses, that differ from those of whole chats in 200 conversations of a form"
    yield Bar("serving.tools-ways", what, "<=", 0, differ, kind="exact", peers=peers)
    what = "examples with tools of OpenAI's clients for Python and JavaScript, and of its library for agents, that fail"
    yield Bar("serving.tools-clients", what, "<=", 0, examples, kind="exact", peers=peers)
