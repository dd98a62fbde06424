"""The server's text, whole and streamed, is what all tokens decode to, also where they are no text."""

import json

import pytest

from tests.decode.small_server import CHATML, running
from tests.rigs import foreign_tokenizers as foreign
from tests.rigs import text_checks as checks

SEEDS = range(6)


@pytest.fixture(scope="module")
def server():
    """Of a model with a tokenizer as Llama 2 has it, whose random texts are full of bytes that are no characters."""
    tokens = foreign.tokenizer_of("byte-fallback, space before", begins=True, template=CHATML)
    with running(tokens=tokens, endless=True) as server:
        yield server


def completion(server, **fields):
    answer = server.http.post("/v1/completions", json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def events(server, path, **fields):
    with server.http.stream("POST", path, json={**fields, "stream": True}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line)["choices"][0] for line in lines[:-1]]


@pytest.mark.slow
@pytest.mark.parametrize("skip", [True, False])
def test_text_is_what_decoding_all_tokens_gives(server, skip):
    tokenizer = server.tokenizer
    start = tokenizer.encode_prompt("the cat")

    def decode(ids, skip):
        return tokenizer.engine.decode(list(ids), skip_special_tokens=skip)

    texts = []
    for seed in SEEDS:
        asked = {"prompt": "the cat", "max_tokens": 24, "seed": seed, "skip_special_tokens": skip}
        tokens = server.drawn(start, 24, seed, ends=False)
        wanted = checks.text_behind(tokenizer, decode, start, tokens, skip)
        choice = completion(server, **asked, logprobs=1)
        assert choice["text"] == wanted
        pieces = events(server, "/v1/completions", **asked)
        assert "".join(piece["text"] for piece in pieces) == wanted
        names, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
        assert len(names) == 24
        for token, name, offset in zip(tokens, names, offsets, strict=True):
            if not name.startswith("bytes:") and token not in tokenizer.special:
                # A byte that is a character by itself is none among bytes that are no text.
                assert wanted.startswith(name, offset) or (
                    tokenizer.spelling.byte(token) and wanted[offset] == "\ufffd"
                )
        for length in (1, 4):
            place = len(wanted) // 2
            stop = wanted[place : place + length]
            cut = checks.cut_at_stop(wanted, [stop])
            assert completion(server, **asked, stop=stop)["text"] == cut
            assert "".join(piece["text"] for piece in events(server, "/v1/completions", **asked, stop=stop)) == cut
        texts.append(wanted)
    assert any("\ufffd" in text for text in texts)
    assert any(token in text for text in texts for token in foreign.SPECIAL) != skip


def test_a_prompt_reads_special_tokens_unless_it_is_told_not_to(server):
    tokenizer, text = server.tokenizer, "the cat<|im_end|>"
    for switch in ({}, {"parse_special": False}, {"add_special_tokens": False}):
        by_tokens = tokenizer.encode_prompt(text, **switch)
        one = completion(server, prompt=text, max_tokens=8, seed=1, **switch)
        assert one["text"] == completion(server, prompt=by_tokens, max_tokens=8, seed=1)["text"]
        usage = server.http.post("/v1/completions", json={"prompt": text, "max_tokens": 1, **switch}).json()["usage"]
        assert usage["prompt_tokens"] == len(by_tokens)
    assert tokenizer.special.isdisjoint(tokenizer.encode_prompt(text, parse_special=False, add_special_tokens=False))


def test_an_echo_is_the_prompt_as_it_was_sent_and_offsets_go_on_behind_it(server):
    for text in ("the cat<|im_end|> sat", "漢"):
        choice = completion(server, prompt=text, max_tokens=4, seed=1, echo=True, logprobs=0)
        assert choice["text"].startswith(text)
        names, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
        assert names[0] == "<s>"
        assert offsets[:2] == [0, 0]
        assert offsets == sorted(offsets)
        for name, offset in zip(names[1:], offsets[1:], strict=True):
            if not name.startswith("bytes:") and name not in foreign.SPECIAL:
                # After a special token this tokenizer adds a space, which the prompt did not have.
                assert choice["text"].startswith((name, name.removeprefix(" ")), offset)


def test_a_token_can_end_the_text(server):
    start = server.tokenizer.encode_prompt("the cat")
    tokens = server.drawn(start, 12, 3, ends=False)
    choice = completion(server, prompt="the cat", max_tokens=12, seed=3, stop_token_ids=[tokens[6]])
    first = tokens.index(tokens[6])
    assert choice["text"] == checks.streamed(server.tokenizer, start, tokens[:first], True)
    assert choice["finish_reason"] == "stop"
    for wrong in ("x", [1.5], [10**6], [-1], list(range(17))):
        answer = server.http.post("/v1/completions", json={"prompt": "a", "stop_token_ids": wrong})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stop_token_ids")


def test_messages_never_hold_special_tokens_and_answers_hide_theirs(server):
    spelled = {"messages": [{"role": "user", "content": "a<|im_end|>"}], "max_tokens": 60}
    plain = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    counts = [
        server.http.post("/v1/chat/completions", json=asked).json()["usage"]["prompt_tokens"]
        for asked in (spelled, plain)
    ]
    assert counts[0] >= counts[1] + len("<|im_end|>") - 2
    shown = []
    for skip in (True, False):
        asked = {**spelled, "skip_special_tokens": skip}
        texts = [
            server.http.post("/v1/chat/completions", json={**asked, "seed": seed}).json()["choices"][0]["message"]
            for seed in SEEDS
        ]
        streams = [events(server, "/v1/chat/completions", **asked, seed=seed) for seed in SEEDS]
        streamed = ["".join(piece["delta"].get("content", "") for piece in pieces) for pieces in streams]
        assert streamed == [message["content"] for message in texts]
        shown.append(any(token in text for text in streamed for token in foreign.SPECIAL))
    assert shown == [False, True]


def test_an_error_inside_a_stream_is_its_last_event(server, monkeypatch):
    def fail(*_):
        raise RuntimeError("broken")

    monkeypatch.setattr("shoestring.decode.serve.forms.CompletionForm.parts", fail)
    asked = {"prompt": "a", "max_tokens": 4, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=asked) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "failed"
    assert "broken" not in lines[-1]
