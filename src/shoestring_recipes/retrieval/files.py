"""Reads descriptions from files, for `run.read_file`, and finds the words that they describe, for `run.predict`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from shoestring.core.errors import DataError
from shoestring_recipes.retrieval.dictionaries import Pair, pairs
from shoestring_recipes.retrieval.fusion import fused
from shoestring_recipes.retrieval.lexical import Bm25, Index
from shoestring_recipes.retrieval.pages import paragraphs

SHARE = 0.5
"""Share of BM25 in the fused score."""
SHOWN = 3
"""Number of words shown for a file."""


def read(path: Path) -> dict[str, Any]:
    """Read the text of a file: plain text or HTML, also compressed by gzip.

    Raises:
        DataError: the file is not a text or has no words.
    """
    text = "\n".join(paragraphs(path))
    if not any(map(str.isalnum, text)):
        raise DataError(f"`{path.name}` has no words")
    return {"text": text}


def describe(output: dict[str, Tensor], batch: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Return the words of GCIDE that each text describes best, by the fused ranking: a row for each word, with its
    score, which is 1 at most, and the beginning of its entry."""
    entries, index = _entries()
    lexical = index.scores(batch["text"])
    dense = (output["query"] @ output["entries"].T).float().cpu().numpy()
    scores = fused(lexical, dense, SHARE)
    best = (-scores).argsort(1, kind="stable")[:, :SHOWN]
    return [
        [
            {
                "place": place + 1,
                "word": entries[number].headword,
                "score": float(row[number]),
                "entry": entries[number].document[:120],
            }
            for place, number in enumerate(numbers)
        ]
        for row, numbers in zip(scores, best.tolist(), strict=True)
    ]


@cache
def _entries() -> tuple[tuple[Pair, ...], Index]:
    """The dictionary entries that are searched, and their index."""
    return pairs(), Index([pair.document for pair in pairs()], Bm25())
