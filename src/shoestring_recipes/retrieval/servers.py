"""Elasticsearch 9 and OpenSearch 3 as search engines, through their official clients.

An index gets a name of its own, and an alias points to it. When it is whole, one request moves the alias and removes
the former indices, so an index that an interruption left unfinished is never searched, and the next one removes it.
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
    """What the two servers have in common.

    Args:
        url: address of the server. name: alias of the index.
        settings: settings of BM25, which are fixed when an index is built.
        connection: further arguments of the client, such as `basic_auth` or `ca_certs`.
    """

    package, client_class = "", ""
    """Name of the client's package and of its class."""
    _index_settings: Mapping[str, Any] = {}
    """Settings of an index that only this server has."""

    def __init__(self, url: str, name: str, settings: Bm25 | None = None, **connection: Any) -> None:
        try:
            module = import_module(self.package)
            self._helpers: Any = import_module(f"{self.package}.helpers")
        except ImportError as error:
            hint = f"pip install {self.package.replace('opensearchpy', 'opensearch-py')}"
            raise ConfigError(f"the engine `{type(self).__name__}` needs its client", hint=hint) from error
        self.url, self.name, self.settings = url, name, settings or Bm25()
        self._client = getattr(module, self.client_class)(url, **connection)
        self._errors: tuple[type[Exception], ...] = self._errors_of(module)

    @abstractmethod
    def _errors_of(self, module: Any) -> tuple[type[Exception], ...]:
        """Exceptions of the client."""

    @abstractmethod
    def _create(self, index: str, settings: dict[str, Any], mappings: dict[str, Any]) -> None:
        """Create an index."""

    @abstractmethod
    def _move(self, actions: list[dict[str, Any]]) -> None:
        """Change aliases and remove indices in one request."""

    @abstractmethod
    def _ask(self, searches: list[dict[str, Any]]) -> Any:
        """Send several searches in one request."""

    @abstractmethod
    def _vector_field(self, dimensions: int) -> dict[str, Any]:
        """Description of the field with the documents' vectors."""

    @abstractmethod
    def _nearest(self, vector: list[float], count: int) -> dict[str, Any]:
        """Search for the documents with the largest cosines."""

    def build(self, documents: Iterable[str], vectors: Values) -> None:
        """See `SearchEngine`.

        Raises:
            DataError: the server cannot be reached or refuses a request; the old index stays.
        """
        index = f"{self.name}-{secrets.token_hex(4)}"
        with self._talking():
            pattern = re.compile(re.escape(self.name) + "-[0-9a-f]{8}")
            former = sorted(filter(pattern.fullmatch, self._client.indices.get_alias(index=f"{self.name}-*")))
            self._create(index, self._settings(), self._mappings(vectors.shape[1]))
            try:
                self._helpers.bulk(self._client, self._actions(index, documents, vectors))
                self._client.indices.refresh(index=index)
                moved = [{"add": {"index": index, "alias": self.name}}]
                self._move(moved + [{"remove_index": {"index": name}} for name in former])
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

    def _mappings(self, dimensions: int) -> dict[str, Any]:
        text = {"type": "text", "analyzer": "words", "similarity": "tuned"}
        return {"dynamic": "strict", "properties": {"text": text, "vector": self._vector_field(dimensions)}}

    def _actions(self, index: str, documents: Iterable[str], vectors: Values) -> Iterator[dict[str, Any]]:
        """Yield what is to be indexed; a vector of zeros, which has no cosine, is left out."""
        for number, (text, vector) in enumerate(zip(documents, vectors, strict=True)):
            shown = {"vector": vector.astype(float).tolist()} if vector.any() else {}
            yield {"_index": index, "_id": str(number), "_source": {"text": text, **shown}}

    def by_words(self, queries: Sequence[str], count: int) -> list[Hits]:
        """See `SearchEngine`."""
        words = [" ".join(query_terms(query, stem=False)) for query in queries]
        return self._answers([{"query": {"match": {"text": {"query": text}}}, "size": count} for text in words])

    def by_vectors(self, vectors: Values, count: int) -> list[Hits]:
        """See `SearchEngine`; the servers search approximately."""
        searches = [
            self._nearest(vector.astype(float).tolist(), count) if vector.any() else {"query": {"match_none": {}}}
            for vector in vectors
        ]
        return self._answers(searches, lambda score: 2 * score - 1)  # both servers return (1 + cosine) / 2

    def _answers(
        self, searches: Sequence[dict[str, Any]], scale: Callable[[Values], Values] = lambda score: score
    ) -> list[Hits]:
        lines = [line for search in searches for line in ({"index": self.name}, {**search, "_source": False})]
        with self._talking():
            responses = self._ask(lines)["responses"] if lines else []
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
        """Raise errors of the client as a DataError of one line."""
        try:
            yield
        except self._errors as error:
            reason = " ".join(str(error).split())[:200]
            raise DataError(f"`{self.url}`: {reason}", hint="check the server and its version") from error


class Elasticsearch(_SearchServer):
    """An index in Elasticsearch 9. See `_SearchServer` for the arguments."""

    package, client_class = "elasticsearch", "Elasticsearch"

    def _errors_of(self, module: Any) -> tuple[type[Exception], ...]:
        return module.ApiError, module.TransportError, self._helpers.BulkIndexError

    def _create(self, index: str, settings: dict[str, Any], mappings: dict[str, Any]) -> None:
        self._client.indices.create(index=index, settings=settings, mappings=mappings)

    def _move(self, actions: list[dict[str, Any]]) -> None:
        self._client.indices.update_aliases(actions=actions)

    def _ask(self, searches: list[dict[str, Any]]) -> Any:
        return self._client.msearch(searches=searches)

    def _vector_field(self, dimensions: int) -> dict[str, Any]:
        return {"type": "dense_vector", "dims": dimensions, "index": True, "similarity": "cosine"}

    def _nearest(self, vector: list[float], count: int) -> dict[str, Any]:
        candidates = min(_MOST_CANDIDATES, 10 * count)
        nearest = {"field": "vector", "query_vector": vector, "k": count, "num_candidates": candidates}
        return {"knn": nearest, "size": count}


class OpenSearch(_SearchServer):
    """An index in OpenSearch 3. See `_SearchServer` for the arguments."""

    package, client_class = "opensearchpy", "OpenSearch"
    _index_settings: Mapping[str, Any] = {"knn": True}

    def _errors_of(self, module: Any) -> tuple[type[Exception], ...]:
        return (module.exceptions.OpenSearchException,)

    def _create(self, index: str, settings: dict[str, Any], mappings: dict[str, Any]) -> None:
        self._client.indices.create(index=index, body={"settings": settings, "mappings": mappings})

    def _move(self, actions: list[dict[str, Any]]) -> None:
        self._client.indices.update_aliases(body={"actions": actions})

    def _ask(self, searches: list[dict[str, Any]]) -> Any:
        return self._client.msearch(body=searches)

    def _vector_field(self, dimensions: int) -> dict[str, Any]:
        method = {"name": "hnsw", "engine": "lucene", "space_type": "cosinesimil"}
        return {"type": "knn_vector", "dimension": dimensions, "method": method}

    def _nearest(self, vector: list[float], count: int) -> dict[str, Any]:
        return {"query": {"knn": {"vector": {"vector": vector, "k": count}}}, "size": count}
