"""Who may use the server and how much of it: keys, names, sizes, queues, slow clients, clients that leave, the end."""

import json
import os
import re
import signal
import socket
import time
from contextlib import contextmanager
from threading import Event, Thread

import openai
import pytest

from shoestring.cli import main
from shoestring.core.errors import ConfigError
from shoestring.decode.serve.server import listen
from shoestring.decode.settings.serving import Serving, is_loopback, read_keys
from shoestring.models.saving import save_model
from tests.decode.small_server import CHATML, KEYS, model, received, running, status, tokenizer
from tests.waiting import until


def posted(content, path="/v1/completions", headers=()):
    """A request as bytes."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    given = {"Host": "localhost", "Content-Type": "application/json", "Content-Length": str(len(body)), **dict(headers)}
    head = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body


@contextmanager
def held(server):
    """The model's passes wait while the block runs, so that texts stay unfinished."""
    go, step = Event(), server.app.worker.engine.step
    server.app.worker.engine.step = lambda: (go.wait(20), step())[1]
    try:
        yield
    finally:
        go.set()
        del server.app.worker.engine.step


# -- who ---------------------------------------------------------------------------------------------------------------


def test_a_key_is_needed_where_keys_are_set():
    with running(slots=1, api_keys=KEYS) as server:
        for key in KEYS:
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key) as client:
                assert client.completions.create(model="small", prompt="a", max_tokens=1).usage.completion_tokens == 1
        for header in (
            "",
            "Bearer",
            "Basic a-key-of-16-chars",
            "Bearer a-key-of-16-char",
            "a-key-of-16-chars",
        ):
            for path, wanted in (
                ("/v1/models", 401),
                ("/metrics", 401),
                ("/nothing", 401),
                ("/health", 200),
                ("/", 200),
            ):
                answer = server.http.get(path, headers={"Authorization": header})
                assert answer.status_code == wanted, (header, path)
        assert server.http.get("/v1/models", headers={"Authorization": ""}).headers["www-authenticate"] == "Bearer"


def test_other_machines_need_a_key():
    with pytest.raises(ConfigError, match="no API key"):
        Serving(host="0.0.0.0")
    assert not Serving(host="0.0.0.0", api_keys=KEYS).loopback


def test_keys_come_from_a_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"{KEYS[0]}\n\n  {KEYS[1]}  \n")
    assert read_keys(path) == KEYS
    for wrong in ("", "short\n", "a-key-of-16-chars\nüüüüüüüüüüüüüüüüüü\n"):
        path.write_text(wrong)
        with pytest.raises(ConfigError, match="at least 16"):
            read_keys(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_keys(tmp_path / "none")


@pytest.mark.parametrize("name", ["localhost", "LOCALHOST", "127.0.0.1", "127.8.9.1", "::1", "[::1]", "a.localhost"])
def test_names_of_this_machine(name):
    assert is_loopback(name)


@pytest.mark.parametrize("name", ["", "0.0.0.0", "10.0.0.1", "localhost.evil.com", "127.0.0.1.evil.com", "::", "1"])
def test_names_of_others(name):
    assert not is_loopback(name)


@pytest.mark.parametrize("host", ["evil.com", "127.0.0.1.evil.com:80", "evil.com:8000", "", "localhost@evil.com"])
def test_a_name_of_somewhere_else_is_refused_so_that_no_web_page_can_rebind_to_here(server, host):
    for path in (b"/", b"/v1/models", b"/health"):
        assert (
            status(server.raw(b"GET %s HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n" % (path, host.encode())))
            == 403
        )


@pytest.mark.parametrize("host", [b"localhost", b"localhost:1", b"127.0.0.1:8000", b"[::1]", b"[::1]:8000"])
def test_names_of_this_machine_are_served(server, host):
    assert status(server.raw(b"GET /health HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n" % host)) == 200


def test_a_web_page_of_another_origin_gets_nothing_unless_it_is_allowed(server):
    asks = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    assert server.http.options("/v1/completions", headers=asks).status_code == 405
    simple = {"Origin": "https://a.example", "Content-Type": "text/plain"}  # what a page may send unasked
    answer = server.http.post("/v1/completions", content='{"prompt": "a"}', headers=simple)
    assert answer.status_code == 415
    assert "access-control-allow-origin" not in answer.headers
    with running(slots=1, allow_origin=("https://a.example",), api_keys=KEYS) as open_one:
        answer = open_one.http.options("/v1/completions", headers=asks | {"Authorization": ""})
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        assert (
            open_one.http.options("/v1/completions", headers=asks | {"Origin": "https://b.example"}).status_code == 400
        )
        answer = open_one.http.get("/v1/models", headers={"Origin": "https://a.example"})
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        assert open_one.http.get("/v1/models", headers={"Authorization": ""}).status_code == 401


def test_pages_may_load_nothing_from_elsewhere(server):
    for path in ("/", "/page.js", "/page.css"):
        answer = server.http.get(path)
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
        assert "://" not in answer.text.replace("http://www.w3.org/2000/svg", "")


# -- how much ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server():
    with running(slots=2, queue=3, body=5000, patience=1.0) as server:
        yield server


MALFORMED = {
    "not HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    "no JSON": (posted(b"{"), 400),
    "no UTF-8": (posted(b'{"prompt": "\xff"}'), 400),
    "not a number": (posted(b'{"prompt": "a", "temperature": NaN}'), 400),
    "too large a number": (posted(b'{"prompt": "a", "temperature": 1e999}'), 400),
    "too long a number": (posted(b'{"prompt": "a", "max_tokens": 1' + b"0" * 4900 + b"}"), 400),
    "too deep": (posted(b"[" * 4900), 400),
    "half a character as a name": (posted(b'{"\\ud800": 1}'), 400),
    "an array": (posted(b"[]"), 400),
    "no body": (posted(b""), 400),
    "another type": (posted({}, headers={"Content-Type": "text/plain"}), 415),
    "compressed": (posted({}, headers={"Content-Encoding": "gzip"}), 415),
    "too large": (posted(b" " * 5001), 413),
    "far too large": (posted(b" " * 9000), 413),
    "another method": (b"PUT /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", 405),
    "another path": (b"GET /../etc/passwd HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", 404),
    "a long line": (b"GET /" + b"a" * 70000 + b" HTTP/1.1\r\n\r\n", 400),
    "two lengths": (posted({}, headers={"content-length": "5"}), 400),
    "a bad chunk": (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        400,
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_requests_are_refused(server, case):
    data, wanted = MALFORMED[case]
    answer = server.raw(data.replace(b"Content-Type", b"Connection: close\r\nContent-Type", 1))
    assert status(answer) == wanted
    assert server.http.get("/health").status_code == 200


def test_a_request_that_breaks_off_before_its_answer_is_no_error_of_ours(server, caplog):
    """The head and a bad chunk in one packet: uvicorn has refused the body when the application answers."""
    head = b"POST /v1/models/x HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with caplog.at_level("INFO"):
        server.raw(head + b"zz\r\n")
        until(lambda: "/v1/models/x" in caplog.text)
    assert "/v1/models/x 499" in caplog.text
    assert "Exception" not in caplog.text
    assert 'path="/v1/models",status="500"' not in server.http.get("/metrics").text


def test_a_request_that_does_not_come_in_time_is_given_up(server):
    began = time.monotonic()
    assert server.raw(b"") == b""
    assert server.raw(b"POST /v1/comp") == b""
    assert status(server.raw(posted(b"{}", headers={"Content-Length": "100"}))) == 408
    assert 2.5 < time.monotonic() - began < 8


def test_what_the_queue_has_no_room_for_is_told_to_come_back(server):
    with held(server):
        waiting = [server.connect() for _ in range(5)]
        for channel in waiting:
            channel.sendall(posted({"prompt": "a", "max_tokens": 1}, headers={"Connection": "close"}))
        until(lambda: server.app.worker.unfinished == 5)
        answer = server.http.post("/v1/completions", json={"prompt": "a", "stream": True})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "5")
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert "shoestring_queue_length 3" in server.http.get("/metrics").text
    for channel in waiting:
        with channel:
            assert status(received(channel)) == 200


def test_more_clients_than_allowed_are_refused():
    with running(slots=1, clients=3) as server:
        others = [server.connect() for _ in range(3)]
        assert status(server.raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")) == 503
        for channel in others:
            channel.close()
        until(lambda: server.http.get("/health", headers={"Connection": "close"}).status_code == 200)


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_that_takes_too_long_is_cut_off(stream):
    with running(slots=1, timeout=0.3) as server, held(server):
        answer = server.http.post("/v1/completions", json={"prompt": "a", "stream": stream})
        content = answer.text.removeprefix("data: ") if stream else answer.text
        assert json.loads(content)["error"]["code"] == "timeout"
        assert answer.status_code == (200 if stream else 503)
        assert stream or answer.headers["x-should-retry"] == "false"
    assert server.app.worker.unfinished == 0


# -- clients that leave ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slot(server, stream):
    generated = server.app.worker.engine.counts.generated
    asked = {"prompt": "a", "max_tokens": 250, "stream": stream, "n": 2, "logprobs": 5}
    with server.connect() as channel:
        channel.sendall(posted(asked))
        until(lambda: server.app.worker.engine.counts.generated > generated)
    until(lambda: server.app.worker.unfinished == 0, seconds=0.5)
    assert server.app.worker.engine.counts.generated - generated < 490
    assert server.app.worker.engine.seated == [None, None]


def test_a_client_that_leaves_the_queue_leaves_nothing(server):
    with held(server):
        with server.connect() as channel:
            channel.sendall(posted({"prompt": "a", "n": 4}))
            until(lambda: server.app.worker.unfinished == 4)
            before = server.app.connections
        until(lambda: server.app.connections < before)
    until(lambda: server.app.worker.unfinished == 0)
    assert not server.app.worker.engine.waiting


@pytest.mark.slow
def test_a_client_that_takes_nothing_in_is_disconnected():
    with running(slots=1, patience=1.0) as server, server.connect() as channel:
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        # More than the kernel buffers, so that it stays with the server.
        channel.sendall(posted({"prompt": "a" * 250, "max_tokens": 0, "echo": True, "n": 60, "logprobs": 20}))
        until(lambda: server.app.connections == 1)
        until(lambda: server.app.connections == 0, seconds=20)
        assert server.app.worker.unfinished == 0


# -- the end -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("served") / "tiny"
    save_model(model(), tokenizer(CHATML), path, {"model": "-", "arguments": {}, "offered": {"context": 256}})
    return path


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_running_text_ends_once_the_server_is_told_to_stop(folder, number, capsys):
    found = []

    def ask():
        printed = ""
        while "\n" not in printed:
            printed += capsys.readouterr().out
            time.sleep(0.01)
        found.append(printed)
        with openai.OpenAI(base_url=f"{printed.split()[2].rstrip(':')}/v1", api_key="-", max_retries=0) as client:
            stream = client.completions.create(model="tiny", prompt="ab", max_tokens=250, seed=4, stream=True)
            next(stream)
            os.kill(os.getpid(), number)
            found.extend(stream)

    client = Thread(target=ask)
    client.start()
    assert main(["serve", str(folder), "--port", "0", "--slots", "1"]) == 0
    client.join()
    assert re.fullmatch(r"tiny at http://127\.0\.0\.1:\d+: 1 slots of 256 tokens\n", found[0])
    assert found[-1].choices[0].finish_reason in ("length", "stop")
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_text_is_cut_off_when_the_time_to_end_is_over():
    with running(slots=1, grace=0.2, endless=True) as server:
        with held(server):
            channel = server.connect()
            channel.sendall(posted({"prompt": "a", "max_tokens": 250}, headers={"Connection": "close"}))
            until(lambda: server.app.worker.unfinished == 1)
            server.app.stopping = True
            answer = server.http.post("/v1/completions", json={"prompt": "a"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
            assert server.http.get("/health").status_code == 503
            server.app.worker.cancel_all()
        with channel:
            answer = received(channel)
        assert status(answer) == 503
        assert b"shutting_down" in answer


def test_a_port_that_is_taken_is_named():
    with listen(Serving(port=0)) as listener, pytest.raises(ConfigError, match="Address already in use"):
        listen(Serving(port=listener.getsockname()[1]))


def test_the_verb_refuses_what_cannot_be_served(folder, capsys, tmp_path):
    assert main(["serve", str(folder), "--host", "0.0.0.0"]) == 2
    assert "--api-key-file" in capsys.readouterr().err
    assert main(["serve", str(tmp_path)]) == 2
    assert "holds no model" in capsys.readouterr().err
    assert main(["serve", str(folder), "--port", "70000"]) == 2
    assert "65535" in capsys.readouterr().err
