"""The server, asked by OpenAI's own client: it gets what `generate` writes, in the forms that it knows."""

import json
import math
import re

import openai
import pytest
import torch

from tests.decode.small_server import running

PROMPT = "def f(x):"


@pytest.fixture(scope="module")
def server():
    with running() as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat_prompt(text):
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def special(server, rendered):
    """Tokens of text in which special tokens are spelled out."""
    parts = re.split(r"(<\|im_start\|>|<\|im_end\|>)", rendered)
    ids = {name: server.tokenizer.engine.token_to_id(name) for name in ("<|im_start|>", "<|im_end|>")}
    return [token for part in parts for token in ([ids[part]] if part in ids else server.tokenizer.encode(part))]


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9}, {}])
def test_a_completion_is_what_generate_writes_with_the_same_seed_also_when_it_streams(server, client, sampling):
    asked = {"model": "small", "prompt": PROMPT, "max_tokens": 40, "seed": 5, **sampling}
    wanted = server.generated(PROMPT, 40, seed=5, **sampling)
    whole = client.completions.create(**asked)
    assert whole.choices[0].text == wanted
    assert whole.choices[0].finish_reason == "length"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (9, 40, 49)
    pieces = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(piece.choices[0].text for piece in pieces[:-1]) == wanted
    assert [piece.choices[0].finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 2) + ["length"]
    assert (pieces[-1].choices, pieces[-1].usage.completion_tokens) == ([], 40)
    assert len({piece.id for piece in pieces}) == 1
    assert len(pieces) > 5


def test_several_prompts_and_several_texts_of_each_are_numbered_and_have_seeds_of_their_own(server, client):
    prompts = ["one", [*b"two"], "three"]
    answer = client.completions.create(model="small", prompt="one", max_tokens=8, n=2, seed=3)
    assert [choice.text for choice in answer.choices] == [server.generated("one", 8, seed=seed) for seed in (3, 4)]
    answer = server.http.post("/v1/completions", json={"prompt": ["one", "three"], "n": 2, "max_tokens": 8, "seed": 3})
    texts = [server.generated(prompt, 8, seed=seed) for prompt in ("one", "three") for seed in (3, 4)]
    assert [choice["text"] for choice in answer.json()["choices"]] == texts
    assert answer.json()["usage"] == answer.json()["usage"] | {"prompt_tokens": 8, "completion_tokens": 32}
    as_tokens = [list(prompt.encode()) if isinstance(prompt, str) else prompt for prompt in prompts]
    answer = client.completions.create(model="small", prompt=as_tokens, max_tokens=8, seed=3)
    assert [choice.text for choice in answer.choices] == [
        server.generated(prompt, 8, seed=3) for prompt in ("one", "two", "three")
    ]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]


def test_without_a_seed_texts_differ(client):
    texts = {client.completions.create(model="small", prompt="a", max_tokens=12).choices[0].text for _ in range(3)}
    assert len(texts) == 3


def test_logprobs_of_prompt_and_text_are_the_models(server, client):
    answer = client.completions.create(model="small", prompt="abc", max_tokens=6, seed=1, logprobs=3, echo=True)
    (choice,) = answer.choices
    found = choice.logprobs
    assert choice.text == "abc" + server.generated("abc", 6, seed=1)
    names = [bytes(name, "latin1").decode("unicode_escape")[6:] if "bytes:" in name else name for name in found.tokens]
    tokens = [*"".join(names).encode("latin1")]
    assert tokens[:3] == [*b"abc"]
    expected = server.model(torch.tensor([tokens]))[0].log_softmax(-1).detach()
    assert found.token_logprobs[0] is None
    assert found.top_logprobs[0] is None
    for position, (value, top) in enumerate(zip(found.token_logprobs[1:], found.top_logprobs[1:], strict=True)):
        assert value == pytest.approx(float(expected[position, tokens[position + 1]]), abs=1e-9)
        best = expected[position].topk(3).values.tolist()
        assert sorted(top.values(), reverse=True)[:3] == pytest.approx(best)
        assert value in top.values()
    assert found.text_offset[:4] == [0, 1, 2, 3]
    only = client.completions.create(model="small", prompt="abc", max_tokens=0, logprobs=0, echo=True)
    assert only.choices[0].text == "abc"
    assert only.choices[0].logprobs.token_logprobs == found.token_logprobs[:3]
    assert only.usage.completion_tokens == 0


@pytest.mark.slow
def test_a_chat_uses_the_models_template_and_streams_the_same(server, client):
    asked = {"model": "small", "messages": [{"role": "user", "content": "hi"}], "seed": 2, "max_tokens": 30}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    tokens = special(server, chat_prompt("hi"))
    by_tokens = client.completions.create(model="small", prompt=tokens, max_tokens=30, seed=2)
    message = whole.choices[0].message
    assert (message.role, message.content) == ("assistant", by_tokens.choices[0].text)
    assert whole.usage.prompt_tokens == len(tokens)
    entries = whole.choices[0].logprobs.content
    assert len(entries) == 30
    assert bytes(byte for entry in entries for byte in entry.bytes).decode(errors="replace") == message.content
    assert all(len(entry.top_logprobs) == 2 and entry.top_logprobs[0].logprob >= entry.logprob for entry in entries)
    pieces = list(client.chat.completions.create(**asked, stream=True, logprobs=True))
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == message.content
    streamed = [
        entry for piece in pieces for entry in (piece.choices[0].logprobs.content if piece.choices[0].logprobs else [])
    ]
    # The cache may hold a part of the prompt by now, and sums of another order differ in the last bits.
    assert [entry.logprob for entry in streamed] == pytest.approx([entry.logprob for entry in entries], abs=1e-9)
    newer = {"model": "small", "messages": asked["messages"], "seed": 2, "max_completion_tokens": 30}
    parts = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]
    for other in (newer, asked | {"messages": parts}):
        assert client.chat.completions.create(**other).choices[0].message.content == message.content


def test_a_text_ends_with_the_context(server, client):
    answer = client.completions.create(model="small", prompt="a" * 240, max_tokens=100, seed=1)
    assert answer.choices[0].text == server.generated("a" * 240, 16, seed=1)
    assert answer.choices[0].finish_reason == "length"


def test_a_chat_without_a_limit_ends_with_the_context(client):
    answer = client.chat.completions.create(model="small", messages=[{"role": "user", "content": "a" * 180}], seed=1)
    assert answer.usage.total_tokens == 256 or answer.choices[0].finish_reason == "stop"


def test_the_end_of_text_ends_a_text_and_is_not_part_of_it(server, client):
    for seed in range(200):
        answer = client.completions.create(model="small", prompt="a", max_tokens=60, seed=seed)
        if answer.choices[0].finish_reason == "stop":
            break
    assert answer.usage.completion_tokens < 60
    assert "<|im_end|>" not in answer.choices[0].text
    assert answer.choices[0].text == server.generated("a", 60, seed=seed)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_nothing_of_a_stop_string_is_sent(server, client, length, stream):
    text = server.generated(PROMPT, 60, seed=11)
    stop = text[20 : 20 + length]
    asked = {"model": "small", "prompt": PROMPT, "max_tokens": 60, "seed": 11, "stop": ["never this", stop]}
    answer = client.completions.create(**asked, stream=stream, logprobs=1)
    choices = [piece.choices[0] for piece in answer] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == text[: text.index(stop)]
    assert choices[-1].finish_reason == "stop"
    shown = [offset for choice in choices if choice.logprobs for offset in choice.logprobs.text_offset]
    assert all(offset < text.index(stop) for offset in shown)
    if not stream:
        assert answer.usage.completion_tokens < 60


def test_a_text_that_has_stopped_is_not_generated_further(server, client):
    texts = [server.generated(PROMPT, 120, seed=seed) for seed in (11, 12)]
    stop = next(texts[0][at : at + 3] for at in range(20) if texts[0][at : at + 3] not in texts[1])
    counts = server.app.worker.engine.counts
    before = counts.generated
    answer = client.completions.create(model="small", prompt=PROMPT, max_tokens=120, seed=11, n=2, stop=stop)
    assert [choice.text for choice in answer.choices] == [texts[0][: texts[0].index(stop)], texts[1]]
    assert counts.generated - before < 200


def test_models_are_listed(server, client):
    assert [model.id for model in client.models.list()] == ["small"]
    assert client.models.retrieve("small").owned_by == "shoestring"
    with pytest.raises(openai.NotFoundError, match="this server has `small`"):
        client.models.retrieve("gpt-4")


MESSAGES = {"messages": [{"role": "user", "content": "a"}]}
WRONG = {
    "another model": ({"model": "gpt-4", "prompt": "a"}, 404, "model"),
    "unknown field": ({"prompt": "a", "temprature": 1}, 400, "temprature"),
    "number as text": ({"prompt": "a", "temperature": "1"}, 400, "temperature"),
    "true as a number": ({"prompt": "a", "max_tokens": True}, 400, "max_tokens"),
    "negative": ({"prompt": "a", "max_tokens": -1}, 400, "max_tokens"),
    "no room in the context": ({"prompt": "a" * 256, "max_tokens": 1}, 400, "prompt"),
    "a prompt beyond the context": ({"prompt": "a" * 300, "max_tokens": 0}, 400, "prompt"),
    "a conversation beyond the context": ({"messages": [{"role": "user", "content": "a" * 300}]}, 400, "messages"),
    "more than the server gives": ({"prompt": "a", "max_tokens": 1000}, 400, "max_tokens"),
    "too many texts": ({"prompt": "a", "n": 129}, 400, "n"),
    "more texts than can wait": ({"prompt": ["a"] * 100, "n": 3}, 400, "n"),
    "best of several": ({"prompt": "a", "best_of": 3}, 400, "best_of"),
    "insertion": ({"prompt": "a", "suffix": "b"}, 400, "suffix"),
    "bias": ({"prompt": "a", "logit_bias": {"1": 500}}, 400, "logit_bias.1"),
    "penalty": ({"prompt": "a", "presence_penalty": 5}, 400, "presence_penalty"),
    "an object as prompt": ({"prompt": {"a": 1}}, 400, "prompt"),
    "no prompts": ({"prompt": []}, 400, "prompt"),
    "an unknown token": ({"prompt": [1, 259]}, 400, "prompt"),
    "a negative token": ({"prompt": [-1]}, 400, "prompt"),
    "text and tokens mixed": ({"prompt": [1, "a"]}, 400, "prompt"),
    "half a surrogate pair": ({"prompt": "\ud800"}, 400, "prompt"),
    "an empty stop string": ({"prompt": "a", "stop": ["b", ""]}, 400, "stop"),
    "too many stop strings": ({"prompt": "a", "stop": ["b"] * 17}, 400, "stop"),
    "stream options alone": ({"prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream_options"),
    "unknown stream option": ({"prompt": "a", "stream": True, "stream_options": {"x": 1}}, 400, "stream_options.x"),
    "no messages": ({"messages": []}, 400, "messages"),
    "unknown role": ({"messages": [{"role": "critic", "content": "a"}]}, 400, "messages[0].role"),
    "an image": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0].content"),
    "no content": ({"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    "tools that the template ignores": (
        MESSAGES | {"tools": [{"type": "function", "function": {"name": "f"}}]},
        400,
        "tools",
    ),
    "format": (MESSAGES | {"response_format": {"type": "xml"}}, 400, "response_format.type"),
    "top without logprobs": (MESSAGES | {"top_logprobs": 2}, 400, "top_logprobs"),
    "no tokens": (MESSAGES | {"max_tokens": 0}, 400, "max_tokens"),
    "drafts and stop": ({"prompt": "a", "stream": True, "draft_tokens": True, "stop": "b"}, 400, "draft_tokens"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named(server, case):
    asked, status, param = WRONG[case]
    answer = server.http.post(
        "/v1/chat/completions" if "messages" in asked else "/v1/completions",
        content=json.dumps(asked),
        headers={"Content-Type": "application/json"},
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    assert answer.json()["error"]["message"]


NEUTRAL = {
    "user": "me",
    "frequency_penalty": 0,
    "presence_penalty": 0.0,
    "logit_bias": {},
    "store": False,
    "service_tier": "auto",
    "stop": None,
    "top_k": -1,
}


def test_fields_that_change_nothing_are_accepted(server):
    plain = {"prompt": "a", "max_tokens": 5, "seed": 1}
    texts = [
        server.http.post("/v1/completions", json=asked).json()["choices"][0]["text"]
        for asked in (plain, plain | NEUTRAL)
    ]
    assert texts[0] == texts[1]
    quiet = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "n": 1, "max_tokens": 2}
    assert server.http.post("/v1/chat/completions", json=MESSAGES | quiet).status_code == 200


def test_extensions_reach_the_sampler(server):
    asked = {"prompt": PROMPT, "max_tokens": 20, "seed": 1}
    for extra in ({"top_k": 5}, {"min_p": 0.3}, {"repetition_penalty": 1.7}):
        answer = server.http.post("/v1/completions", json=asked | extra).json()
        assert answer["choices"][0]["text"] == server.generated(PROMPT, 20, seed=1, **extra)
    negative = server.http.post("/v1/completions", json=asked | {"seed": -1}).json()
    assert negative["choices"][0]["text"] == server.generated(PROMPT, 20, seed=2**63 - 1)


def test_a_model_without_a_template_has_no_chat():
    with running(template=None, slots=1) as server:
        answer = server.http.post("/v1/chat/completions", json=MESSAGES)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_chat_template")


def test_logits_that_are_not_finite_are_an_error_and_the_server_goes_on():
    with running(slots=1) as server:
        norm = server.model.norm.weight
        kept = norm.detach().clone()
        with torch.no_grad():
            norm.fill_(math.nan)
        answer = server.http.post("/v1/completions", json={"prompt": "a"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "not_finite")
        stream = server.http.post("/v1/completions", json={"prompt": "a", "stream": True})
        events = [json.loads(line[6:]) for line in stream.text.split("\n\n") if line]
        assert [event["error"]["code"] for event in events] == ["not_finite"]
        with torch.no_grad():
            norm.copy_(kept)
        assert server.http.post("/v1/completions", json={"prompt": "a"}).status_code == 200


def test_a_token_that_is_ruled_out_has_a_finite_logprob():
    with running(slots=1) as server:
        adapter = server.app.worker.engine.model
        logits = adapter.logits
        adapter.logits = lambda *given: logits(*given).index_fill(-1, torch.tensor([98]), -math.inf)  # "b"
        asked = {"prompt": "abc", "max_tokens": 2, "logprobs": 20, "echo": True}
        answer = server.http.post("/v1/completions", json=asked).json()
        assert answer["choices"][0]["logprobs"]["token_logprobs"][1] == -9999.0
        asked = MESSAGES | {"max_tokens": 1, "logprobs": True, "top_logprobs": 20}
        assert server.http.post("/v1/chat/completions", json=asked).status_code == 200


def test_a_pass_that_raises_fails_its_texts_alone(caplog):
    with running(slots=2) as server:
        blocks = server.model.blocks
        server.model.blocks = None
        answer = server.http.post("/v1/completions", json={"prompt": ["a", "b"]})
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "failed")
        server.model.blocks = blocks
        assert server.http.post("/v1/completions", json={"prompt": "a"}).status_code == 200
        assert "shoestring_failed_passes_total 1" in server.http.get("/metrics").text
    assert "a pass of the model failed" in caplog.text


def test_drafts_change_no_text_and_are_told_to_those_who_ask():
    prompt = "the the the the"
    with running(slots=2, draft_length=3) as server:
        asked = {"prompt": prompt, "max_tokens": 60, "temperature": 0.0, "stream": True, "draft_tokens": True}
        answer = server.http.post("/v1/completions", json=asked)
        events = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
        choices = [event["choices"][0] for event in events]
        assert "".join(choice["text"] for choice in choices) == server.generated(prompt, 60, temperature=0.0)
        drafts = [choice["draft"] for choice in choices if "draft" in choice]
        assert sum(draft["accepted"] for draft in drafts) > 0
        assert any(draft["accepted"] < len(draft["tokens"]) for draft in drafts)
        lines = dict(line.rsplit(" ", 1) for line in server.http.get("/metrics").text.splitlines() if line[0] != "#")
        assert int(lines["shoestring_drafts_total"]) == len(drafts)
        assert int(lines["shoestring_drafted_tokens_total"]) == sum(len(draft["tokens"]) for draft in drafts)
        accepted = int(lines["shoestring_accepted_tokens_total"])
        assert float(lines["shoestring_acceptance_length"]) == pytest.approx(1 + accepted / len(drafts))
        answer = server.http.post("/v1/completions", json=asked | {"draft_tokens": False})
        assert "draft" not in answer.text


def test_metrics_add_up():
    with running(slots=2) as server:
        for _ in range(2):
            server.http.post("/v1/completions", json={"prompt": "x" * 40, "max_tokens": 7, "seed": 1})
        server.http.post("/v1/completions", json={"prompt": 5})
        lines = server.http.get("/metrics").text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    found = {name.removeprefix("shoestring_"): float(value) for name, value in values.items()}
    assert found["generated_tokens_total"] == 14
    assert (found["prompt_tokens_total"], found["reused_prompt_tokens_total"]) == (41, 39)  # of 80
    assert found['requests_total{path="/v1/completions",status="200"}'] == 2
    assert found['requests_total{path="/v1/completions",status="400"}'] == 1
    assert found['texts_total{reason="length"}'] == 2
    assert found["time_to_first_token_seconds_count"] == found['time_to_first_token_seconds_bucket{le="+Inf"}'] == 2
    assert (found["slots"], found["slots_busy"], found["queue_length"]) == (2, 0, 0)
    assert {line.split()[2] for line in lines if line.startswith("# TYPE")} == {
        re.sub(r"(_bucket|_sum|_count)?(\{.*)? .*", r"\1", line)
        if "_seconds" not in line
        else re.sub(r"_(bucket|sum|count).*", "", line)
        for line in lines
        if not line.startswith("#")
    }


def test_the_log_has_a_line_for_each_request_and_nothing_of_its_content(caplog):
    with caplog.at_level("INFO", logger="shoestring.serve"), running(slots=1) as server:
        server.http.post("/v1/completions", json={"prompt": "secret", "max_tokens": 3, "seed": 1})
        server.http.get("/secret%0aforged?secret")
    lines = [record.getMessage() for record in caplog.records if record.name == "shoestring.serve"]
    assert re.fullmatch(r"127\.0\.0\.1 POST /v1/completions 200 \d+\.\d{3} s, 6 \+ 3 tokens", lines[0])
    assert re.fullmatch(r"127\.0\.0\.1 GET /secret%0aforged 404 \d+\.\d{3} s", lines[1])
    assert len(lines) == 2
