"""Elasticsearch 9 and OpenSearch 3 as search engines, through their official clients.

Each build creates an index with a new name. When the index is complete, one request moves the alias to it and removes
the former indices. An index that an interruption left incomplete is therefore never searched, and the next build
removes it.
"""

from __future__ import annotations

import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np

from shoestring.core.errors import ConfigError, DataError
from shoestring_recipes.retrieval.engines import Hits, query_terms
from shoestring_recipes.retrieval.lexical import Bm25, Values

_MOST_CANDIDATES = 10_000
"""Maximum number of candidates of a search by vectors in Elasticsearch."""


class _SearchServer(ABC):
    """Base class of the engines for both servers.

    Args:
        url: address of the server. name: alias of the index.
        settings: settings of BM25, which are fixed when an index is built.
        connection: further arguments of the client, such as `basic_auth` or `ca_certs`.
    """

    package, client_class = "", ""
    """Names of the client's package and class."""
    _error_classes: tuple[str, ...] = ()
    """Names of the client's exceptions."""
    _index_settings: Mapping[str, Any] = {}
    """Settings of an index that only this server has."""
    _vector_field: Mapping[str, Any] = {}
    """Mapping of the field with the documents' vectors, without the number of dimensions."""
    _dimensions = ""
    """Key of that mapping for the number of dimensions."""

    def __init__(self, url: str, name: str, settings: Bm25 | None = None, **connection: Any) -> None:
        try:
            module = import_module(self.package)
            self._helpers: Any = import_module(f"{self.package}.helpers")
        except ImportError as error:
            hint = f"pip install {self.package.replace('opensearchpy', 'opensearch-py')}"
            raise ConfigError(f"the engine `{type(self).__name__}` needs its client", hint=hint) from error
        self.url, self.name, self.settings = url, name, settings or Bm25()
        self._client = getattr(module, self.client_class)(url, **connection)
        own = (getattr(module, name) for name in self._error_classes)
        self._errors: tuple[type[Exception], ...] = (*own, self._helpers.BulkIndexError)

    @abstractmethod
    def query_nearest(self, vector: list[float], count: int) -> dict[str, Any]:
        """Return the server's query for the documents with the largest cosines."""

    def build(self, documents: Iterable[str], vectors: Values) -> None:
        """See `SearchEngine`.

        Raises:
            DataError: the server cannot be reached or refuses a request; the old index stays.
        """
        index = f"{self.name}-{secrets.token_hex(4)}"
        with self._talking():
            pattern = re.compile(re.escape(self.name) + "-[0-9a-f]{8}")
            former = sorted(filter(pattern.fullmatch, self._client.indices.get_alias(index=f"{self.name}-*")))
            text_field = {"type": "text", "analyzer": "words", "similarity": "tuned"}
            vector_field = {**self._vector_field, self._dimensions: vectors.shape[1]}
            mappings = {"dynamic": "strict", "properties": {"text": text_field, "vector": vector_field}}
            self._client.indices.create(index=index, body={"settings": self._settings(), "mappings": mappings})

            def actions() -> Iterator[dict[str, Any]]:
                for number, (text, vector) in enumerate(zip(documents, vectors, strict=True)):
                    # A vector of zeros has no cosine, so it is left out.
                    shown = {"vector": vector.astype(float).tolist()} if vector.any() else {}
                    yield {"_index": index, "_id": str(number), "_source": {"text": text, **shown}}

            try:
                self._helpers.bulk(self._client, actions())
                self._client.indices.refresh(index=index)
                moved = [{"add": {"index": index, "alias": self.name}}]
                removed = [{"remove_index": {"index": name}} for name in former]
                self._client.indices.update_aliases(body={"actions": moved + removed})
            except BaseException:
                self._client.indices.delete(index=index)
                raise

    def _settings(self) -> dict[str, Any]:
        filters = ["lowercase", *(["english_stems"] if self.settings.stem else [])]
        analysis = {
            "filter": {"english_stems": {"type": "stemmer", "language": "porter2"}},
            "analyzer": {"words": {"type": "custom", "tokenizer": "standard", "filter": filters}},
        }
        similarity = {"tuned": {"type": "BM25", "k1": self.settings.k1, "b": self.settings.b}}
        return {"index": {**self._index_settings, "similarity": similarity, "analysis": analysis}}

    def by_words(self, queries: Sequence[str], count: int) -> list[Hits]:
        """See `SearchEngine`."""
        words = [" ".join(query_terms(query, stem=False)) for query in queries]
        return self._answers([{"query": {"match": {"text": {"query": text}}}, "size": count} for text in words])

    def by_vectors(self, vectors: Values, count: int) -> list[Hits]:
        """See `SearchEngine`; the servers search approximately."""
        searches = [
            self.query_nearest(vector.astype(float).tolist(), count) if vector.any() else {"query": {"match_none": {}}}
            for vector in vectors
        ]
        return self._answers(searches, lambda score: 2 * score - 1)  # both servers return (1 + cosine) / 2

    def _answers(
        self, searches: Sequence[dict[str, Any]], scale: Callable[[Values], Values] = lambda score: score
    ) -> list[Hits]:
        lines = [line for search in searches for line in ({"index": self.name}, {**search, "_source": False})]
        with self._talking():
            responses = self._client.msearch(body=lines)["responses"] if lines else []
        answers = []
        for response in responses:
            if "error" in response:
                raise DataError(f"`{self.url}` refused a search: {str(response['error'])[:200]}")
            rows = [(int(hit["_id"]), float(hit["_score"])) for hit in response["hits"]["hits"]]
            scores = scale(np.array([score for _, score in rows], np.float32))
            answers.append(Hits(np.array([number for number, _ in rows], np.int64), scores))
        return answers

    @contextmanager
    def _talking(self) -> Iterator[None]:
        """Context in which errors of the client are raised as a DataError of one line."""
        try:
            yield
        except self._errors as error:
            reason = " ".join(str(error).split())[:200]
            raise DataError(f"`{self.url}`: {reason}", hint="check the server and its version") from error


class Elasticsearch(_SearchServer):
    """An index in Elasticsearch 9. See `_SearchServer` for the arguments."""

    package, client_class = "elasticsearch", "Elasticsearch"
    _error_classes = ("ApiError", "TransportError")
    _vector_field: Mapping[str, Any] = {"type": "dense_vector", "index": True, "similarity": "cosine"}
    _dimensions = "dims"

    def query_nearest(self, vector: list[float], count: int) -> dict[str, Any]:
        candidates = min(_MOST_CANDIDATES, 10 * count)
        nearest = {"field": "vector", "query_vector": vector, "k": count, "num_candidates": candidates}
        return {"knn": nearest, "size": count}


class OpenSearch(_SearchServer):
    """An index in OpenSearch 3. See `_SearchServer` for the arguments."""

    package, client_class = "opensearchpy", "OpenSearch"
    _error_classes = ("OpenSearchException",)
    _index_settings: Mapping[str, Any] = {"knn": True}
    _vector_field: Mapping[str, Any] = {
        "type": "knn_vector",
        "method": {"name": "hnsw", "engine": "lucene", "space_type": "cosinesimil"},
    }
    _dimensions = "dimension"

    def query_nearest(self, vector: list[float], count: int) -> dict[str, Any]:
        return {"query": {"knn": {"vector": {"vector": vector, "k": count}}}, "size": count}
