"""Drafters that read one drafted token after the other, as plain decoding would."""

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
from shoestring.decode.settings import Speculation
from shoestring.models.cache import KVCache

if TYPE_CHECKING:
    from shoestring.decode.engine import Row


class StepwiseDrafter(Drafter):
    """Samples from a model as the request does: where verification is invariant, by the random numbers of the text."""

    model: Adapter
    cache: KVCache

    def __init__(self, speculation: Speculation) -> None:
        self.invariant = speculation.verification == "invariant"

    @abstractmethod
    def _unread(self, row: Row) -> list[int]:
        """The tokens at the end of a text that the cache does not hold."""

    def draft(self, rows: Sequence[Row], counts: Sequence[int]) -> list[DraftTokens]:
        """One pass for each token of the longest draft, over the rows that still want one."""
        drafts: list[list[Drawn]] = [[] for _ in rows]
        asked = [index for index, count in enumerate(counts) if count]
        fresh = {index: self._unread(rows[index]) for index in asked}
        for step in range(max(counts, default=0)):
            asked = [index for index in asked if counts[index] > step]
            logits = self._read({rows[index].slot: fresh[index] for index in asked})
            positions = [self._positions(rows[index], drafts[index], logits[rows[index].slot]) for index in asked]
            for index, drawn in zip(asked, draw(positions), strict=True):
                drafts[index].append(drawn)
                fresh[index] = drawn.tokens
        return [self._result(row, drawn) for row, drawn in zip(rows, drafts, strict=True)]

    def _read(self, fresh: dict[int, list[int]]) -> dict[int, Tensor]:
        """The logits (1, V) that follow the fresh tokens of each slot."""
        first, end = min(fresh), max(fresh) + 1
        counts = [len(fresh.get(slot, ())) for slot in range(first, end)]
        tokens = torch.zeros(end - first, max(counts), dtype=torch.int64)
        for slot, own in fresh.items():
            tokens[slot - first, : len(own)] = torch.tensor(own)
        logits = self.model.read(tokens, self.cache, rows=slice(first, end), counts=counts)
        return {slot: logits[slot - first, len(own) - 1 : len(own)] for slot, own in fresh.items()}

    def _positions(self, row: Row, drawn: Sequence[Drawn], logits: Tensor) -> Positions:
        text = [*row.history, *(token for each in drawn for token in each.tokens)] if drawn else row.history
        seed, start = row.request.sampling.seed, len(row.history)
        if self.invariant:
            own = key(seed, Purpose.TEXT, len(text))
        else:
            own = key(seed, Purpose.DRAFT, len(text), start)
        return Positions(logits, text, row.request.sampling, [own])

    def _result(self, row: Row, drawn: Sequence[Drawn]) -> DraftTokens:
        tokens = [token for each in drawn for token in each.tokens]
        chances = [each.chances for each in drawn if each.chances is not None]
        return DraftTokens(tokens, torch.cat(chances) if chances and not self.invariant else None)
