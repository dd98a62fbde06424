"""A smaller model as the drafter: it generates tokens one by one, and the large model verifies them at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoestring.decode.adapter import Adapter
from shoestring.decode.drafters.base import Drafter, DraftTokens
from shoestring.decode.drawing import Drawn, Positions, draw
from shoestring.decode.randomness import Purpose, key
from shoestring.decode.settings import Speculation
from shoestring.decode.window import common, window_start

if TYPE_CHECKING:
    from shoestring.decode.request import Row

CHUNK = 512
"""Tokens that are read in one pass."""
SHORT = 8
"""Unread tokens that are read together with the first draft; logits of more would be computed for nothing."""


@dataclass
class _Held:
    """What a row of the cache holds: `history[begin:verified]`, and then `drafted`."""

    history: list[int] = field(default_factory=list)
    begin: int = 0
    verified: int = 0
    drafted: list[int] = field(default_factory=list)

    def kept(self, history: list[int], begin: int) -> int:
        """How many tokens of `history` from `begin` on it holds; a text that grew is compared where it did."""
        if begin == self.begin and history is self.history:
            return self.verified - begin + common(self.drafted, history[self.verified :])
        if begin == self.begin:
            return common([*self.history[begin : self.verified], *self.drafted], history[begin:])
        return 0


class ModelDrafter(Drafter):
    """Drafts by a model with a cache of its own, for all rows of a batch at once.

    Rejected tokens are forgotten, and tokens that it has not read are read in one pass with the first draft. It samples
    as the request does: where verification is invariant, by the random numbers of the text itself.
    """

    def __init__(self, model: Adapter, slots: int, speculation: Speculation, room: int | None = None) -> None:
        self.model, self.invariant = model, speculation.verification == "invariant"
        self.window = min(model.context, (room or model.context) + speculation.max_draft_length)
        self.margin = min(speculation.max_draft_length, self.window // 2)
        self.cache = model.new_cache(slots, self.window)
        self.held = [_Held() for _ in range(slots)]
        model.model.eval()

    def draft(self, rows: Sequence[Row], counts: Sequence[int]) -> list[DraftTokens]:
        """One pass for each token of the longest draft, over the rows that still want one."""
        drafts: list[list[Drawn]] = [[] for _ in rows]
        wanted = [min(count, self.margin) for count in counts]
        asked = [index for index, count in enumerate(wanted) if count]
        fresh = {index: self._catch_up(rows[index]) for index in asked}
        for step in range(max(wanted, default=0)):
            asked = [index for index in asked if wanted[index] > step]
            logits = self._read({rows[index].slot: fresh[index] for index in asked})
            positions = [self._positions(rows[index], drafts[index], logits[rows[index].slot]) for index in asked]
            for index, drawn in zip(asked, draw(positions), strict=True):
                drafts[index].append(drawn)
                fresh[index] = drawn.tokens
        for row, drawn in zip(rows, drafts, strict=True):
            if drawn:  # the last token was not read
                self.held[row.slot].drafted = [token for each in drawn[:-1] for token in each.tokens]
        return [self._result(row, drawn) for row, drawn in zip(rows, drafts, strict=True)]

    def _catch_up(self, row: Row) -> list[int]:
        """Forget what is not in the text, and read what is new but for the last tokens, which are returned."""
        history, held = row.history, self.held[row.slot]
        begin = row.begin + window_start(len(history) - row.begin + self.margin, self.window)
        kept = min(held.kept(history, begin), len(history) - begin - 1)
        self.cache.lengths[row.slot] = kept
        self.held[row.slot] = _Held(history, begin, len(history))
        unread = history[begin + kept :]
        while len(unread) > SHORT:
            piece, unread = unread[: min(CHUNK, len(unread) - 1)], unread[min(CHUNK, len(unread) - 1) :]
            place = slice(row.slot, row.slot + 1)
            self.model.read(torch.tensor([piece]), self.cache, rows=place, wanted="last")
        return unread

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
