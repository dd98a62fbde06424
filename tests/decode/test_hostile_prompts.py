"""What is asked of a server is bounded before it is worked on, and a template can be ended."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest

from shoestring.confined import Confined, LimitError
from shoestring.core.errors import DataError
from shoestring.decode.serve import asking
from shoestring.decode.serve.errors import RequestError
from shoestring.decode.serve.served import describe
from shoestring.decode.serve.understanding import INLINE, Understanding
from tests.decode.hostile_templates import HAND_MADE, endless, generated
from tests.decode.small_server import running, tokenizer
from tests.waiting import until

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "seed": 1}


def alive(pid):
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


# -- before the work ---------------------------------------------------------------------------------------------------


class Idle:
    """A tokenizer that may not be used."""

    longest, vocab_size, end_of_text = 12, 259, 256

    def __getattr__(self, name):
        raise AssertionError(f"{name} is work")


def message(content="x", **more):
    return {"role": "user", "content": content, **more}


TOO_MUCH = {
    "a long text": {"prompt": "a" * (12 * 256 + 1)},
    "one long text of several": {"prompt": ["a" * 4000] * 128},
    "many tokens": {"prompt": [1] * 257},
    "many tokens of several": {"prompt": [[1] * 257]},
    "many that are no tokens": {"prompt": [1] + ["a"] * 300},
    "many messages": {"messages": [message()] * 257},
    "a long message": {"messages": [message("a" * 4000)]},
    "long messages together": {"messages": [message("a" * 100)] * 40},
    "a long name": {"messages": [message(name="a" * 4000)]},
    "long parts together": {"messages": [message(["a" * 100] * 40)]},
}


@pytest.mark.parametrize("case", TOO_MUCH)
def test_what_cannot_fit_is_refused_before_it_is_encoded(case):
    served = replace(describe("small", tokenizer(), 256), tokenizer=Idle())
    chat = "messages" in TOO_MUCH[case]
    with pytest.raises(RequestError) as refusal:
        (asking.chat if chat else asking.completion)(TOO_MUCH[case], served)
    assert (refusal.value.status, refusal.value.code) == (400, "context_length_exceeded")
    assert refusal.value.param == ("messages" if chat else "prompt")


def test_a_text_that_is_rendered_too_long_is_refused_before_it_is_encoded():
    served = describe("small", tokenizer("{{ messages[0].content * 4000 }}"), 256)
    with pytest.raises(RequestError, match="makes 4000 characters of the conversation, more than 3328"):
        asking.chat({"messages": [message()]}, served)


def test_only_short_completions_are_understood_in_the_event_loop():
    understanding = Understanding(describe("small", tokenizer(), 256), 1.0)
    assert understanding.inline("completion", b"a" * INLINE)
    assert not understanding.inline("completion", b"a" * (INLINE + 1))
    assert not understanding.inline("chat", b"a")
    understanding.close()


@pytest.mark.slow
def test_long_requests_get_what_short_ones_get_and_bodies_are_bounded_together():
    with running(slots=2, context=256) as server:
        asked = {"prompt": "ab", "max_tokens": 6, "seed": 3, "n": 2, "echo": True, "logprobs": 1, "stop": ["xyz"]}
        texts = [
            server.http.post("/v1/completions", json=asked | {"metadata": {"a": "x" * length}}).json()["choices"]
            for length in (0, 2 * INLINE)
        ]
        assert texts[0] == texts[1]
        wrong = server.http.post("/v1/completions", json={"prompt": "a", "metadata": "x" * 9000, "top_q": 1})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "top_q")
        server.app.held = 16 * server.app.settings.body
        answer = server.http.post("/v1/completions", json={"prompt": "a"})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "5")
        server.app.held = 0
        assert server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
        assert server.app.held == 0


def test_tokens_that_the_model_has_no_embedding_of_are_refused():
    served = describe("small", tokenizer(), 256, vocabulary=257)
    for asked in ({"prompt": [1, 257]}, {"messages": [message()]}):
        with pytest.raises(RequestError) as refusal:
            (asking.chat if "messages" in asked else asking.completion)(asked, served)
        assert refusal.value.status == 400
        assert refusal.value.param == ("messages" if "messages" in asked else "prompt")


# -- templates that do not end -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_template_that_never_ends_is_one_error_and_delays_nobody():
    with running(slots=1, template=HAND_MADE["nested loops"], preparation=0.3) as server:
        answers = []
        client = Thread(target=lambda: answers.append(server.http.post("/v1/chat/completions", json=CHAT)))
        client.start()
        confined = server.app.understanding.confined
        until(lambda: confined._workers[0] is not None)
        assert server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
        client.join()
        assert answers[0].status_code == 400
        error = answers[0].json()["error"]
        assert (error["code"], error["param"]) == ("limit", "messages")
        assert "longer than 0.3 s" in error["message"]
        assert confined._workers == [None, None]
        fork_server = confined._server.pid
    assert not alive(fork_server)


@pytest.mark.slow
def test_memory_is_bounded_and_a_process_that_was_killed_is_replaced():
    template = "{{ 'x' | center(10**10 if messages | length > 1 else 1) }}"
    with running(slots=1, template=template) as server:
        huge = CHAT | {"messages": [message()] * 2}
        answer = server.http.post("/v1/chat/completions", json=huge)
        assert answer.status_code == 400
        assert "too much memory" in answer.json()["error"]["message"]
        assert server.http.post("/v1/chat/completions", json=CHAT).status_code == 200
        confined = server.app.understanding.confined
        first = confined._workers[0].pid
        os.kill(first, signal.SIGKILL)
        until(lambda: not alive(first))
        assert server.http.post("/v1/chat/completions", json=CHAT).status_code == 200
        second = confined._workers[0].pid
        assert second != first
        assert alive(second)
    assert not alive(second)


def refusal_of(source):
    """How a request that the template is rendered for is refused."""
    try:
        served = describe("small", tokenizer(source), 256)
    except DataError as error:
        return str(error)
    understanding = Understanding(served, 0.5)
    try:
        asyncio.run(understanding.later("chat", json.dumps(CHAT).encode()))
    except RequestError as refusal:
        return refusal.message
    finally:
        understanding.close()
    return ""


@pytest.mark.slow
def test_every_hostile_template_ends_with_one_error():
    harmless = ("a time", "a huge number where nothing gets to")  # no constants are computed in parsing
    for name, source in [*HAND_MADE.items(), *((text, text) for text in generated(40))]:
        began = time.monotonic()
        found = refusal_of(source)
        assert found or name in harmless, name
        assert "Traceback" not in found
        assert len(found) < 600
        assert time.monotonic() - began < 10, name


@pytest.mark.slow
def test_a_template_that_cannot_be_compiled_is_an_error_at_the_start():
    with pytest.raises(DataError, match="recursion"):
        describe("small", tokenizer(HAND_MADE["parentheses"]), 256)
    understanding = Understanding(describe("small", tokenizer("{{ a | nosuch }}"), 256), 1.0)
    with pytest.raises(DataError, match="nosuch"):
        understanding.check()
    understanding.close()


# -- the processes -----------------------------------------------------------------------------------------------------


def test_a_process_answers_jobs_and_what_ends_it_is_told():
    confined = Confined(endless, b"a", seconds=0.2, count=1)
    try:
        assert confined.call(b"b") == b"ab"
        with pytest.raises(LimitError, match=r"longer than 0\.2 s"):
            confined.call(b"hang")
        with pytest.raises(LimitError, match="ended the process"):
            confined.call(b"exit")
        with pytest.raises(RuntimeError, match="ValueError: planted"):
            confined.call(b"bug")
        os.kill(confined._server.pid, signal.SIGKILL)
        confined._workers[0] = None
        until(lambda: confined._server.ended)
        assert confined.call(b"c") == b"ac"
    finally:
        confined.close()
    with pytest.raises(LimitError):
        confined.call(b"b")


@pytest.mark.slow
def test_processes_end_by_themselves_when_the_one_that_asks_is_killed():
    script = (
        "from shoestring.confined import Confined\nfrom tests.decode.hostile_templates import endless\n"
        "confined = Confined(endless, b'', seconds=1.0)\nconfined.call(b'')\n"
        "print(confined._server.pid, confined._workers[0].pid, flush=True)\nconfined.call(b'hang')"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        pids = [int(word) for word in process.stdout.readline().split()]
        assert all(map(alive, pids))
        process.kill()
    until(lambda: not any(map(alive, pids)), seconds=10)


@pytest.mark.slow
def test_health_answers_at_once_under_requests_that_are_refused():
    bodies = {
        "/v1/completions": [{"prompt": "a" * 4_000_000}, {"prompt": [1] * 1_300_000}, {"prompt": ["ab " * 9000] * 128}],
        "/v1/chat/completions": [
            {"messages": [message()] * 90_000},
            {"messages": [message("<|im_end|>" * 400_000)]},
            {"messages": [message()] * 190},
        ],
    }
    sent = [(path, json.dumps(body).encode()) for path, found in bodies.items() for body in found]
    with running(slots=2) as server:
        server.http.post("/v1/chat/completions", json=CHAT)
        headers = {"Content-Type": "application/json"}
        statuses = []

        def attack(path, data):
            for _ in range(3):
                statuses.append(server.http.post(path, content=data, headers=headers).status_code)

        threads = [Thread(target=attack, args=pair) for pair in sent]
        for thread in threads:
            thread.start()
        waits = []
        while any(thread.is_alive() for thread in threads):
            began = time.monotonic()
            assert server.http.get("/health").status_code == 200
            waits.append(time.monotonic() - began)
        assert set(statuses) == {400}
        assert sorted(waits)[len(waits) * 95 // 100] < 0.1
        assert max(waits) < 0.5  # 2 to 10 s where the event loop did the work
