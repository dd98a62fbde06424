"""BM25 in memory, which scores all documents for many queries at once, and tuning of BM25 on pairs of texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoestring.core.errors import ConfigError
from shoestring_recipes.retrieval.words import terms

try:
    from scipy import sparse
except ImportError as error:
    raise ConfigError("the recipe `retrieval` needs scipy", hint='pip install "shoestring[retrieval]"') from error

Values = NDArray[Any]
_CHUNK = 512
"""Number of queries that are scored at a time."""


@dataclass(frozen=True)
class Bm25:
    """Settings of BM25 (Robertson and Zaragoza, 2009).

    The defaults of `k1` and `b` are those of Lucene, on which Elasticsearch and OpenSearch build, and of tantivy.
    """

    k1: float = 1.2
    """How much repetitions of a word in a document count; 0 counts a word once."""
    b: float = 0.75
    """Strength of the normalisation by document length, from 0 to 1."""
    stem: bool = True
    """Whether English words are reduced to their stems."""

    def __str__(self) -> str:
        return f"k1 {self.k1:g}, b {self.b:g}, {'with' if self.stem else 'without'} stemming"


GRID = tuple(Bm25(*values) for values in product((0.4, 0.8, 1.2, 1.6, 2.4), (0.0, 0.25, 0.5, 0.75, 1.0), (False, True)))
"""Settings among which `chosen` takes the best."""


class Counted:
    """Counts of words in documents.

    Args:
        documents: the words of each document.
    """

    def __init__(self, documents: Sequence[Sequence[str]]) -> None:
        self.numbers: dict[str, int] = {}
        """Maps words to columns."""
        for words in documents:
            for word in words:
                self.numbers.setdefault(word, len(self.numbers))
        self.counts = self.rows(documents)
        """Counts, (documents, words), as a sparse matrix."""

    def rows(self, texts: Sequence[Sequence[str]]) -> Any:
        """Return the counts of the known words in texts, (texts, words), as a sparse matrix."""
        columns = [[self.numbers[word] for word in words if word in self.numbers] for words in texts]
        ends = np.cumsum([0, *map(len, columns)])
        flat = np.fromiter((number for row in columns for number in row), np.int64, int(ends[-1]))
        shape = len(texts), max(1, len(self.numbers))
        matrix = sparse.csr_matrix((np.ones(len(flat), np.float32), flat, ends), shape)
        matrix.sum_duplicates()
        return matrix

    def weights(self, settings: Bm25) -> Any:
        """Return what each word of a document adds to the score of a query that has the word: a sparse matrix (words,
        documents)."""
        counts = self.counts.tocoo()
        lengths = np.asarray(self.counts.sum(1)).ravel()
        frequency = np.bincount(counts.col, minlength=counts.shape[1])
        rarity = np.log1p((counts.shape[0] - frequency + 0.5) / (frequency + 0.5))
        usual = max(lengths.mean(), 1e-9) if len(lengths) else 1.0
        room = settings.k1 * (1 - settings.b + settings.b * lengths / usual)
        values = rarity[counts.col] * counts.data / (counts.data + room[counts.row])
        return sparse.csr_matrix((values.astype(np.float32), (counts.col, counts.row)), counts.shape[::-1])


class Index:
    """An index for searching documents by BM25.

    Args:
        documents: texts.
        settings: settings of BM25.
    """

    def __init__(self, documents: Sequence[str], settings: Bm25) -> None:
        self.settings = settings
        self._counted = Counted([terms(text, settings.stem) for text in documents])
        self._weights = self._counted.weights(settings)

    def scores(self, queries: Sequence[str]) -> Values:
        """Return the score of each document for each query, float32 (queries, documents); it is 0 where no word of the
        query occurs."""
        rows = self._counted.rows([terms(text, self.settings.stem) for text in queries])
        parts = [(rows[start : start + _CHUNK] @ self._weights).toarray() for start in range(0, len(queries), _CHUNK)]
        return np.concatenate(parts) if parts else np.zeros((0, self._weights.shape[1]), np.float32)


@lru_cache(4)
def chosen(queries: tuple[str, ...], documents: tuple[str, ...], grid: tuple[Bm25, ...] = GRID) -> Bm25:
    """Return the settings with the largest mean reciprocal rank of each query's own document, which has the query's
    number."""
    best, most = grid[0], -1.0
    for stem in sorted({settings.stem for settings in grid}):
        counted = Counted([terms(text, stem) for text in documents])
        rows = counted.rows([terms(text, stem) for text in queries])
        for settings in (settings for settings in grid if settings.stem == stem):
            value = float((1 / ranks((rows @ counted.weights(settings)).toarray())).mean())
            if value > most:
                best, most = settings, value
    return best


def ranks(scores: Values) -> Values:
    """Return the rank, from 1, of each query's own document, which has the query's number. Among equal scores the own
    document comes last, so that constant scores find nothing.

    Args:
        scores: scores, (Q, N) with N ≥ Q.
    """
    own = np.take_along_axis(scores, np.arange(len(scores))[:, None], 1)
    return (scores >= own).sum(1)


def hardest(shards: Iterable[Values], count: int) -> Values:
    """Return the numbers of the documents that are ranked highest apart from each query's own, (N, count).

    Args:
        shards: scores of consecutive groups of queries and of the documents with the same numbers, (S, S) each. A group
            has more than `count` documents.
    """
    parts, first = [], 0
    for scores in shards:
        scores = np.where(np.eye(len(scores), dtype=bool), -np.inf, scores)
        top = np.argpartition(-scores, count - 1, 1)[:, :count]
        order = np.argsort(-np.take_along_axis(scores, top, 1), 1, kind="stable")
        parts.append(first + np.take_along_axis(top, order, 1))
        first += len(scores)
    return np.concatenate(parts)
