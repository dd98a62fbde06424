"""Limits of rate, tokens and queue by API key, and clients that do not read their streams, with real HTTP requests."""

import json
import socket
import time
from threading import Thread

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoestring.core.errors import ConfigError
from shoestring.decode.request import TokenLogprob
from shoestring.decode.serve import engine_thread
from shoestring.decode.serve.errors import RequestError
from shoestring.decode.serve.limits import Limits, duration
from shoestring.decode.settings.serving import Serving
from tests.decode.small_server import KEYS, running
from tests.waiting import until

BEARERS = [{"Authorization": f"Bearer {key}"} for key in KEYS]


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def limits(**settings):
    clock = Clock()
    return Limits(Serving(**settings), 8, clock), clock


def refusal(act):
    with pytest.raises(RequestError) as caught:
        act()
    assert caught.value.status == 429
    return caught.value


# -- the account -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(waits=st.lists(st.floats(0, 30), max_size=60), limit=st.integers(1, 20))
def test_no_key_sends_more_than_its_rate_and_whoever_comes_back_when_told_is_served(waits, limit):
    account, clock = limits(requests_per_minute=limit)
    began, served = clock.now, 0
    for wait in waits:
        clock.now += wait
        try:
            account.count_request(0)
            served += 1
        except RequestError as error:
            clock.now += float(error.headers["retry-after-ms"]) / 1000
            account.count_request(0)
            served += 1
        assert served <= limit + (clock.now - began) * limit / 60 + 1e-3


def test_tokens_are_taken_in_advance_given_back_and_owed():
    account, clock = limits(tokens_per_minute=600)
    first = account.admit(0, 1, 100, 400)
    error = refusal(lambda: account.admit(0, 1, 100, 50))
    assert error.headers["Retry-After"] == "5"  # 50 tokens are missing, and 10 come back each second
    account.settle(first, 150)
    second = account.admit(0, 1, 100, 0)  # names no largest length
    account.settle(second, 700)
    assert dict(account.headers(0))[b"x-ratelimit-remaining-tokens"] == b"0"
    error = refusal(lambda: account.admit(0, 1, 1, 0))
    assert error.headers["Retry-After"] == "26"  # 250 tokens are owed, and one is needed
    clock.now += 26
    account.settle(account.admit(0, 1, 1, 0), 1)
    assert refusal(lambda: account.admit(0, 1, 601, 0)).headers == {"x-should-retry": "false"}
    clock.now += 3600
    account.admit(0, 1, 100, 10**6)  # more than ever fits, so it takes the whole


def test_keys_do_not_share_what_they_have():
    account, _ = limits(requests_per_minute=1, tokens_per_minute=10, api_keys=KEYS, queue=6)
    for key in (0, 1):
        account.count_request(key)
        account.admit(key, 1, 10, 0)
        refusal(lambda key=key: account.count_request(key))
        refusal(lambda key=key: account.admit(key, 1, 10, 0))


def test_one_key_of_several_fills_only_half_of_the_queue():
    account, _ = limits(api_keys=KEYS, queue=6)
    ticket = account.admit(0, 5, 1, 0)
    refusal(lambda: account.admit(0, 1, 1, 0))
    account.admit(1, 5, 1, 0)
    account.settle(ticket, 1)
    account.admit(0, 5, 1, 0)
    only, _ = limits(queue=6)
    only.admit(0, 8, 1, 0)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0ms"), (0.0123, "13ms"), (1, "1s"), (1.5, "1.5s"), (60, "1m0s"), (361.5, "6m1.5s")]
)
def test_times_are_written_as_by_openai(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize("name", ["requests_per_minute", "tokens_per_minute"])
def test_negative_limits_are_refused(name):
    with pytest.raises(ConfigError, match=name):
        Serving(**{name: -1})


# -- through HTTP ------------------------------------------------------------------------------------------------------


def test_a_key_over_its_rate_is_told_when_to_come_back_and_the_other_is_served():
    with running(slots=2, api_keys=KEYS, requests_per_minute=2, tokens_per_minute=100) as server:

        def ask(key=0, **fields):
            asked = {"prompt": "abc", "max_tokens": 4, "seed": 1} | fields
            return server.http.post("/v1/completions", json=asked, headers=BEARERS[key])

        first = ask()
        assert first.status_code == 200
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert first.headers["x-ratelimit-limit-tokens"] == "100"
        assert 93 <= int(first.headers["x-ratelimit-remaining-tokens"]) < 100
        assert first.headers["x-ratelimit-reset-tokens"].endswith("s")
        assert ask(stream=True).headers["x-ratelimit-remaining-requests"] == "0"
        third = ask()
        assert (third.status_code, third.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert 1 <= int(third.headers["retry-after"]) <= 30
        assert ask(key=1).headers["x-ratelimit-remaining-requests"] == "1"
        too_long = ask(key=1, prompt="a" * 101)
        assert (too_long.status_code, too_long.headers["x-should-retry"]) == (429, "false")
        assert "x-ratelimit-limit-requests" not in server.http.get("/health").headers
        with (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEYS[0], max_retries=0) as client,
            pytest.raises(openai.RateLimitError, match="2 requests per minute"),
        ):
            client.completions.create(model="small", prompt="a")
    with running(slots=1) as server:
        answer = server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
        assert not [name for name in answer.headers if name.startswith("x-ratelimit")]


def test_cached_tokens_are_counted_for_the_same_key_only():
    prompt = "abcdefgh" * 8

    def cached(server, key, **fields):
        asked = {"prompt": prompt, "max_tokens": 1, "seed": 1} | fields
        answer = server.http.post("/v1/completions", json=asked, headers=BEARERS[key])
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    with running(slots=3, api_keys=KEYS) as server:
        assert [cached(server, 0), cached(server, 1), cached(server, 0), cached(server, 1)] == [0, 0, 63, 63]
        read = server.app.worker.engine.counts.read
        assert cached(server, 1, prompt=prompt + "x") == 64
        assert server.app.worker.engine.counts.read == read + 1
        assert cached(server, 0, prompt="z" * 64, n=5) == 0  # what a request reads itself was not cached before
    with running(slots=3, api_keys=KEYS, share_prefixes=True) as server:
        assert [cached(server, 0), cached(server, 1)] == [0, 63]


# -- clients that do not read ------------------------------------------------------------------------------------------


def posted(key="", **fields):
    body = json.dumps({"prompt": "ab", "max_tokens": 200, "stream": True} | fields).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" + (
        b"Content-Length: %d\r\n\r\n" % len(body) + body
    )


def stalled(server, **fields):
    """A connection whose client sends a request for a large stream, and reads nothing."""
    channel = server.connect()
    channel.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    channel.sendall(posted(**fields))
    return channel


@pytest.mark.slow
def test_a_client_that_reads_nothing_is_ended_while_others_go_on():
    with running(slots=2, patience=1.0, endless=True) as server:
        answers = []

        def other():
            for seed in range(6):
                asked = {"prompt": "abab", "max_tokens": 100, "seed": seed}
                answers.append(server.http.post("/v1/completions", json=asked).json()["choices"][0]["text"])

        thread = Thread(target=other)
        with stalled(server, n=40, logprobs=20, seed=1):
            until(lambda: server.app.worker.unfinished > 0)
            thread.start()
            until(lambda: server.app.worker.unfinished <= 1 and server.app.connections <= 1, seconds=60)
        thread.join()
        assert answers == [server.generated("abab", 100, seed, ends=False) for seed in range(6)]
        until(lambda: server.app.worker.unfinished == 0)
        assert server.app.worker.engine.seated == [None, None]


@pytest.mark.slow
def test_an_answer_that_is_not_read_takes_bounded_memory_and_ends(monkeypatch):
    monkeypatch.setattr(engine_thread, "BACKLOG", 3000)
    largest = 0
    put = engine_thread.Batch.put

    def watched(batch, news):
        nonlocal largest
        put(batch, news)
        largest = max(largest, batch.size)

    monkeypatch.setattr(engine_thread.Batch, "put", watched)
    with running(slots=2, patience=30.0, endless=True) as server:
        with stalled(server, n=60, logprobs=20, seed=1):
            engine = server.app.worker.engine
            until(lambda: engine.counts.generated > 0 and server.app.worker.unfinished == 0, seconds=60)
        assert 0 < largest <= 3000
        assert engine.counts.generated < 60 * 200
        assert engine.seated == [None, None]


def test_what_waits_is_measured_in_tokens():
    entry = TokenLogprob(1, -1.0, [(1, -1.0), (2, -2.0)])
    news = engine_thread.News(0, [1, 2], [entry, entry])
    assert news.size == 1 + 2 + 6


def test_a_slow_reader_gets_all_of_its_text():
    with running(slots=1, patience=2.0, endless=True) as server, server.connect(30) as channel:
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        channel.sendall(posted(seed=1, logprobs=5))
        received = b""
        while b"[DONE]" not in received:
            received += channel.recv(2048)
            time.sleep(0.001)
        assert b'"finish_reason":"length"' in received
