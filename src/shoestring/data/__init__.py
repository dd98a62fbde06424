"""Corpora, tokenizers and the resumable loader.

`corpus.prepare` turns a source of text into token files, `tokens.TokenDataset` reads them, `loader.Loader` feeds them
to a training loop in an order that is a function of the seed alone, and `baselines` says what compressors and an
n-gram model make of the same held-out text. This module holds the settings and imports neither torch nor numpy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoestring.core.errors import ConfigError

BYTES = 256
"""Number of byte values: the smallest alphabet a byte-level tokenizer can have, before the end-of-text token."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """How the corpus is read, cut into tokens and split; the `[data]` table of the run file."""

    field: str = "text"
    """Field of a .jsonl line, or column of a .parquet file or of a Hugging Face data set, that holds the text."""
    tokenizer: str = "bpe"
    """`bpe` (byte-level, trained on the corpus), `bytes`, `model` (the tokenizer of an `hf:` model), or the path of a
    tokenizer.json."""
    vocabulary: int = 2048
    """Size of the trained vocabulary: 256 bytes, the end-of-text token and at least one merge."""
    sequence: int = 256
    """Tokens in a sample."""
    held_out: float = 0.05
    """Share of the documents kept out of training, between 0 and 1."""
    weights: tuple[float, ...] = ()
    """Share of the training samples that each source of a mixture provides, in any unit; without weights every sample
    of every source comes once an epoch."""
    workers: int = 0
    """Loader processes; 0 loads in the training process."""

    def __post_init__(self) -> None:
        smallest = BYTES + 2
        if self.tokenizer == "bpe" and self.vocabulary < smallest:
            raise ConfigError(
                f"data.vocabulary is {self.vocabulary}, below {smallest}: 256 bytes, end-of-text and one merge",
                hint='raise it, or set data.tokenizer = "bytes"',
            )
        if self.sequence < 1:
            raise ConfigError(f"data.sequence is {self.sequence}", hint="give at least 1 token a sample")
        if not 0 < self.held_out < 1:
            raise ConfigError(f"data.held_out is {self.held_out}", hint="give a share between 0 and 1, such as 0.05")
        if not all(0 < weight < math.inf for weight in self.weights):
            raise ConfigError(f"data.weights is {list(self.weights)}", hint="give a positive number for each source")
        if self.weights and min(self.weights) < 1e-4 * sum(self.weights):
            raise ConfigError(
                f"data.weights is {list(self.weights)}, of which one is below 1/10,000 of all",
                hint="remove that source, or give it more",
            )
        if self.workers < 0:
            raise ConfigError(f"data.workers is {self.workers}", hint="give 0 or more processes")
