"""Fuses rankings by words and by vectors, and compares ranking methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import shoestring as ss
from shoestring_recipes.retrieval.lexical import Bm25, Index, Values, chosen, ranks

SHARES = tuple(round(0.05 * step, 2) for step in range(21))
"""Shares of BM25 in the fused score among which the best is chosen."""
PLAIN = Bm25(stem=False)
TOP = (1, 10)
"""Cutoffs of recall: numbers of best documents among which the right one has to be."""

Texts = tuple[Sequence[str], Sequence[str], Values, Values]
"""Queries, documents, and the vectors of both; the right documents come first, in the order of their queries."""


def fused(lexical: Values, dense: Values, share: float) -> Values:
    """Combine scores by words and by vectors, both (queries, documents).

    The BM25 scores of a query are divided by their maximum, so that their scale depends neither on the length of the
    query nor on the rarity of its words.

    Args:
        lexical: scores of BM25, which are 0 where no word occurs.
        dense: cosines of vectors.
        share: share of BM25, from 0 to 1.
    """
    largest = lexical.max(1, keepdims=True, initial=0)
    return share * lexical / np.where(largest > 0, largest, 1) + (1 - share) * dense


def best_share(lexical: Values, dense: Values) -> float:
    """Return the share of BM25 with the largest mean reciprocal rank of each query's own document, which has the
    query's number."""
    values = [float((1 / ranks(fused(lexical, dense, share))).mean()) for share in SHARES]
    return SHARES[int(np.argmax(values))]


@dataclass(frozen=True)
class MethodComparison:
    """Ranks of each query's document by several methods."""

    ranks: dict[str, Values]
    """Maps a method's name to the ranks, from 1, (queries,)."""
    settings: Bm25
    """Settings of BM25 that were best on validation pairs."""
    share: float
    """Share of BM25 in the fused score."""

    def recall(self, method: str, top: int) -> float:
        """Return the share of queries whose document is among the first `top`."""
        return float((self.ranks[method] <= top).mean())

    def best_lexical(self, top: int) -> str:
        """Return the name of the method without vectors that has the highest recall at `top`."""
        return max((name for name in self.ranks if name.startswith("BM25")), key=lambda name: self.recall(name, top))

    def report(self) -> dict[str, Any]:
        """Return the figures and the table of an evaluation."""
        figures = {
            f"{name}_{top}": self.recall(method, top)
            for name, method in (("fused", "fused"), ("encoder", "encoder"), ("bm25", "BM25, tuned"))
            for top in TOP
        }
        rows = tuple(
            (method, *(self.recall(method, top) for top in TOP), float((1 / places).mean()))
            for method, places in self.ranks.items()
        )
        head = ("method", *(f"recall at {top}" for top in TOP), "mean reciprocal rank")
        title = f"Queries whose text is found; BM25 tuned to {self.settings}, {self.share:.0%} of the fused score"
        return figures | {"methods": ss.Table(title=title, head=head, rows=rows)}


def compared(judged: Texts, validation: Texts) -> MethodComparison:
    """Compare BM25 without and with stemming, BM25 tuned on the validation texts, the encoder, and the fused ranking of
    the last two."""
    tuned = chosen(tuple(validation[0]), tuple(validation[1]))
    share = best_share(Index(validation[1], tuned).scores(validation[0]), validation[2] @ validation[3].T)
    lexical = {
        "BM25": PLAIN,
        "BM25, stemmed": Bm25(),
        "BM25, tuned": tuned,
    }
    scores = {name: Index(judged[1], settings).scores(judged[0]) for name, settings in lexical.items()}
    dense = judged[2] @ judged[3].T
    scores |= {"encoder": dense, "fused": fused(scores["BM25, tuned"], dense, share)}
    return MethodComparison({name: ranks(rows) for name, rows in scores.items()}, tuned, share)
