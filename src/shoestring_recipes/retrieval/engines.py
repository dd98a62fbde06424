"""Search engines that rank many documents by words or by vectors, and a search that fuses the two rankings.

`Tantivy` is embedded and stores its index in a folder. `servers.py` has engines for Elasticsearch and OpenSearch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import tantivy
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from shoestring.core.errors import ConfigError, DataError
from shoestring.storage import foreign
from shoestring.storage.whole import recover, replaced_folder
from shoestring_recipes.retrieval.fusion import fused
from shoestring_recipes.retrieval.lexical import Values
from shoestring_recipes.retrieval.words import LONGEST_WORD, terms

MOST_TERMS = 256
"""Maximum number of words of a query; the rest of a longer query is ignored."""
_HEAP = 64 << 20
"""Memory budget of tantivy's index writer, in bytes."""
_VECTORS = "vectors.safetensors"


class Hits(NamedTuple):
    """The best documents for a query, the best first."""

    numbers: Values
    """Numbers of the documents, counted from 0 in the order of indexing; int64 (N,)."""
    scores: Values
    """Scores of the documents, float32 (N,)."""


class SearchEngine(Protocol):
    """A search engine with an index of documents."""

    def build(self, documents: Iterable[str], vectors: Values) -> None:
        """Index documents in place of all former ones. Searches use the former index until the new one is complete.

        Args:
            vectors: a vector of norm 1 for each document, zeros for a document without words; (documents, dimensions).
        """

    def by_words(self, queries: Sequence[str], count: int) -> list[Hits]:
        """Return the documents that BM25 ranks highest for each query, `count` at most."""

    def by_vectors(self, vectors: Values, count: int) -> list[Hits]:
        """Return the documents with the largest cosines for each vector, `count` at most."""


def search(
    engine: SearchEngine, queries: Sequence[str], vectors: Values, share: float, count: int = 10, candidates: int = 100
) -> list[Hits]:
    """Return the best documents for each query by the fused ranking; see `fusion.fused`.

    Candidates are the best documents by words and the best by vectors. A candidate that is missing from one ranking
    gets the lowest score in that ranking, or 0 if that ranking has fewer than `candidates` documents.

    Args:
        vectors: vectors of the queries, (queries, dimensions). share: share of BM25 in the fused score.
        candidates: number of candidates of each kind.
    """
    kinds = zip(engine.by_words(queries, candidates), engine.by_vectors(vectors, candidates), strict=True)
    answers = []
    for lists in kinds:
        numbers = np.union1d(*(hits.numbers for hits in lists))
        columns = []
        for hits in lists:
            lowest = hits.scores.min() if 0 < candidates <= len(hits.scores) else 0.0
            column = np.full(len(numbers), lowest)
            column[np.searchsorted(numbers, hits.numbers)] = hits.scores
            columns.append(column)
        lexical, dense = columns
        scores = fused(lexical[None], dense[None], share)[0]
        best = np.argsort(-scores, kind="stable")[:count]
        answers.append(Hits(numbers[best], scores[best].astype(np.float32)))
    return answers


def query_terms(query: str, stem: bool) -> list[str]:
    """Return the words of a query that are searched for, at most `MOST_TERMS`."""
    return terms(query[: 2 * LONGEST_WORD * MOST_TERMS], stem)[:MOST_TERMS]


class Tantivy:
    """An index of tantivy with the documents' vectors, in one folder, which is replaced as a whole: a process that is
    killed while it builds an index leaves the old one, or the new one.

    Args:
        folder: folder of the index, which `build` creates.
        stem: whether English words are reduced to their stems. Other settings of BM25 are fixed by tantivy: k1 is 1.2,
            and b is 0.75.
    """

    def __init__(self, folder: Path, stem: bool = True) -> None:
        self.folder, self.stem = folder, stem
        self._opened: tuple[Any, Any, torch.Tensor] | None = None

    def build(self, documents: Iterable[str], vectors: Values) -> None:
        """See `SearchEngine`.

        Raises:
            DataError: the numbers of documents and vectors differ; the old index stays.
            OSError: the disk is full or failed; the old index stays.
        """
        with replaced_folder(self.folder) as folder:
            words = folder / "words"
            words.mkdir()
            writer = tantivy.Index(self._schema(), path=str(words)).writer(_HEAP, 1)
            count = 0
            for text in documents:
                writer.add_document(tantivy.Document(number=count, text=text))
                count += 1
            if count != len(vectors):
                raise DataError(f"there are {count:,} documents and {len(vectors):,} vectors")
            writer.commit()
            writer.wait_merging_threads()
            save_file({"vectors": torch.from_numpy(np.ascontiguousarray(vectors, np.float32))}, folder / _VECTORS)
        self._opened = None

    def _schema(self) -> Any:
        builder = tantivy.SchemaBuilder()
        builder.add_text_field("text", tokenizer_name="en_stem" if self.stem else "default", index_option="freq")
        builder.add_integer_field("number", fast=True)
        return builder.build()

    def _open(self) -> tuple[Any, Any, torch.Tensor]:
        """Open the index at the first search; returns its schema, its searcher and the documents' vectors."""
        if self._opened is None:
            recover(self.folder)
            try:
                index = tantivy.Index(self._schema(), path=str(self.folder / "words"))
                with foreign.open_safetensors(self.folder / _VECTORS) as file:
                    vectors = file.get_tensor("vectors")
            except (OSError, ValueError, SafetensorError) as error:
                reason = str(error).splitlines()[0]
                hint = "build it first, with the same `stem`"
                raise ConfigError(f"`{self.folder}` holds no such index: {reason}", hint=hint) from error
            self._opened = index.schema, index.searcher(), vectors
        return self._opened

    def __len__(self) -> int:
        return self._open()[1].num_docs

    def by_words(self, queries: Sequence[str], count: int) -> list[Hits]:
        """See `SearchEngine`."""
        schema, searcher, _ = self._open()
        answers = []
        for query in queries:
            clauses = [
                (tantivy.Occur.Should, tantivy.Query.term_query(schema, "text", term, "freq"))
                for term in query_terms(query, self.stem)
            ]
            best = searcher.search(tantivy.Query.boolean_query(clauses), count, count=False).hits if clauses else []
            numbers = searcher.fast_field_values("number", [address for _, address in best])
            answers.append(Hits(np.array(numbers, np.int64), np.array([score for score, _ in best], np.float32)))
        return answers

    def by_vectors(self, vectors: Values, count: int) -> list[Hits]:
        """See `SearchEngine`; compares with the vectors of all documents."""
        own = self._open()[2]
        top = (torch.from_numpy(np.ascontiguousarray(vectors, np.float32)) @ own.T).topk(min(count, len(own)))
        return [Hits(*pair) for pair in zip(top.indices.numpy(), top.values.numpy(), strict=True)]
