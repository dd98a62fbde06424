"""Whatever a program sends: the hub answers with a refusal or a result, never with an error of its own."""

import http.client
import json

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from shoestring_hub.protocol import CHUNK, digest

KEY = "0" * 31
"""Beginning of the keys of two runs, one of each token."""
CHUNKS = st.lists(st.sampled_from([digest(b"there"), "0" * 64, "", "x" * 64, 3, None, {}, [], "\0"]), max_size=3)
FILE = st.fixed_dictionaries(
    {},
    optional={
        "path": st.sampled_from(["a.txt", "run.toml", "", "../x", "a\0b", "x" * 2000, "ü\ud800", 3, None, {}]),
        "size": st.sampled_from([0, 5, -5, CHUNK, 2**70, True, 1.5, "5", None, []]),
        "chunks": CHUNKS | st.sampled_from([None, "text", {}]),
    },
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5) | st.just("\0\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)
BODIES = st.fixed_dictionaries(
    {},
    optional={
        "files": st.lists(FILE | VALUES, max_size=3) | VALUES,
        "digests": CHUNKS | VALUES,
        "paths": st.lists(st.text(max_size=4) | VALUES, max_size=3) | VALUES,
        **dict.fromkeys(("name", "begin", "checkpoints", "path", "chunk"), VALUES),
    },
)
ROUTES = [
    ("GET", "whoami"),
    ("POST", "chunks/missing"),
    ("PUT", f"chunks/{digest(b'there')}"),
    ("POST", "own/KEY"),
    ("PUT", "own/KEY/log?at=0&have=0&attempt=0"),
    ("PUT", "own/KEY/log?at=-1&have=99999999999999999999&attempt=x"),
    ("POST", "own/KEY/files"),
    ("POST", "own/KEY/keep"),
    ("GET", "runs/1"),
    ("POST", "runs/1/chunk"),
    ("GET", "runs/1/log"),
]


@pytest.fixture
def asked(server, project, ada):
    """Asks with a token that may read, or with one that only writes; returns the status."""
    tokens = [ada.make_token(project), ada.make_token(project, "other", write_only="on")]
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)

    def ask(method, path, body, token):
        path = path.replace("KEY", f"{KEY}{token}")
        connection.request(method, f"/api/{path}", body, {"Authorization": f"Bearer {tokens[token]}"})
        response = connection.getresponse()
        response.read()
        return response.status

    file = {"path": "a.txt", "size": 5, "chunks": [digest(b"there")]}
    for token in (0, 1):
        assert ask("POST", "own/KEY", b'{"name": "it"}', token) == 200
        assert ask("PUT", f"chunks/{digest(b'there')}", b"there", token) == 200
        assert ask("POST", "own/KEY/files", json.dumps({"files": [file]}), token) == 200
    yield ask
    connection.close()


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    route=st.sampled_from(ROUTES),
    body=BODIES.map(lambda fields: json.dumps(fields).encode())
    | VALUES.map(lambda value: json.dumps(value).encode())
    | st.sampled_from([b"", b"{", b"[" * 5000, b'{"a": 1, "a": NaN}', b"\xff\xfe", b"there"]),
    token=st.integers(0, 1),
)
@example(route=("POST", "own/KEY/files"), body=b'{"files": [{"path": "a", "size": 0, "chunks": [{}]}]}', token=1)
@example(route=("POST", "own/KEY/files"), body=b'{"files": [{"path": "a", "size": 1, "chunks": [[]]}]}', token=0)
def test_no_body_is_an_error_of_the_hub(asked, route, body, token):
    assert asked(*route, body, token) < 500


def test_more_than_is_allowed_at_once_is_refused_and_not_cut(asked):
    entry = {"path": "a.txt", "size": 0, "chunks": []}
    assert asked("POST", "own/KEY/files", json.dumps({"files": [entry] * 5001}), 0) == 413
    assert asked("POST", "chunks/missing", json.dumps({"digests": ["0" * 64] * 5001}), 0) == 413


def test_a_token_that_only_writes_is_not_told_what_the_project_has(asked):
    assert asked("PUT", f"chunks/{digest(b'of others')}", b"of others", 0) == 200
    for data, sent in ((b"of others", False), (b"nowhere", False), (b"there", True)):
        file = {"path": "b.txt", "size": len(data), "chunks": [digest(data)]}
        assert asked("POST", "own/KEY/files", json.dumps({"files": [file]}), 1) == (200 if sent else 409)
