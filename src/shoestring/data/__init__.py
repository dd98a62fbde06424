"""Corpora, tokenizers and the resumable loader.

`together.prepare` turns sources of text into token files, once for all ranks, `tokens.TokenDataset` reads them, and
`loader.Loader` yields their batches in an order that depends on the seed alone. `baselines` measures what compressors
and an n-gram model reach on the same held-out text. This module holds the settings and imports neither torch nor numpy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from shoestring.core.errors import ConfigError

BYTES = 256
"""Number of byte values: the smallest alphabet a byte-level tokenizer can have, before the end-of-text token."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """The corpus: how it is read, cut into tokens and split into training and held-out text."""

    form: Literal["text", "chat"] = "text"
    """Form of the records: `text` to learn as a whole, or `chat`, lists of messages with `role` and `content`, which
    the model's chat template renders; of these the model learns the assistant's messages alone. Several chats share a
    sample and do not see each other."""
    field: str = ""
    """Name of the field of a .jsonl line, or of the column of a .parquet file or Hugging Face data set, that holds the
    text or the messages; defaults to `text`, and for chats to `messages`."""
    template: str = ""
    """Path of a chat template (a Jinja file), for a model that has none; the model that is trained keeps it. Defaults
    to the model's own."""
    tokenizer: str = "bpe"
    """Tokenizer: `bpe` trains a byte-level BPE on the corpus, `bytes` makes each byte a token, `model` takes that of an
    `hf:` model or of the folder that the model is in, and anything else is the path of a tokenizer.json."""
    vocabulary: int = 2048
    """Tokens in the vocabulary of a `bpe` tokenizer: 256 bytes, the end-of-text token and at least one merge. A larger
    vocabulary shortens the text and enlarges the embedding."""
    sequence: int = 256
    """Tokens in a sample: the length of context that the model trains on. Longer samples take more memory a step."""
    held_out: float = 0.05
    """Fraction of the documents that is kept out of training for evaluation, between 0 and 1."""
    weights: tuple[float, ...] = ()
    """Proportions in which the sources of a mixture are sampled, one number each; they need not add up to 1. Without
    weights every sample of every source comes once an epoch."""
    workers: int = 0
    """Data loading processes of each rank; 0 loads in the training process."""
    cache_memory: float = 0.0
    """GiB of memory for the samples of a data set of your own that is slow to read, shared by the ranks of a host."""
    cache_disk: float = 0.0
    """GiB on a local disk for the samples of a data set of your own that is slow to read, shared likewise."""
    cache_folder: str = ""
    """Folder for `cache_disk`; defaults to one in your home folder's .cache, so that the next run finds it."""

    def __post_init__(self) -> None:
        if self.template and self.form != "chat":
            raise ConfigError("data.template is of chats", hint='set data.form = "chat"')
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
        if not (0 <= self.cache_memory < math.inf and 0 <= self.cache_disk < math.inf):
            raise ConfigError("data.cache_memory and data.cache_disk are GiB", hint="give 0 or a positive number")
        if self.workers < 0:
            raise ConfigError(f"data.workers is {self.workers}", hint="give 0 or more processes")

    @property
    def record_field(self) -> str:
        """The field of a record that is read."""
        return self.field or ("messages" if self.form == "chat" else "text")

    def check_weights(self, sources: int) -> None:
        """Raise ConfigError unless there is one weight for each of so many sources, or none."""
        if len(self.weights) not in (0, sources):
            said = f"`data.weights` has {len(self.weights)} entries for {sources} sources"
            raise ConfigError(said, hint="give one for each source, or none")
