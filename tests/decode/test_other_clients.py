"""OpenAI's client for JavaScript and its library for agents, on a server of a small model."""

import asyncio
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from shoestring.decode.serve.server import serving
from shoestring.decode.serve.settings import Serving
from shoestring.verbs.serve import build_app
from tests.decode.calling_models import calling_server
from tests.decode.taught_caller import conversations, taught

CLIENTS = Path(__file__).parents[1] / "clients"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
ANIMAL = '{"name": "cat", "legs": 4}'
EXAMPLES = {
    "toolsByHand": (
        [CALL, "Yes."],
        {"calls": [["weather", {"city": "Köln"}]], "finish_reason": "tool_calls", "answer": "Yes."},
    ),
    "toolsByRunner": ([CALL, "Yes."], {"asked": ["Köln"], "answer": "Yes."}),
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


needs_javascript = pytest.mark.skipif(
    shutil.which("node") is None or not (CLIENTS / "node_modules").exists(), reason="npm did not install the client"
)


def in_javascript(url, example):
    """What an example of OpenAI's client for JavaScript prints."""
    command = ["node", str(CLIENTS / "openai_client.mjs"), url, example]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@needs_javascript
@pytest.mark.parametrize("example", EXAMPLES)
def test_openais_client_for_javascript_runs_its_examples(server, example):
    server.model.answers, wanted = EXAMPLES[example]
    assert in_javascript(server.url, example) == wanted


def by_agent(url, kind, stream):
    """What an agent of OpenAI's library answers to a question, and the cities that it asked its tool for."""
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
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
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

    return asyncio.run(run()), asked


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["chats", "responses"])
@pytest.mark.parametrize("stream", [False, True])
def test_openais_library_for_agents_calls_tools(server, kind, stream):
    server.model.answers = [CALL, "Yes."]
    assert by_agent(server.url, kind, stream) == ("Yes.", ["Köln"])  # `function_tool` makes strict functions


# -- a model that `finetune` taught to call tools ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def taught_url(tmp_path_factory):
    app = build_app(str(taught(tmp_path_factory.mktemp("taught"))), Serving(port=0, name="small", slots=2))
    with serving(app) as url:
        yield url


@pytest.mark.slow
@needs_javascript
def test_a_taught_model_calls_tools_of_the_client_for_javascript(taught_url):
    calls = {"calls": [["weather", {"city": "Köln"}]], "finish_reason": "tool_calls", "answer": "Yes."}
    assert in_javascript(taught_url, "toolsByHand") == calls
    assert in_javascript(taught_url, "toolsByRunner") == {"asked": ["Köln"], "answer": "Yes."}
    assert in_javascript(taught_url, "streamed")["text"] == "I have no weather."


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["chats", "responses"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_taught_model_calls_tools_of_an_agent(taught_url, kind, stream):
    assert by_agent(taught_url, kind, stream) == ("Yes.", ["Köln"])


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_taught_model_answers_most_questions_of_other_conversations(taught_url, stream):
    openai, right, asked = pytest.importorskip("openai"), 0, 0
    with openai.OpenAI(base_url=f"{taught_url}/v1", api_key="none", max_retries=0) as client:
        for record in conversations(60, seed=7):
            for place, message in enumerate(record["messages"]):
                if message["role"] != "assistant":
                    continue
                tools = {"tools": record["tools"]} if "tools" in record else {}
                body = {"model": "small", "messages": record["messages"][:place], **tools}
                written = answered(client, body, stream)
                wanted = [
                    (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())
                ]
                right, asked = right + (written == (message["content"] or "", wanted)), asked + 1
    assert right / asked > 0.8, f"{right} of {asked}"


def answered(client, body, stream):
    """The text of an answer, and the names and arguments of its calls."""
    if stream:
        with client.chat.completions.stream(**body) as events:
            for _ in events:
                pass
            message = events.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(**body).choices[0].message
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    return message.content or "", calls
