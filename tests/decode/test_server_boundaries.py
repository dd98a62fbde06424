"""Between clients of one server: where a request ends, what a web page may send, and what keys learn of each other."""

import pytest

from tests.decode.small_server import KEYS, running, status


@pytest.fixture(scope="module")
def server():
    with running(slots=2) as server:
        yield server


STAINLESS = ("lang", "package-version", "os", "arch", "runtime", "runtime-version", "retry-count", "timeout")
"""What OpenAI's client for JavaScript says of itself in headers (openai 6.49)."""
SCRIPTED = ["authorization", "content-type", "openai-organization", "openai-project", "openai-beta", "idempotency-key"]


def test_openais_client_may_ask_from_a_page_that_is_allowed():
    wanted = ",".join([*SCRIPTED, *(f"x-stainless-{name}" for name in STAINLESS), "x-stainless-helper-method"])
    asks = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    with running(slots=1, allow_origin=("https://a.example",), api_keys=KEYS) as server:
        named = asks | {"Access-Control-Request-Headers": wanted, "Authorization": ""}
        answer = server.http.options("/v1/chat/completions", headers=named)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-headers"] == wanted
        assert "access-control-allow-credentials" not in answer.headers
        answer = server.http.options("/v1/chat/completions", headers=named | {"Origin": "https://b.example"})
        assert answer.status_code == 400
        assert "access-control-allow-origin" not in answer.headers
        answer = server.http.post("/v1/completions", json={}, headers={"Origin": "https://a.example", "X-Any": "a"})
        assert answer.headers["access-control-expose-headers"].startswith("Retry-After, X-Should-Retry, x-ratelimit-")


SMUGGLED = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize("path", [b"/v1/completions", b"/nowhere", b"/health"])
@pytest.mark.parametrize(
    "names", [(b"Content-Length", b"Transfer-Encoding"), (b"transfer-encoding", b"content-LENGTH")]
)
def test_a_request_with_two_ends_is_the_last_of_its_connection(server, path, names):
    body = b'{"prompt": "a", "max_tokens": 1}'
    chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    values = {b"content-length": b"%d" % (len(chunks) + len(SMUGGLED)), b"transfer-encoding": b"chunked"}
    head = b"".join(b"%s: %s\r\n" % (name, values[name.lower()]) for name in names)
    first = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n%s\r\n" % (path, head)
    answer = server.raw(first + chunks + SMUGGLED)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b"connection: close" in answer.lower()
    assert status(answer) == {b"/v1/completions": 200, b"/nowhere": 404, b"/health": 405}[path]
    kept = b"POST %s HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n%s" % (path, chunks)
    last = SMUGGLED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    assert server.raw(kept + last).count(b"HTTP/1.1 ") == 2  # chunks alone are in order


@pytest.mark.parametrize("share", [False, True])
def test_no_key_learns_what_another_ones_prompts_began_with(share):
    prompt = "a prompt that is long enough to be worth copying, and then some"

    def cached(server, key, text=prompt):
        headers = {"Authorization": f"Bearer {key}"}
        answer = server.http.post("/v1/completions", json={"prompt": text, "max_tokens": 1}, headers=headers).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    for slots in (1, 3):
        with running(slots=slots, api_keys=KEYS, share_prefixes=share) as server:
            whole = len(prompt) - 1
            assert cached(server, KEYS[0]) == 0
            assert cached(server, KEYS[0]) == whole
            before = server.app.worker.engine.counts.read
            assert cached(server, KEYS[1]) == (whole if share else 0)
            assert server.app.worker.engine.counts.read - before == (1 if share else len(prompt))
            assert cached(server, KEYS[1], prompt + "!") >= whole
            if slots > 1:
                assert cached(server, KEYS[0]) == whole
    with running(slots=1) as server:
        assert [cached(server, "-"), cached(server, "any")] == [0, whole]
