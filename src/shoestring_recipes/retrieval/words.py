"""Splits texts into words and stems, and numbers them by hashing, so that no vocabulary has to be kept."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from shoestring.core.errors import ConfigError
from shoestring.data.tokenizer import load_tokenizer
from shoestring.models.tokenizer_files import require_tokenizer

try:
    import tantivy
except ImportError as error:
    raise ConfigError("the recipe `retrieval` needs tantivy", hint='pip install "shoestring[retrieval]"') from error

BUCKETS = 1 << 16
"""Number of different tokens: a stem's token is its hash modulo this number, so some stems share one."""
PADDING = -1
"""Token that fills short texts up to the length of the longest one of a batch."""
LONGEST_WORD = 40
"""Length in bytes from which a word is left out, as in tantivy's own analyzers, because no real word is so long."""


@cache
def _analyzer(stem: bool) -> Any:
    """The analyzer that tantivy calls `en_stem`, or `default` without stemming."""
    builder = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple())
    builder = builder.filter(tantivy.Filter.remove_long(LONGEST_WORD)).filter(tantivy.Filter.lowercase())
    return (builder.filter(tantivy.Filter.stemmer("english")) if stem else builder).build()


def terms(text: str, stem: bool = True) -> list[str]:
    """Return the words of a text in lower case, in any script that separates words; English ones may be reduced to
    their stems."""
    return _analyzer(stem).analyze(text)


class TokenReader:
    """Turns texts into tokens.

    Args:
        folder: folder of a model with a tokenizer.json; empty for hashed stems.
        length: maximum number of tokens of a text; the rest of a longer text is ignored.
    """

    def __init__(self, folder: str = "", length: int = 128) -> None:
        self.folder, self.length = folder, length
        self._tokenizer = load_tokenizer(require_tokenizer(folder)) if folder else None
        self.size = self._tokenizer.vocab_size if self._tokenizer else BUCKETS
        """Number of different tokens."""

    def tokens(self, text: str) -> Tensor:
        """Return the tokens of a text, int64 (L,); a text without words has none, unless a model's tokenizer puts
        special ones before every text."""
        shown = text[: 64 * self.length]  # tokenizing megabytes is slow, and most would be cut off
        if self._tokenizer:
            numbers = [*self._tokenizer.prefix, *self._tokenizer.encode(shown)]
        else:
            numbers = [crc32(term.encode()) % BUCKETS for term in terms(shown)]
        return torch.tensor(numbers[: self.length], dtype=torch.int64)

    def rows(self, texts: Sequence[str]) -> Tensor:
        """Return the tokens of several texts, padded to one length, (N, L)."""
        return padded(self.each(texts))

    def each(self, texts: Sequence[str]) -> list[Tensor]:
        """Return the tokens of each text; see `tokens`."""
        return [self.tokens(text) for text in texts]


def padded(rows: Sequence[Tensor]) -> Tensor:
    """Pad rows of tokens to one length, and join them: (N, L) with L ≥ 1."""
    longest = max([1, *(len(row) for row in rows)])
    joined = torch.full((len(rows), longest), PADDING)
    for row, place in zip(rows, joined, strict=True):
        place[: len(row)] = row
    return joined
