"""Runs passes of a model over rows of the cache; a pass that fails is repeated for each row alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from traceback import clear_frames

import torch
from torch import Tensor

from shoestring.core.errors import ConfigError
from shoestring.decode.adapter import Adapter, Wanted
from shoestring.decode.drafters.base import Drafter
from shoestring.decode.request import Row
from shoestring.decode.speculation import DraftCounts
from shoestring.models.cache import KVCache

log = logging.getLogger("shoestring")

Finish = Callable[[], None]
"""Applies the results of a pass to its rows."""
Pass = Callable[[list[Row]], Finish]
"""Computes a pass over some rows, and changes nothing but the cache and the drafter."""


@dataclass
class Counts:
    """Counters of the work that an engine has done."""

    passes: int = 0
    """Number of decoding passes, each over all active rows."""
    chunks: int = 0
    """Number of passes that read prompts, each over chunks of one or several prompts."""
    generated: int = 0
    """Tokens generated."""
    read: int = 0
    """Number of prompt tokens that the model has read."""
    reused: int = 0
    """Number of prompt tokens that were taken from the cache instead of being read."""
    failed: int = 0
    """Number of passes that raised an error; a failed pass that is repeated text by text counts once."""
    drafts: DraftCounts = field(default_factory=DraftCounts)
    """Counters of speculation."""

    def reset(self) -> None:
        """Set all counters to zero."""
        vars(self).update(vars(Counts()) | {"drafts": self.drafts})
        vars(self.drafts).update(vars(DraftCounts()))


class RowPasses:
    """Runs passes over rows of one cache; the rows must be in the order of their slots."""

    def __init__(self, model: Adapter, cache: KVCache, drafter: Drafter | None, counts: Counts) -> None:
        self.model, self.cache, self.drafter, self.counts = model, cache, drafter, counts

    def run(self, rows: list[Row], compute: Pass) -> Iterator[tuple[Row, Exception]]:
        """Run a pass over some rows; if it raises an error, repeat it for each row alone.

        Yields:
            Each row whose own pass raised an error, with the error; such a row has not changed.
        """
        error = self._try(rows, compute)
        if error is None:
            return
        self.counts.failed += 1
        if len(rows) == 1:
            yield rows[0], error
            return
        log.warning("a pass over %d texts is repeated text by text, because it raised %r", len(rows), error)
        for row in rows:
            if (error := self._try([row], compute)) is not None:
                yield row, error

    def _try(self, rows: list[Row], compute: Pass) -> Exception | None:
        """Run a pass over some rows, and return the error that it raised, if any; no row has changed after an error."""
        lengths = list(self.cache.lengths)
        restore = None if self.drafter is None else self.drafter.snapshot()
        try:
            finish = compute(rows)
        except Exception as error:
            self.cache.lengths[:] = lengths
            if restore is not None:
                restore()
            clear_frames(error.__traceback__)  # frees the tensors of the pass, because memory may have run out
            return error
        finish()
        return None

    def forward(self, rows: list[Row], texts: list[list[int]], wanted: Wanted) -> list[Tensor]:
        """Run the model over the next tokens of each row, padded to equal length.

        Returns:
            For each row, the logits (T, V) after each of its tokens, or (1, V) after the last one.

        Raises:
            ConfigError: a token is not in the vocabulary, or the cache has no room for the tokens.
        """
        first, end = rows[0].slot, rows[-1].slot + 1
        counts, longest = [0] * (end - first), max(map(len, texts))
        tokens = [[0] * longest] * (end - first)
        for row, text in zip(rows, texts, strict=True):
            counts[row.slot - first] = len(text)
            # Refuse tokens outside the vocabulary; on a GPU, an index out of range would end the process.
            if self.model.vocabulary is not None and not 0 <= min(text) <= max(text) < self.model.vocabulary:
                raise ConfigError(
                    f"the text holds token {max(text, key=abs)}, but the model has {self.model.vocabulary} tokens",
                    hint="use the tokenizer that the model was trained with",
                )
            tokens[row.slot - first] = [*text, *[0] * (longest - len(text))]
        read = self.model.read
        logits = read(torch.tensor(tokens), self.cache, rows=slice(first, end), counts=counts, wanted=wanted)
        return [logits[row.slot - first, : len(text)] for row, text in zip(rows, texts, strict=True)]
