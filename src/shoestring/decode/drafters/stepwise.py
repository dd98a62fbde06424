"""Drafters that generate their drafts token by token, as plain decoding would."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoestring.decode.adapter import Adapter
from shoestring.decode.drafters.base import Drafter, DraftTokens
from shoestring.decode.drawing import Drawn, Positions, draw
from shoestring.decode.randomness import Purpose, key
from shoestring.decode.settings.generation import Speculation
from shoestring.models.cache import KVCache

if TYPE_CHECKING:
    from shoestring.decode.engine import Row


class StepwiseDrafter(Drafter):
    """Samples drafts from a model with the request's sampling settings. With invariant verification, the drafter uses
    the random numbers that plain decoding would use."""

    model: Adapter
    cache: KVCache

    def __init__(self, speculation: Speculation) -> None:
        self.invariant = speculation.verification == "invariant"

    @abstractmethod
    def _unread(self, row: Row) -> list[int]:
        """The last tokens of a text, which the cache does not hold yet; the first drafting pass reads them."""

    def draft(self, rows: Sequence[Row], counts: Sequence[int]) -> list[DraftTokens]:
        """Draft with one pass per token of the longest draft; each pass covers the rows whose drafts are not
        complete."""
        drafts: list[list[Drawn]] = [[] for _ in rows]
        asked = [index for index, count in enumerate(counts) if count]
        fresh = {index: self._unread(rows[index]) for index in asked}
        for step in range(max(counts, default=0)):
            asked = [index for index in asked if counts[index] > step]
            logits = self._read({rows[index].slot: fresh[index] for index in asked})
            positions = []
            for index in asked:
                row, drafted = rows[index], [token for drawn in drafts[index] for token in drawn.tokens]
                sampling, start = row.request.sampling, len(row.history)
                text = [*row.history, *drafted] if drafted else row.history  # the history is copied only if it must be
                if self.invariant:
                    own = key(sampling.seed, Purpose.TEXT, len(text))
                else:
                    own = key(sampling.seed, Purpose.DRAFT, len(text), start)
                positions.append(Positions(logits[row.slot], text, sampling, [own]))
            for index, drawn in zip(asked, draw(positions), strict=True):
                drafts[index].append(drawn)
                fresh[index] = drawn.tokens
        results = []
        for steps in drafts:
            chances = [step.chances for step in steps if step.chances is not None]
            q = torch.cat(chances) if chances and not self.invariant else None
            results.append(DraftTokens([token for step in steps for token in step.tokens], q))
        return results

    def _read(self, fresh: dict[int, list[int]]) -> dict[int, Tensor]:
        """Read the fresh tokens of each slot, and return the logits (1, V) after them."""
        first, end = min(fresh), max(fresh) + 1
        counts = [len(fresh.get(slot, ())) for slot in range(first, end)]
        tokens = torch.zeros(end - first, max(counts), dtype=torch.int64)
        for slot, own in fresh.items():
            tokens[slot - first, : len(own)] = torch.tensor(own)
        logits = self.model.read(tokens, self.cache, rows=slice(first, end), counts=counts)
        return {slot: logits[slot - first, len(own) - 1 : len(own)] for slot, own in fresh.items()}
