"""Search servers for the recipe `retrieval`: requests of the official clients, as a server of this process gets them.

The forms follow the servers' documentation, and those for Elasticsearch the types that its client for JavaScript
declares; no server was at hand.
"""

import json
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from shoestring.core.errors import ConfigError, DataError
from shoestring_recipes.retrieval import servers
from shoestring_recipes.retrieval.engines import search
from shoestring_recipes.retrieval.lexical import Bm25

TEXTS = ["the cat sat", "", "a dog"]
VECTORS = np.array([[1, 0], [0, 0], [0.6, 0.8]], np.float32)
OLD = "posts-0123abcd"


class Recorded:
    """A server that records requests, and answers them as a search server does.

    Args:
        answers: maps the method, or nothing for any, and the beginning of the path to a status and a body, in the place
            of the usual ones.
    """

    def __init__(self, answers=None):
        self.requests, self.answers = [], answers or {}
        recorded = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
                lines = [json.loads(line) for line in body.splitlines()] if body else []
                method, path = self.command, self.path.partition("?")[0]
                recorded.requests.append((method, path, lines))
                status, content = recorded.reply(method, path, lines)
                data = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("X-Elastic-Product", "Elasticsearch")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(b"" if method == "HEAD" else data)

            do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = answer

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def reply(self, method, path, lines):
        for (asked, begin), answer in self.answers.items():
            if asked in ("", method) and path.startswith(begin):
                return answer
        if path.endswith("/_bulk"):
            made = [{"index": {"_id": line["index"]["_id"], "status": 201}} for line in lines[::2]]
            return 200, {"took": 1, "errors": False, "items": made}
        if path.endswith("/_msearch"):
            hits = [{"_id": "2", "_score": 0.9}, {"_id": "0", "_score": 0.5}]
            return 200, {"took": 1, "responses": [{"status": 200, "hits": {"hits": hits}} for _ in lines[::2]]}
        if "/_alias" in path and method == "GET":
            return 200, {OLD: {"aliases": {"posts": {}}}, "posts-of-others": {"aliases": {}}}
        return 200, {"acknowledged": True}

    def __enter__(self):
        Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error):
        self.server.shutdown()
        self.server.server_close()


VECTOR_FIELDS = {
    servers.Elasticsearch: {"type": "dense_vector", "dims": 2, "index": True, "similarity": "cosine"},
    servers.OpenSearch: {
        "type": "knn_vector",
        "dimension": 2,
        "method": {"name": "hnsw", "engine": "lucene", "space_type": "cosinesimil"},
    },
}
NEAREST = {
    servers.Elasticsearch: {
        "knn": {"field": "vector", "query_vector": [1.0, 0.0], "k": 2, "num_candidates": 20},
        "size": 2,
        "_source": False,
    },
    servers.OpenSearch: {
        "query": {"knn": {"vector": {"vector": [1.0, 0.0], "k": 2}}},
        "size": 2,
        "_source": False,
    },
}


@pytest.mark.parametrize("kind", VECTOR_FIELDS)
def test_an_index_is_built_aside_and_takes_over_in_one_request(kind):
    with Recorded() as server:
        kind(server.url, "posts", Bm25(1.6, 0.5, True)).build(TEXTS, VECTORS)
    requests = [request for request in server.requests if request[1] != "/"]
    (_, _, (created,)) = next(request for request in requests if request[0] == "PUT")
    (_, named, _) = next(request for request in requests if request[0] == "PUT")
    index = named.removeprefix("/")
    assert index.startswith("posts-") and index != OLD
    analysis = {
        "filter": {"english_stems": {"type": "stemmer", "language": "porter2"}},
        "analyzer": {"words": {"type": "custom", "tokenizer": "standard", "filter": ["lowercase", "english_stems"]}},
    }
    similarity = {"tuned": {"type": "BM25", "k1": 1.6, "b": 0.5}}
    own = {"knn": True} if kind is servers.OpenSearch else {}
    assert created["settings"] == {"index": {**own, "similarity": similarity, "analysis": analysis}}
    assert created["mappings"] == {
        "dynamic": "strict",
        "properties": {
            "text": {"type": "text", "analyzer": "words", "similarity": "tuned"},
            "vector": VECTOR_FIELDS[kind],
        },
    }
    (_, _, lines) = next(request for request in requests if request[1].endswith("_bulk"))
    assert lines[::2] == [{"index": {"_index": index, "_id": str(number)}} for number in range(3)]
    assert lines[1] == {"text": "the cat sat", "vector": [1.0, 0.0]} and lines[3] == {"text": ""}  # no cosine of zeros
    assert requests[-1][:2] == ("POST", "/_aliases") and requests[-2][1] == f"/{index}/_refresh"
    moved = {"add": {"index": index, "alias": "posts"}}
    assert requests[-1][2] == [{"actions": [moved, {"remove_index": {"index": OLD}}]}]


@pytest.mark.parametrize("kind", VECTOR_FIELDS)
def test_searches_are_sent_together(kind):
    with Recorded() as server:
        engine = kind(server.url, "posts")
        by_words = engine.by_words(["the (cat)*", "слово"], 2)
        by_vectors = engine.by_vectors(VECTORS[:2], 2)
        (fused, _) = search(engine, ["cat", ""], VECTORS[:2], 0.5, 1, 2)
        assert engine.by_words([], 3) == []
    asked = [lines for _, path, lines in server.requests if path.endswith("_msearch")]
    match = {"query": {"match": {"text": {"query": "the cat"}}}, "size": 2, "_source": False}
    assert asked[0][:2] == [{"index": "posts"}, match] and asked[0][3]["query"]["match"]["text"]["query"] == "слово"
    assert asked[1] == [
        {"index": "posts"}, NEAREST[kind], {"index": "posts"}, {"query": {"match_none": {}}, "_source": False}
    ]  # fmt: skip
    assert by_words[0].numbers.tolist() == [2, 0] and by_words[0].scores == pytest.approx([0.9, 0.5])
    assert by_vectors[0].scores == pytest.approx([0.8, 0.0])  # cosines
    assert fused.numbers.tolist() == [2]


@pytest.mark.parametrize("kind", VECTOR_FIELDS)
def test_what_a_server_refuses_is_one_line_of_error_and_leaves_the_old_index(kind):
    error = {"error": {"type": "mapper_parsing_exception", "reason": "failed\nto parse"}, "status": 400}
    items = [{"index": {"_id": "0", "status": 400, "error": error["error"]}}]
    refused = {("PUT", "/posts-"): (400, error), ("", "/_bulk"): (200, {"errors": True, "items": items})}
    for key, answer in refused.items():
        with Recorded({key: answer}) as server, pytest.raises(DataError, match="check the server") as caught:
            kind(server.url, "posts").build(TEXTS[:1], VECTORS[:1])
        assert "\n" not in str(caught.value) and server.url in str(caught.value)
        made = [path for method, path, _ in server.requests if method == "PUT" and path.startswith("/posts-")]
        removed = [path for method, path, _ in server.requests if method == "DELETE"]
        assert removed == (made if key[1] == "/_bulk" else [])  # what was created is removed again
        assert not any(path == "/_aliases" for _, path, _ in server.requests)
    with Recorded({("", "/_msearch"): (200, {"responses": [error]})}) as server:
        engine = kind(server.url, "posts", max_retries=0)
        with pytest.raises(DataError, match="refused a search"):
            engine.by_words(["cat"], 1)
    with pytest.raises(DataError, match="check the server"):  # nobody listens there any more
        kind(server.url, "posts", max_retries=0).by_words(["cat"], 1)


def test_a_missing_client_is_one_line_of_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "opensearchpy", None)
    with pytest.raises(ConfigError, match=r"needs its client.*pip install opensearch-py"):
        servers.OpenSearch("http://localhost:9200", "posts")


# -- the types of the client for JavaScript ----------------------------------------------------------------------------

CLIENTS = Path(__file__).parents[1] / "clients"
TYPED = """
import type {{ estypes }} from "@elastic/elasticsearch"
export const created: estypes.IndicesCreateRequest = {{ index: "posts", ...{created} }}
export const settings: estypes.IndicesIndexSettings = {settings}
export const text: estypes.MappingTextProperty = {text}
export const vector: estypes.MappingDenseVectorProperty = {vector}
export const moved: estypes.IndicesUpdateAliasesAction[] = {moved}
export const operation: estypes.BulkOperationContainer = {operation}
export const header: estypes.MsearchMultisearchHeader = {header}
export const bodies: estypes.SearchSearchRequestBody[] = {bodies}
export const nearest: estypes.KnnSearch = {nearest}
"""
"""Requests as values of the types that the client for Elasticsearch declares; misspelt keys are errors."""


def forms():
    """The requests of building an index and of searches, by what they are."""
    with Recorded() as server:
        engine = servers.Elasticsearch(server.url, "posts")
        engine.build(TEXTS, VECTORS)
        engine.by_words(["the cat"], 2)
        engine.by_vectors(VECTORS[:2], 2)
    requests = server.requests
    created = next(lines[0] for method, _, lines in requests if method == "PUT" and "mappings" in lines[0])
    bulk = next(lines for _, path, lines in requests if path.endswith("_bulk"))
    asked = [lines for _, path, lines in requests if path.endswith("_msearch")]
    moved = next(lines[0]["actions"] for _, path, lines in requests if path == "/_aliases")
    fields = created["mappings"]["properties"]
    return {
        "created": created, "settings": created["settings"]["index"], "text": fields["text"],
        "vector": fields["vector"], "moved": moved,
        "operation": bulk[0], "header": asked[0][0], "bodies": [*asked[0][1::2], *asked[1][1::2]],
        "nearest": asked[1][1]["knn"],
    }  # fmt: skip


def compiled(folder, values):
    """What the compiler of TypeScript says of requests."""
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "node_modules").symlink_to(CLIENTS / "node_modules")
    text = TYPED.format(**{name: json.dumps(value) for name, value in values.items()})
    (folder / "forms.ts").write_text(text)
    flags = ["--noEmit", "--strict", "--skipLibCheck", "--target", "es2022", "--module", "nodenext"]
    command = [str(CLIENTS / "node_modules" / ".bin" / "tsc"), *flags, "forms.ts"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
@pytest.mark.skipif(not (CLIENTS / "node_modules" / ".bin" / "tsc").exists(), reason="npm did not install the client")
def test_requests_fit_the_types_of_the_client_for_javascript(tmp_path):
    values = forms()
    for name in ("right", "wrong"):
        (tmp_path / name).mkdir()
    done = compiled(tmp_path / "right", values)
    assert done.returncode == 0, done.stdout
    wrong = {**values["nearest"], "candidates": values["nearest"]["num_candidates"]}
    done = compiled(tmp_path / "wrong", values | {"nearest": wrong})
    assert done.returncode != 0 and "candidates" in done.stdout
