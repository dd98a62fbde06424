"""Examples of clients that call tools: OpenAI's client for Python, and its library for agents.

Each gives the same instructions, asks one question, runs the functions that the model calls, and returns their calls
with the model's answer. They are written as the guides of these libraries show.
"""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from benchmarks.serving.conversations import definition

Client = Any
"""`openai.OpenAI`."""
QUESTION = "What is the weather in Köln? Switch on the light in the hall."
INSTRUCTIONS = "Be brief."
NAMES = ("weather", "light")


class Outcome(NamedTuple):
    """What a client saw."""

    calls: list[tuple[str, dict[str, Any]]]
    """The functions that were called, with their arguments."""
    answer: str


EXPECTED = Outcome([("weather", {"city": "Köln"}), ("light", {"room": "hall", "on": True})], "30 °C in Köln; hall on.")


def weather(city: str) -> str:
    """The weather in a city."""
    return f"30 °C in {city}"


def light(room: str, on: bool) -> str:
    """Switches a light."""
    return f"{room} {'on' if on else 'off'}"


_FUNCTIONS: Mapping[str, Callable[..., str]] = {"weather": weather, "light": light}


def in_chats(client: Client, stream: bool = False) -> Outcome:
    """The loop of chat completions."""
    messages: list[Any] = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": QUESTION}]
    asked = {"model": client.models.list().data[0].id, "tools": [definition(name, strict=True) for name in NAMES]}
    called = []
    while True:
        message = _message(client, stream, **asked, messages=messages)
        messages.append(message)
        if not message.tool_calls:
            return Outcome(called, message.content)
        for call in message.tool_calls:
            arguments = json.loads(call.function.arguments)
            called.append((call.function.name, arguments))
            result = _FUNCTIONS[call.function.name](**arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def _message(client: Client, stream: bool, **asked: Any) -> Any:
    if not stream:
        return client.chat.completions.create(**asked).choices[0].message
    with client.chat.completions.stream(**asked) as events:
        return events.get_final_completion().choices[0].message


def in_responses(client: Client, stream: bool = False) -> Outcome:
    """The loop of responses."""
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    tools = [{"type": "function", **definition(name, strict=True)["function"]} for name in NAMES]
    asked = {"model": client.models.list().data[0].id, "tools": tools, "instructions": INSTRUCTIONS}
    called = []
    while True:
        response = _response(client, stream, **asked, input=items)
        items += response.output
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return Outcome(called, response.output_text)
        for call in calls:
            arguments = json.loads(call.arguments)
            called.append((call.name, arguments))
            result = _FUNCTIONS[call.name](**arguments)
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})


def _response(client: Client, stream: bool, **asked: Any) -> Any:
    if not stream:
        return client.responses.create(**asked)
    with client.responses.stream(**asked) as events:
        return events.get_final_response()


def by_agent(client: Client, kind: str, stream: bool = False) -> Outcome:
    """An agent of `openai-agents`.

    Args:
        kind: `ChatCompletions` or `Responses`.
    """
    agents, openai = importlib.import_module("agents"), importlib.import_module("openai")
    agents.set_tracing_disabled(True)
    name, called = client.models.list().data[0].id, list[tuple[str, dict[str, Any]]]()

    @agents.function_tool(name_override="weather")
    def of_a_city(city: str) -> str:
        """The weather in a city."""
        called.append(("weather", {"city": city}))
        return weather(city)

    @agents.function_tool(name_override="light")
    def of_a_room(room: str, on: bool) -> str:
        """Switches a light."""
        called.append(("light", {"room": room, "on": on}))
        return light(room, on)

    async def run() -> str:
        asynchronous = openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key, max_retries=0)
        model = getattr(agents, f"OpenAI{kind}Model")(model=name, openai_client=asynchronous)
        agent = agents.Agent(name="small", instructions=INSTRUCTIONS, tools=[of_a_city, of_a_room], model=model)
        async with asynchronous:
            if not stream:
                return (await agents.Runner.run(agent, QUESTION)).final_output
            result = agents.Runner.run_streamed(agent, QUESTION)
            async for _ in result.stream_events():
                pass
            return result.final_output

    return Outcome(called, asyncio.run(run()))


_CLIENTS: Mapping[str, Callable[..., Outcome]] = {
    "chats": in_chats,
    "responses": in_responses,
    "an agent's chats": partial(by_agent, kind="ChatCompletions"),
    "an agent's responses": partial(by_agent, kind="Responses"),
}
EXAMPLES: Mapping[str, Callable[[Client], Outcome]] = {
    name + (", streamed" if stream else ""): partial(run, stream=stream)
    for name, run in _CLIENTS.items()
    for stream in (False, True)
}
"""Examples by what they do."""
