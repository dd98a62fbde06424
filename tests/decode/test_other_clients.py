"""OpenAI's client for JavaScript and its library for agents, on a server of a small model."""

import asyncio
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.decode.calling_models import calling_server

CLIENTS = Path(__file__).parents[1] / "clients"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
ANIMAL = '{"name": "cat", "legs": 4}'
EXAMPLES = {
    "toolsByHand": (
        [CALL, "Yes."],
        {"calls": [["weather", {"city": "Köln"}]], "finish_reason": "tool_calls", "answer": "Yes."},
    ),
    **dict.fromkeys(
        ["toolsByRunner", "toolsByStreamedRunner"], ([CALL, "Yes."], {"asked": ["Köln"], "answer": "Yes."})
    ),
    **dict.fromkeys(
        ["toolsInResponses", "toolsInStreamedResponses"],
        ([CALL, "Yes."], {"calls": [["weather", {"city": "Köln"}]], "answer": "Yes."}),
    ),
    "streamed": (["Yes, it's hot."], {"text": "Yes, it's hot.", "usages": [True]}),
    "parsed": ([ANIMAL], {"name": "cat", "legs": 4}),
    "responses": (["Yes."], {"whole": "Yes.", "text": "Yes.", "last": "response.completed"}),
    "refused": (["Yes."], {"bad": True, "status": 400, "param": "temperature"}),
    "left": (["A longer text, which nobody reads to its end."], True),
}


@pytest.fixture(scope="module")
def server():
    with calling_server("hermes", slots=2) as one:
        yield one


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("node") is None or not (CLIENTS / "node_modules").exists(), reason="npm did not install the client"
)
@pytest.mark.parametrize("example", EXAMPLES)
def test_openais_client_for_javascript_runs_its_examples(server, example):
    server.model.answers, wanted = EXAMPLES[example]
    command = ["node", str(CLIENTS / "openai_client.mjs"), server.url, example]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["chats", "responses"])
@pytest.mark.parametrize("stream", [False, True])
def test_openais_library_for_agents_calls_tools(server, kind, stream):
    agents = pytest.importorskip("agents")
    openai = pytest.importorskip("openai")
    agents.set_tracing_disabled(True)
    asked = []

    @agents.function_tool
    def weather(city: str) -> str:
        """The weather of a city."""
        asked.append(city)
        return f"30 °C in {city}"

    async def run():
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        model = {"chats": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}[kind]
        agent = agents.Agent(
            name="small", instructions="Be brief.", tools=[weather], model=model(model="small", openai_client=client)
        )
        async with client:
            if not stream:
                return (await agents.Runner.run(agent, "Hot in Köln?")).final_output
            result = agents.Runner.run_streamed(agent, "Hot in Köln?")
            async for _ in result.stream_events():
                pass
            return result.final_output

    server.model.answers = [CALL, "Yes."]
    assert asyncio.run(run()) == "Yes."
    assert asked == ["Köln"]  # `function_tool` makes strict functions
