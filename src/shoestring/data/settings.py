"""Settings of the corpus; this module imports neither torch nor numpy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any, Literal

from shoestring.core.errors import ConfigError

BYTES = 256
"""Number of byte values: the smallest alphabet a byte-level tokenizer can have, before the end-of-text token."""


class ForClients:
    """Base class of features that train clients in turn; `data.clients` needs one of them."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """The corpus: how it is read, cut into tokens and split into training and held-out text."""

    form: Literal["text", "chat", "preference", "rated"] = "text"
    """Form of the records. `text`: all of the text is learnt. `chat`: conversations in any of the known formats
    (messages, ShareGPT, Alpaca, prompt and completion), which the model's chat template renders; only the assistant's
    messages are learnt. `preference`: pairs of a chosen and a rejected answer, for [preference.dpo], [preference.simpo]
    and [preference.orpo]. `rated`: single answers that are desirable or not, for [preference.kto]. Several chats or
    answers are packed into one sample and do not attend to each other."""
    field: str = ""
    """Name of the field of a record that holds the text or the messages; defaults to `text`, and for chats to the field
    of the record's format. Chats whose fields have other names need a mapping such as `prompt=question,
    completion=answer`."""
    template: str = ""
    """Chat template: `plain` (roles on separate lines, and the end-of-text token after answers), `chatml`, or the path
    of a Jinja file; it is saved with the trained model. Defaults to the model's own template; for a model without a
    template, to `chatml` if the tokenizer has ChatML's tokens, otherwise to `plain`."""
    tokenizer: str = "bpe"
    """Tokenizer: `bpe` trains a byte-level BPE on the corpus, `bytes` makes each byte a token, `model` takes the
    tokenizer of the `hf:` model or of the model's folder, and anything else is the path of a tokenizer.json."""
    vocabulary: int = 2048
    """Tokens in the vocabulary of a `bpe` tokenizer: 256 bytes, the end-of-text token and at least one merge. A larger
    vocabulary shortens the text and enlarges the embedding."""
    sequence: int = 256
    """Tokens in a sample: the length of context that the model trains on. Longer samples take more memory per step. 0
    uses the model's context length, but at most 1,024 tokens, or 2,048 for pairs of answers."""
    held_out: float = 0.05
    """Fraction of the documents held out of training for evaluation, between 0 and 1. Held-out documents are not
    trained on. With 0, all chats are trained on, and evaluation uses the same chats."""
    weights: tuple[float, ...] = ()
    """Proportions in which the sources of a mixture are sampled, one number per source; they need not add up to 1.
    Without weights, every sample of every source is used once per epoch."""
    workers: int = 0
    """Data loading processes of each rank; 0 loads in the training process. Random draws of a data set of
    your own (torch's CPU generator, NumPy's, Python's) depend on the seed and the sample's position alone, not on the
    number of workers."""
    arguments: Mapping[str, Any] = dataclass_field(default_factory=dict)
    """Arguments of the function that `run.data` names: `[data.arguments]` with `fold = 2` calls it with `fold=2`."""
    per_rank: bool = False
    """Whether each rank trains on separate data, such as the data of one client. `run.data` then names a function that
    is called with (rank, number of ranks) and returns the rank's data, which has its own order, position and length. An
    epoch is one pass over the largest rank's data."""
    clients: bool = False
    """Whether the data belongs to clients that train in turn, several on each rank, as federated learning does.
    `run.data` then names a function that returns a dict of clients' names and data sets, or a pair of such a dict and
    the held-out samples. Each client has its own order, position and length, and trains on its rank's share of
    `run.batch` samples a step."""
    absent: float = 0.0
    """Probability with which a client is absent from a round; `run.seed` seeds the draws. An absent client is skipped,
    and continues at its own position in a later round. A larger value makes rounds shorter and less representative."""
    cache_memory: float = 0.0
    """GiB of memory for the samples of a data set of your own that is slow to read, shared by the ranks of a host."""
    cache_disk: float = 0.0
    """GiB on a local disk for the samples of a data set of your own that is slow to read, shared by the ranks of a
    host."""
    cache_folder: str = ""
    """Folder for `cache_disk`; defaults to a folder in ~/.cache, which later runs use again."""

    def __post_init__(self) -> None:
        smallest, cached = BYTES + 2, self.cache_memory or self.cache_disk
        none = "0 holds out none" if self.form == "chat" else "0.001 holds out one of few"
        faults = (
            (self.template and self.form == "text", "template only applies to chats", 'set data.form = "chat"'),
            (
                self.tokenizer == "bpe" and self.vocabulary < smallest,
                f"vocabulary is {self.vocabulary}, below {smallest}: 256 bytes, end-of-text and one merge",
                'raise it, or set data.tokenizer = "bytes"',
            ),
            (
                self.sequence < 0,
                f"sequence is {self.sequence}",
                "give the tokens of a sample, or 0 for what the model reads",
            ),
            (
                not 0 <= self.held_out < 1 or (self.held_out == 0 and self.form != "chat"),
                f"held_out is {self.held_out}",
                f"give a fraction between 0 and 1: {none}",
            ),
            (
                not all(0 < weight < math.inf for weight in self.weights),
                f"weights is {list(self.weights)}",
                "give a positive number for each source",
            ),
            (
                self.weights and min(self.weights) < 1e-4 * sum(self.weights),
                f"weights is {list(self.weights)}, of which one is below 1/10,000 of the sum",
                "remove that source, or give it more",
            ),
            (
                not (0 <= self.cache_memory < math.inf and 0 <= self.cache_disk < math.inf),
                "cache_memory and data.cache_disk are sizes in GiB",
                "give 0 or a positive number",
            ),
            (
                self.per_rank and cached,
                "per_rank cannot be combined with a cache that the ranks of a host share",
                "remove data.cache_memory and data.cache_disk",
            ),
            (
                self.clients and (self.per_rank or self.workers or cached),
                "clients cannot be combined with another way to load data",
                "remove data.per_rank, data.workers and the caches: every client has a loader in the training process",
            ),
            (not 0 <= self.absent < 1, f"absent is {self.absent}", "give a probability from 0 to below 1"),
            (
                self.absent and not self.clients,
                "absent is for clients that train in turn",
                "set data.clients, or remove it",
            ),
            (self.workers < 0, f"workers is {self.workers}", "give 0 or more processes"),
        )
        for wrong, message, hint in faults:
            if wrong:
                raise ConfigError(f"data.{message}", hint=hint)

    @property
    def record_field(self) -> str:
        """Name of the field that holds the text or the messages; empty for chats if the record's format decides."""
        return self.field or ("text" if self.form == "text" else "")

    def longest(self, context: int | None) -> int:
        """Tokens in a sample if `sequence` is 0, for a model that reads `context` tokens (None: any number)."""
        usual = 2048 if self.form == "preference" else 1024
        return min(context or usual, usual)

    def check_weights(self, sources: int) -> None:
        """Raise ConfigError unless there is one weight a source, or none."""
        if len(self.weights) not in (0, sources):
            raise ConfigError(
                f"`data.weights` has {len(self.weights)} entries for {sources} sources",
                hint="give one weight for each source, or none",
            )
